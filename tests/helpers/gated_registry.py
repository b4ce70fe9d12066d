"""A registry of real bundles, each made in a moment and as good or bad as a test wants it, and a
data set for them.

Labels are three words; a query is the text of its label, so a bundle that embeds labels as their
texts is right always."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from helpers.tiny_transformer import write_word_transformer
from scipy.sparse import csr_matrix

from unidec.config import Encoder, Gate, Model, Params, Tracking
from unidec.data.dataset import write_dataset
from unidec.data.profile import text_hashes
from unidec.data.propensity import build_propensity
from unidec.data.raw import RawData, text_table
from unidec.data.storage import folder_sha256
from unidec.pipeline.seen import RECORD, SEEN_KEY
from unidec.tracking.store import open_client, prepare_store

WORDS = [
    f"{a}{b}"
    for a in ("red", "blue", "old", "new", "big")
    for b in ("car", "boat", "house", "tree", "lamp")
]
NUM_LABELS = 60
NUM_TEST = 240


def label_text(label: int) -> str:
    a, b = divmod(label, len(WORDS))
    return (
        f"{WORDS[b]} {WORDS[(7 * b + a + 1) % len(WORDS)]} "
        f"{WORDS[(3 * b + 5 * a + 2) % len(WORDS)]}"
    )


def make_raw(num_labels: int = NUM_LABELS, num_test: int = NUM_TEST, first: int = 0) -> RawData:
    """Labels L<first>...; the first third has many training queries (head), the last third few
    (tail).
    """
    labels = np.arange(first, first + num_labels)
    often = np.repeat(
        np.arange(num_labels), np.where(np.arange(num_labels) < num_labels // 3, 12, 2)
    )

    def split(name: str, of: np.ndarray) -> tuple[pa.Table, csr_matrix, csr_matrix]:
        uids = [f"{name}-{i}" for i in range(len(of))]
        table = text_table(uids, [label_text(int(labels[row])) for row in of], [""] * len(of))
        shape = (len(of), num_labels)
        relevant = csr_matrix(
            (np.ones(len(of), dtype=np.float32), (np.arange(len(of)), of)), shape=shape
        )
        # the first queries may not be given the label after theirs
        some = np.arange(min(5, len(of)))
        filtered = csr_matrix(
            (np.ones(len(some), dtype=bool), (some, (of[some] + 1) % num_labels)), shape=shape
        )
        return table, relevant, filtered

    parts = {
        "train": split("train", often),
        "test": split("test", np.arange(num_test) % num_labels),
    }
    return RawData(
        "toy",
        {name: part[0] for name, part in parts.items()},
        text_table(
            [f"L{i}" for i in labels], [label_text(int(i)) for i in labels], [""] * num_labels
        ),
        {name: part[1] for name, part in parts.items()},
        {name: part[2] for name, part in parts.items()},
    )


def make_bundle(
    folder: Path,
    name: str,
    *,
    wrong: Collection[int] = (),
    labels: Collection[int] = range(NUM_LABELS),
    junk: int = 0,
    padding: int = 0,
    trained_on: Collection[str] | None = None,
) -> Path:
    """A bundle that is right about all its labels but the `wrong` ones, whose names are passed
    around in a ring.

    Args:
        labels: numbers of the labels it knows. junk: labels more that no data set has: slower,
        larger.
        padding: characters more in each title: larger.
        trained_on: texts of the training queries that it has on record; None: none.
    """
    import torch

    from unidec.bundle.bundle_folder import BundleLabels, Scoring, write_bundle
    from unidec.data.storage import write_folder
    from unidec.data.tokens import encode_texts
    from unidec.model.unidec import KIND, VERSION, UniDEC
    from unidec.ranking.index import LabelIndex

    source = folder / "made" / "source"
    if not source.is_dir():
        write_word_transformer(source, WORDS)
    known = list(labels)
    texts = [label_text(label) for label in known]
    uids = [f"L{label}" for label in known]
    ring = [i for i, label in enumerate(known) if label in wrong]
    for i, following in zip(ring, [*ring[1:], *ring[:1]], strict=True):
        uids[i] = f"L{known[following]}"
    torch.manual_seed(0)
    model = UniDEC.create(
        Encoder(kind="bag"),
        Model(dim=16, dropout=0.0, heads="de"),
        len(known) + junk,
        source,
        len(WORDS) + 2,
        {"tokens": {"max_length": 8}},
    ).eval()
    place = folder / "made" / name
    with write_folder(place / "model", KIND, VERSION) as out:
        model.save_into(out)
        if trained_on is not None:
            np.save(
                out.path / RECORD,
                np.unique(text_hashes(pa.array(trained_on, pa.large_string()))),
            )
            out.meta[SEEN_KEY] = {"text": "title", "complete": True}
    de_LD = model.encode_labels(encode_texts(texts, source, 8))
    if junk:
        more = np.random.default_rng(1).normal(size=(junk, de_LD.shape[1])).astype(np.float32)
        de_LD = np.concatenate([de_LD, more / np.linalg.norm(more, axis=1, keepdims=True)])
        uids = uids + [f"junk-{i}" for i in range(junk)]
        texts = texts + ["junk"] * junk
    titles = [text + " " * bool(padding) + "x" * padding for text in texts]
    write_bundle(
        place / "artifacts" / "bundle",
        place / "model",
        LabelIndex.build(de_LD),
        BundleLabels(uids, titles, {"de": de_LD}),
        Scoring("de", 1.0, True),
    )
    shutil.rmtree(place / "model")
    return place


class GatedRegistry:
    """The working folder, a registry in it, and what makes bundles and versions."""

    def __init__(self, folder: Path, store: Path, name: str = "gated") -> None:
        self.folder = folder
        self.name = name
        self.uri = prepare_store(f"sqlite:///{store}/mlflow.db")
        self.client = open_client(self.uri)
        self.client.create_registered_model(name)

    def data(self, raw: RawData | None = None) -> None:
        """data/dataset and data/propensity."""
        dataset = write_dataset(
            self.folder / "data" / "dataset", raw or make_raw(), validation_share=0.0
        )
        build_propensity(dataset, 0.55, 1.5, self.folder / "data" / "propensity")

    def params(self, **gate: Any) -> Params:
        return Params(gate=Gate(**gate), tracking=Tracking(model_name=self.name), device="cpu")

    def bundle(self, name: str, **options: Any) -> Path:
        """`make_bundle` in this folder."""
        return make_bundle(self.folder, name, **options)

    def version(self, place: Path, alias: str | None = "challenger", **tags: str) -> str:
        """A bundle as a version, as registration leaves it."""
        about = {
            "bundle.sha256": folder_sha256(place / "artifacts" / "bundle"),
            "git.dirty": "false",
            "dataset.sha256": "d" * 64,
            "dataset.name": "toy",
            "mlflow.source.git.commit": "c" * 40,
        }
        tags = {key.replace("__", "."): value for key, value in tags.items()}
        number = str(
            self.client.create_model_version(
                self.name, source=place.as_uri(), tags=about | tags
            ).version
        )
        if alias:
            self.client.set_registered_model_alias(self.name, alias, number)
        return number

    def tags(self, number: str) -> dict[str, str]:
        return dict(self.client.get_model_version(self.name, number).tags)

    def aliases(self) -> dict[str, str]:
        found = self.client.get_registered_model(self.name).aliases
        return {alias: str(version) for alias, version in found.items()}
