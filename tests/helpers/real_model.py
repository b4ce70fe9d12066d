"""Bundles of real, untrained models of every kind: what exports are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers.label_vectors import label_vectors

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import BundleLabels, Facts, Scoring, write_bundle
from unidec.config import Encoder, Model
from unidec.data.storage import write_folder
from unidec.methods.assembly import additions
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.ranking.index import LabelIndex

LABELS = [
    "river engine",
    "music window",
    "garden",
    "planet bread letter",
    "river river w1",
    "music w17 label",
]
# of all lengths: cut at 16 tokens, of one piece and of many, empty, of characters that the
# tokenizer does not know
TEXTS = [
    "river",
    "music engine w3 w44",
    "",
    "gardenmusic planetriver breadwindowletter",
    "☃ é river",
    "w1 " * 40,
    "letter planet window bread garden river engine music w1 w2 w3 w4 w5 w6 w7",
]


def real_bundle(
    folder: Path,
    source: Path,
    *,
    heads: str = "both",
    space: str | None = None,
    clf_normalize: bool = False,
    clf_bias: bool = False,
    clf_weight: float = 0.8,
    dim: int = 24,
    unit_length: bool = True,
    query_head: bool = False,
    max_length: int = 16,
    served: int | None = None,
    **encoder: Any,
) -> Bundle:
    """A bundle of `LABELS` on the tiny transformer in `source`, every weight random; loaded.
    Another width than 24 is the encoder's: without projection. The first `served` dimensions of the
    heads are in the bundle; None: all.
    """
    settings = Encoder(name=str(source), dropout=0.0, bag_dropout=0.0, **encoder)
    options = Model(
        heads=heads,
        dim=dim,
        projection=dim == 24,
        normalize=unit_length,
        query_head=query_head,
        dropout=0.0,
        clf_bias=clf_bias,
    )  # type: ignore[arg-type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = UniDEC.create(
            settings,
            options,
            len(LABELS),
            source,
            num_tokens=0,
            params={"tokens": {"max_length": max_length}},
            add=additions,
        ).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not name.startswith("encoder.transformer."):
                    parameter.copy_(torch.randn_like(parameter) * 0.3)
            for table in model.tables().values():
                table.weight.copy_(torch.randn_like(table.weight) * 0.3)
    with write_folder(folder / "model", KIND, VERSION) as out:
        model.save_into(out)
    de_LD, (clf_LD, bias_L) = (
        model.encode_labels(model.tokens(LABELS, "labels")),
        model.classifier_table(),
    )
    if served is not None:
        de_LD, clf_LD = (cut(de_LD, served, unit_length), cut(clf_LD, served, False))
    space = space or heads
    index = LabelIndex.build(label_vectors(de_LD, clf_LD, bias_L, space, clf_normalize))
    write_bundle(
        folder / "bundle",
        folder / "model",
        index,
        BundleLabels(
            [f"L{row}" for row in range(len(LABELS))],
            LABELS,
            {"de": de_LD, "clf": clf_LD, "bias": bias_L},
        ),
        Scoring(space, clf_weight, clf_normalize),
        Facts(dataset={"name": "tiny", "sha256": "0" * 64}),
    )
    return Bundle.load(folder / "bundle")


def cut(vectors: np.ndarray | None, width: int, is_unit: bool) -> np.ndarray | None:
    """The first dimensions of vectors, row by row, scaled to unit length with `is_unit`."""
    if vectors is None:
        return None
    rows = [row[:width] / (np.linalg.norm(row[:width]) if is_unit else 1) for row in vectors]
    return np.stack(rows).astype(np.float32)


def one_by_one(bundle: Bundle, texts: list[str]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Both heads of each text alone, by the model itself."""
    rows = []
    for text in texts:
        tokens = bundle.model.tokens([text], "queries")
        rows.append(bundle.model.encode_queries(tokens, np.arange(1)))
    de, clf = zip(*rows, strict=True)
    return tuple(None if part[0] is None else np.concatenate(part) for part in (de, clf))
