"""A real bundle of a few hundred labels, made in a second, for tests that start a real server.

UniDEC with a bag of tokens (kind `both`: and a transformer), untrained: a label is found by the
words of its title. Both heads; training queries vote."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from helpers.label_vectors import label_vectors
from helpers.tiny_transformer import write_word_transformer
from scipy.sparse import csr_matrix

from unidec.bundle.bundle_folder import BundleLabels, Facts, Scoring, write_bundle
from unidec.bundle.bundle_info import KnnInfo
from unidec.config import Encoder, Model
from unidec.data.storage import write_folder
from unidec.data.tokens import encode_texts
from unidec.model.first_rows import start_table
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours

WORDS = [
    f"{a}{b}"
    for a in ("red", "blue", "old", "new", "big")
    for b in ("car", "boat", "house", "tree", "lamp")
]
NUM_QUERIES = 60


def text(row: int) -> str:
    """Three words that no other row below 625 has."""
    a, b = divmod(row, len(WORDS))
    places = (b, b + a + 1, 3 * b + 7 * a + 2)
    return " ".join(WORDS[place % len(WORDS)] for place in places)


def make_served_bundle(
    folder: Path,
    num_labels: int = 400,
    seed: int = 0,
    votes: bool = True,
    kind: Literal["bag", "both"] = "bag",
) -> Path:
    """Write `folder/bundle`; another seed gives other vectors, so that answers differ in their
    scores.

    Uids are L0, L1, ... and titles `text(row)`; the first titles are also the queries that vote,
    for their own label."""
    import torch

    source = write_word_transformer(folder / "source", WORDS, seed=seed)
    titles = [text(row) for row in range(num_labels)]
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    model = UniDEC.create(
        Encoder(kind=kind, trainable_layers=0),
        Model(dim=16, dropout=0.0),
        num_labels,
        source,
        len(WORDS) + 2,
        {"tokens": {"max_length": 8}},
    ).eval()
    x_LW = torch.from_numpy(rng.normal(size=(num_labels, model.encoder.width)).astype(np.float32))
    start_table(model, lambda rows: x_LW[rows])
    with write_folder(folder / "model", KIND, VERSION) as out:
        model.save_into(out)
    tokens = encode_texts(titles, source, 8)
    de_LD, (clf_LD, bias_L) = model.encode_labels(tokens), model.classifier_table()
    num = min(NUM_QUERIES, num_labels)
    neighbours = None
    if votes:
        de_MD, _ = model.encode_queries(tokens, np.arange(num))
        of_ML = csr_matrix(
            (np.ones(num, dtype=bool), (np.arange(num), np.arange(num))), shape=(num, num_labels)
        )
        neighbours = Neighbours(de_MD, of_ML, [f"Q{i}" for i in range(num)], titles[:num])
    return write_bundle(
        folder / "bundle",
        folder / "model",
        LabelIndex.build(label_vectors(de_LD, clf_LD, bias_L, "both", True)),
        BundleLabels(
            [f"L{row}" for row in range(num_labels)],
            titles,
            {"de": de_LD, "clf": clf_LD, "bias": bias_L},
        ),
        Scoring("both", 0.3, True, None if neighbours is None else KnnInfo.of(neighbours, 0.2, 5)),
        Facts(dataset={"name": "served", "sha256": f"{seed:064x}"}),
        neighbours,
    )
