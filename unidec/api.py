"""Train, load and use a model in a few lines, without a server, an MLflow store or params.yaml.

import unidec

model = unidec.fit(queries, labels, pairs)
model.predict(["brushes for painting"], k=5)
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix

from unidec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from unidec.data.raw import RawData
    from unidec.retrieval.answer import Explanation
    from unidec.retrieval.query_encoder import Runtime


class Label(NamedTuple):
    """A predicted label.

    Attributes:
        uid: the label's id in the data.
        text: the label's text.
        score: the score that labels are ranked by; comparable within one query only.

    Example:
        >>> uid, text, score = model.predict(["brushes for painting"], k=1)[0][0]
    """

    uid: str
    text: str
    score: float


class Model:
    """A trained model, opened from a bundle's folder. Predicting is thread-safe.

    Args:
        folder: the bundle's folder.
        runtime: runtime of the query encoder: "auto" (the fastest that keeps quality), "torch", "onnx" or "onnx-int8".

    Raises:
        ArtifactError: the bundle is missing or damaged.

    Example:
        >>> model = unidec.load("outputs/bundle")
        >>> model.predict(["brushes for painting"], k=1)
        [[Label(uid=..., text=..., score=...)]]
    """

    def __init__(self, folder: str | Path, runtime: Runtime = "auto") -> None:
        from unidec.retrieval.answer import Answerer

        self.folder, self.runtime = Path(folder), runtime
        self._answerer = Answerer.open(folder, runtime)

    @property
    def num_labels(self) -> int:
        """Number of labels that the model can predict."""
        return self._answerer.bundle.num_labels

    def predict(
        self,
        texts: Sequence[str],
        k: int = 5,
        *,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] = (),
        min_score: float | None = None,
        tail: float = 0.0,
    ) -> list[list[Label]]:
        """The labels with the highest scores for each text, best first.

        Args:
            texts: queries.
            k: maximum number of labels per query.
            allow: uids of the only labels that may be predicted; None: all.
            deny: uids of labels that are never predicted.
            min_score: labels with a lower score are dropped.
            tail: above 0 ranks rare labels higher, below 0 lower; only for models with a learnt fusion.

        Raises:
            DataError: a query is not a string, or k is below 1.
        """
        from unidec.retrieval.answer import Request

        chosen = None if allow is None else tuple(allow)
        requests = [Request(text, k, chosen, tuple(deny), min_score, tail=tail) for text in _list_of_texts(texts)]
        found = self._answerer.answer(requests)
        return [[Label(*row) for row in zip(p.labels, p.titles, p.scores, strict=True)] for p in found]

    def explain(self, text: str, k: int = 5) -> Explanation:
        """Explain the labels of a text: the score of each part of the model, and similar training queries."""
        from unidec.retrieval.answer import Request

        return self._answerer.explain(Request(text, k))

    def evaluate(self, queries: Any, pairs: Any) -> dict[str, float]:
        """P@k, nDCG@k and R@k in percent, on queries with known labels; queries without labels are skipped.

        Args:
            queries, pairs: as in `fit`; `pairs` names labels by uid, or by column if it is a matrix.

        Raises:
            DataError: no query has a known label.
        """
        from unidec.evaluation.metrics import evaluate

        query_texts = _texts(queries, "queries")
        row_of = self._answerer.bundle.row_of
        truth = _pairs(pairs, list(query_texts), list(row_of))
        rows = np.flatnonzero(np.diff(truth.indptr))
        if not len(rows):
            raise DataError("nothing to evaluate on: no query has a label", where="pairs")
        texts = list(query_texts.values())
        found = self.predict([texts[row] for row in rows], min(100, self.num_labels))
        predicted = np.full((len(rows), 100), -1, dtype=np.int64)
        for row, answer in enumerate(found):
            predicted[row, : len(answer)] = [row_of[label.uid] for label in answer]
        nothing = np.ones(self.num_labels), np.zeros(self.num_labels, dtype=np.int64)
        figures = evaluate(predicted, truth[rows].astype(bool), *nothing)
        return {name: value for name, value in figures.items() if "/" not in name and not name.startswith("PS")}

    def change_labels(
        self,
        folder: str | Path,
        *,
        add: Mapping[str, str] | None = None,
        remove: Sequence[str] = (),
        update: Mapping[str, str] | None = None,
    ) -> Model:
        """Return a model with a changed label set, without training; this model is not modified.

        Args:
            folder: folder of the new bundle; must differ from this model's.
            add, update: text by uid.
            remove: uids.

        Raises:
            DataError: a uid is unknown, or already exists.
            ConfigError: the folder is this model's own.
        """
        from unidec.retrieval.label_change import LabelChange, LabelText, with_labels

        bundle = self._answerer.bundle
        added, updated = ([LabelText(*item) for item in (texts or {}).items()] for texts in (add, update))
        change = LabelChange.edit(bundle, added, list(remove), updated)
        return Model(with_labels(bundle, folder, change), self.runtime)

    def save(self, folder: str | Path) -> Path:
        """Copy the model to a new folder, which `unidec.load` opens.

        Raises:
            ConfigError: the folder exists.
        """
        target = Path(folder)
        if target.exists():
            raise ConfigError("exists already", where=str(target), fix="remove it, or name another folder")
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}-") as scratch:
            shutil.copytree(self.folder, Path(scratch) / "bundle").rename(target)
        return target


def load(source: str | Path, runtime: Runtime = "auto") -> Model:
    """Open a model.

    Args:
        source: a bundle's folder, `models:/name@alias` or `models:/name/version`.
        runtime: see `Model`.

    Raises:
        ArtifactError: the bundle is missing or damaged.
        ConfigError: the registry has no such model.

    Example:
        >>> model = unidec.load("outputs/bundle")
    """
    if not str(source).startswith("models:"):
        return Model(source, runtime)
    from unidec.tracking.fetch import bundle_folder

    return Model(bundle_folder(str(source)), runtime)


def fit(
    queries: Any,
    labels: Any,
    pairs: Any,
    *,
    recipe: str = "unidec",
    folder: str | Path | None = None,
    params: Mapping[str, Any] | None = None,
    runtime: Runtime = "auto",
) -> Model:
    """Train a model, with progress on a terminal or in a notebook.

    Args:
        queries, labels: a list of texts, a mapping of uid to text, or a DataFrame with a column `text` and, unless its
            index holds the uids, `id`. The uid of a list entry is its position.
        pairs: (query, label) of each relevant pair, by uid, or by position for lists; a DataFrame with the columns
            query_id and label_id; or a sparse matrix [queries, labels].
        recipe: name of a shipped recipe; `unidec config keys` lists them.
        folder: folder for data, checkpoints and the bundle; the same call with the same folder resumes a training that
            was killed. None: a temporary folder, from which `model.save` copies the model.
        params: other parameters by key: {"optim.epochs": 3}.
        runtime: see `Model`.

    Raises:
        DataError: the data cannot be trained on. ConfigError: an unknown parameter, or too little memory.

    Example:
        >>> model = unidec.fit(queries, labels, pairs)
        >>> model.num_labels == len(labels)
        True
    """
    from unidec.config import load_params

    loaded = load_params(None, {"recipe": recipe, **(params or {})})
    raw = _raw_data(queries, labels, pairs)
    from unidec import pipeline
    from unidec.data.dataset import write_dataset
    from unidec.pipeline import paths

    place = Path(folder) if folder is not None else Path(tempfile.mkdtemp(prefix="unidec-"))
    place.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(place):
        share, seed = loaded.data.validation_share, loaded.data.split_seed
        write_dataset(paths.DATASET, raw, validation_share=share, split_seed=seed)
        for stage in (pipeline.tokens, pipeline.propensity, *([pipeline.label_graph] * loaded.reads_label_graph)):
            stage(loaded)
        pipeline.train(loaded, track=False)
        pipeline.index(loaded)
    return Model(place / paths.BUNDLE, runtime)


def _raw_data(queries: Any, labels: Any, pairs: Any) -> RawData:
    from unidec.data.raw import RawData, text_table

    query_texts, label_texts = _texts(queries, "queries"), _texts(labels, "labels")
    relevance = _pairs(pairs, list(query_texts), list(label_texts))
    tables = [text_table(list(texts), list(texts.values())) for texts in (query_texts, label_texts)]
    nothing = csr_matrix(relevance.shape, dtype=bool)
    return RawData("memory", {"train": tables[0]}, tables[1], {"train": relevance}, {"train": nothing})


def _list_of_texts(texts: Any) -> list[str]:
    if isinstance(texts, str):
        raise DataError("expected a list of texts, got a single text", where="texts", fix="[text]")
    return list(texts)


def _texts(given: Any, what: str) -> dict[str, str]:
    """uid -> text, in order."""
    if hasattr(given, "columns"):
        if "text" not in given.columns:
            columns = ", ".join(map(str, given.columns))
            raise DataError("no column `text`", where=what, got=f"columns: {columns}")
        uids = given["id"] if "id" in given.columns else given.index
        pairs = list(zip(map(str, uids), given["text"], strict=True))
    elif isinstance(given, Mapping):
        pairs = [(str(uid), text) for uid, text in given.items()]
    else:
        pairs = [(str(place), text) for place, text in enumerate(_list_of_texts(given))]
    texts = dict(pairs)
    if len(texts) < len(pairs):
        raise DataError("uids are not unique", where=what, got=f"{len(pairs) - len(texts)} duplicates")
    bad = next((uid for uid, text in texts.items() if not isinstance(text, str) or not text.strip()), None)
    if bad is not None:
        raise DataError("the text is missing or empty", where=f"{what}, id {bad}", got=repr(texts[bad])[:80])
    if not texts:
        raise DataError("no texts given", where=what)
    return texts


def _pairs(given: Any, queries: list[str], labels: list[str]) -> csr_matrix:
    """float32 CSR [queries, labels]."""
    shape = (len(queries), len(labels))
    if hasattr(given, "tocsr") or isinstance(given, np.ndarray):
        matrix = csr_matrix(given, dtype=np.float32)
        if matrix.shape != shape:
            raise DataError("pairs have the wrong shape", where="pairs", got=matrix.shape, expected=shape)
        if matrix.nnz and not (np.isfinite(matrix.data).all() and matrix.data.min() >= 0):
            raise DataError("pairs must be finite and non-negative", where="pairs")
        matrix.eliminate_zeros()
        matrix.sort_indices()
        return matrix
    if hasattr(given, "columns"):
        missing = {"query_id", "label_id"} - set(given.columns)
        if missing:
            raise DataError("missing columns", where="pairs", got=", ".join(sorted(missing)))
        given = zip(given["query_id"], given["label_id"], strict=True)
    rows = [{uid: row for row, uid in enumerate(uids)} for uids in (queries, labels)]
    found = []
    for place, pair in enumerate(given):
        query, label = (known.get(str(uid)) for known, uid in zip(rows, pair, strict=True))
        if query is None or label is None:
            raise DataError(f"unknown {'query' if query is None else 'label'}", where=f"pairs, pair {place}", got=pair)
        found.append((query, label))
    unique = np.unique(np.array(found, dtype=np.int64).reshape(-1, 2), axis=0)
    return csr_matrix((np.ones(len(unique), np.float32), (unique[:, 0], unique[:, 1])), shape)
