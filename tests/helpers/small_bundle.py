"""A real bundle of four labels, made in a moment."""

from __future__ import annotations


def write_small_bundle(
    folder, titles=("a text editor", "an image editor", "a music player", "a web server")
):
    """A bundle of an untrained bag encoder with words of its own, a few kilobytes in size."""
    import numpy as np
    import torch
    from helpers.label_vectors import label_vectors
    from helpers.tiny_transformer import write_word_transformer

    from unidec.bundle.bundle_folder import BundleLabels, Scoring, write_bundle
    from unidec.config import Encoder, Model
    from unidec.data.storage import write_folder
    from unidec.data.tokens import encode_texts
    from unidec.model.first_rows import start_table
    from unidec.model.unidec import KIND, VERSION, UniDEC
    from unidec.ranking.index import LabelIndex

    words = sorted({word for title in titles for word in title.split()})
    source = write_word_transformer(folder / "source", words, hidden=8)
    model = UniDEC.create(
        Encoder(kind="bag"),
        Model(dim=4, dropout=0.0),
        len(titles),
        source,
        len(words) + 2,
        {"tokens": {"max_length": 8}},
    ).eval()
    tokens = encode_texts(list(titles), source, 8)
    x_LW = torch.from_numpy(
        np.random.default_rng(0).normal(size=(len(titles), 8)).astype(np.float32)
    )
    start_table(model, lambda rows: x_LW[rows])
    with write_folder(folder / "model", KIND, VERSION) as out:
        model.save_into(out)
    de_LD, (clf_LD, bias_L) = model.encode_labels(tokens), model.classifier_table()
    return write_bundle(
        folder / "bundle",
        folder / "model",
        LabelIndex.build(label_vectors(de_LD, clf_LD, bias_L, "both", True)),
        BundleLabels(
            [title.split()[1] + "-" + title.split()[2] for title in titles],
            titles,
            {"de": de_LD, "clf": clf_LD, "bias": bias_L},
        ),
        Scoring("both", 0.1, True),
    )
