"""A bundle small enough to check by hand: a model that averages word vectors, twelve labels, both
heads.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from helpers.label_vectors import label_vectors
from scipy.sparse import csr_matrix

from unidec.bundle import predict_file as files
from unidec.bundle.bundle_folder import BundleLabels, Facts, Scoring, write_bundle
from unidec.bundle.bundle_info import KnnInfo
from unidec.config.index_spec import IndexSpec, Kind
from unidec.data.storage import write_folder
from unidec.data.tokens import Tokens, encode_texts
from unidec.model.words import WordSpace
from unidec.ranking.fusion import BY_WORDS, FEATURES, Fusion, Network
from unidec.ranking.heads import unit_rows
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.ranker import Calibration
from unidec.ranking.word_scores import WORD_FEATURES

WORDS = ["red", "green", "blue", "car", "boat", "house", "old", "new", "big"]
TITLES = [
    "red car",
    "green car",
    "blue car",
    "red boat",
    "green boat",
    "blue boat",
    "old house",
    "new house",
    "big house",
    "old red house",
    "big blue boat",
    'größer, "neu"\nund <b>rot</b> 🚗',
]
UIDS = [f"L{i}" for i in range(len(TITLES))]
DIM = 6


class StubModel:
    """What `Bundle` needs of UniDEC."""

    heads = "both"

    def __init__(self, path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        self.heads = config["heads"]
        self.num_labels = config["num_labels"]
        self.settings = SimpleNamespace(dim=DIM)
        self.tokenizer_folder = path / "tokenizer"
        self.max_length = 8
        self.words_2VD = np.load(path / "words.npy", allow_pickle=False)

    def tokens(self, texts, side):
        return encode_texts(texts, self.tokenizer_folder, self.max_length)

    def _mean(self, head: int, tokens: Tokens, rows: np.ndarray) -> np.ndarray:
        ids, mask = tokens.batch(rows)
        summed = (self.words_2VD[head][ids] * mask[..., None]).sum(axis=1)
        return (summed / np.maximum(mask.sum(axis=1, keepdims=True), 1)).astype(np.float32)

    def encode_queries(self, tokens: Tokens, rows: np.ndarray | None = None, batch_size: int = 256):
        rows = np.arange(len(tokens)) if rows is None else rows
        de = unit_rows(self._mean(0, tokens, rows)) if self.heads != "clf" else None
        return de, self._mean(1, tokens, rows) if self.heads != "de" else None


def write_model(path: Path, rng: np.random.Generator, heads: str = "both") -> Path:
    """A folder that `StubModel` reads, with the records of a training beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(["[UNK]", "[PAD]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with write_folder(path, "model", 1) as out:
        (out.path / "tokenizer").mkdir()
        tokenizer.save(str(out.path / "tokenizer" / "tokenizer.json"))
        np.save(
            out.path / "words.npy", rng.normal(size=(2, len(vocabulary), DIM)).astype(np.float32)
        )
        (out.path / "config.json").write_text(
            json.dumps({"heads": heads, "num_labels": len(TITLES)})
        )
        (out.path / "history.jsonl").write_text(json.dumps({"seconds": rng.random()}))
    return path


def tiny_neighbours(
    model: StubModel,
    rng: np.random.Generator,
    by_words: bool,
    num: int = 30,
    word_head: int = 0,
) -> Neighbours:
    """Training queries of three words each (the first without any) with some labels (the second and
    third without).

    No two have the same words: which of two that are equally near votes would be chance.
    """
    of_three = list(itertools.combinations_with_replacement(WORDS, 3))
    texts = ["", *(" ".join(of_three[i]) for i in rng.permutation(len(of_three))[: num - 1])]
    labels_ML = rng.random((num, len(TITLES))) < 0.15
    labels_ML[1:3] = False
    tokens = encode_texts(texts, model.tokenizer_folder, 8)
    de, clf = model.encode_queries(tokens, np.arange(num))
    uids = [f"Q{i}" for i in range(num)]
    if by_words:
        flat, offsets = tokens.ragged(np.arange(num))
        space = WordSpace.fit(model.tokenizer_folder, [(flat, offsets)], word_head)
        titles = encode_texts(TITLES, model.tokenizer_folder, 8)
        label_words = space.vectors(*titles.ragged(np.arange(len(TITLES))))
        return Neighbours(
            space.vectors(flat, offsets),
            csr_matrix(labels_ML),
            uids,
            texts,
            space,
            label_words,
        )
    return Neighbours(de if de is not None else clf, csr_matrix(labels_ML), uids, texts)


def write_tiny_bundle(
    path: Path,
    rng: np.random.Generator,
    *,
    heads: str = "both",
    space: str = "both",
    kind: Kind = "flat",
    clf_normalize: bool = True,
    bias: bool = False,
    clf_weight: float = 0.5,
    votes: bool = False,
    knn_weight: float = 0.7,
    knn_neighbours: int = 7,
    by_words: bool = False,
    fused: bool = False,
    stacked: bool = False,
    word_head: int = 0,
    calibration: Calibration | None = None,
) -> dict:
    """Write model and bundle beside each other; returns what it was made of; with `votes` training
    queries vote; with `fused` a fusion of random weights ranks, with `stacked` one that reads a
    network by words, `word_head` first words too.
    """
    model_path = write_model(path.parent / "model", rng, heads)
    model = StubModel(model_path)
    tokens = encode_texts(TITLES, model.tokenizer_folder, model.max_length)
    de_LD = unit_rows(model._mean(0, tokens, np.arange(len(TITLES)))) if heads != "clf" else None
    clf_LD = rng.normal(size=(len(TITLES), DIM)).astype(np.float32) if heads != "de" else None
    bias_L = rng.normal(size=len(TITLES)).astype(np.float32) if bias else None
    vectors_LD = label_vectors(de_LD, clf_LD, bias_L, space, clf_normalize)
    index = LabelIndex.build(vectors_LD, IndexSpec(kind=kind))
    neighbours = tiny_neighbours(model, rng, by_words, word_head=word_head) if votes else None
    head = "clf" if heads == "clf" else "de"
    knn = None if neighbours is None else KnnInfo.of(neighbours, knn_weight, knn_neighbours, head)
    fusion = random_fusion(rng, stacked, word_head) if fused else None
    facts = Facts(
        "title", {"name": "tiny", "sha256": "0" * 64}, {"validation": {"P@1": 50.0}}, {"seed": 0}
    )
    write_bundle(
        path,
        model_path,
        index,
        BundleLabels(UIDS, TITLES, {"de": de_LD, "clf": clf_LD, "bias": bias_L}),
        Scoring(space, clf_weight, clf_normalize, knn, fusion, calibration),
        facts,
        neighbours,
    )
    return {
        "de_LD": de_LD,
        "clf_LD": clf_LD,
        "bias_L": bias_L,
        "model": model,
        "neighbours": neighbours,
    }


def random_fusion(rng: np.random.Generator, by_words: bool = False, word_head: int = 0) -> Fusion:
    """Random weights; `by_words`: with a network that ranks by words, `word_head`: which reads
    first words too.
    """
    words = (
        Network(**random_layers(rng, len(WORD_FEATURES) * (2 if word_head else 1)))
        if by_words
        else None
    )
    num = len(FEATURES) + (len(BY_WORDS) if by_words else 0)
    return Fusion(**random_layers(rng, num), propensity=(0.55, 1.5), words=words)


def random_layers(rng: np.random.Generator, num: int, hidden: int = 5) -> dict[str, Any]:
    """Fields of a `Network` of random weights."""
    rows = rng.normal(size=(hidden, num)).tolist()
    mean, linear = rng.normal(size=(2, num)).tolist()
    bias, out = rng.normal(size=(2, hidden)).tolist()
    scale = rng.uniform(0.5, 2, num).tolist()
    return {
        "mean": mean,
        "scale": scale,
        "linear": linear,
        "hidden": rows,
        "hidden_bias": bias,
        "out": out,
    }


def recall_with_ties(
    labels: np.ndarray, exact: np.ndarray, scores: np.ndarray, exact_scores: np.ndarray
) -> float:
    """As `recall`, but a label that scores as much as the last exact one counts as found: which of
    them is chance.
    """
    last = exact_scores.min(axis=1, keepdims=True)
    found = (scores >= last - 1e-5 * np.maximum(1.0, np.abs(last))) & (labels >= 0)
    found |= np.stack([np.isin(row, wanted) for row, wanted in zip(labels, exact, strict=True)])
    return float(np.minimum(found.sum(axis=1), exact.shape[1]).sum() / exact.size)


def predict_file(
    bundle: Any, source: Path, target: Path, k: int = 5, shards: int | None = None, **options: Any
) -> int:
    """`predict_file` with the options of a `FileRequest`. Torch encodes, as in the stub."""
    options = {"runtime": "torch"} | options
    request = files.FileRequest(str(bundle.path), str(source), str(target), k, **options)
    return files.predict_file(request, shards)
