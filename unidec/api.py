"""Train, load and use a model in a few lines, without a server, an MLflow store or params.yaml.

import unidec

model = unidec.fit(queries, labels, pairs)
model.predict(["brushes for painting"], k=5)
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from unidec.cores import num_threads
from unidec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

    from unidec.bundle.answer import Answerer, Explanation
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.label_file import LabelText
    from unidec.config import Params
    from unidec.data.raw import RawData
    from unidec.ranking.query_encoder import Runtime
    from unidec.ranking.ranker import Prediction

_DEEPEST = 100  # labels of a query that are evaluated
# a training uses all cores, and torch's random numbers, which are the process's
_training = threading.Lock()


def _replace_lock() -> None:
    global _training
    _training = threading.Lock()


os.register_at_fork(after_in_child=_replace_lock)  # another thread of the parent may have held it


class _Row(NamedTuple):
    uid: str
    text: str
    score: float


class Label(_Row):
    """A predicted label: the tuple (uid, text, score), with a probability beside it.

    Attributes:
        uid: the label's id in the data.
        text: the label's text.
        score: the score that labels are ranked by; comparable within one query only.
        probability: that the label is relevant, by the calibration on the validation queries; None
            if there were too few (`docs/bundles.md`), or for an answer with `tail`.

    Example:
        >>> uid, text, score = model.predict(["brushes for painting"], k=1)[0][0]
    """

    probability: float | None = None

    def __new__(cls, uid: str, text: str, score: float, probability: float | None = None) -> Self:
        label = super().__new__(cls, uid, text, score)
        label.probability = probability
        return label

    def __repr__(self) -> str:
        fields = f"uid={self.uid!r}, text={self.text!r}, score={self.score!r}"
        return f"Label({fields}, probability={self.probability!r})"


class _OwnFolder:
    """A temporary folder: removed when closed, when collected, or when the interpreter exits."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="unidec-"))
        self.close = weakref.finalize(self, _remove, self.path, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked process must not remove its parent's folder
        shutil.rmtree(folder, ignore_errors=True)


class Model:
    """A trained model, opened from a bundle's folder. Predicting is thread-safe.

    A model of `unidec.fit` without a folder lives in a temporary folder, which is removed when the
    model is closed (`close`, or at the end of a `with` block) or collected, or when the interpreter
    exits. A pickled model holds the files of its bundle, so that it can be loaded elsewhere; `save`
    writes them to a folder.

    Args:
        folder: the bundle's folder.
        runtime: runtime of the query encoder: "auto" (the fastest that keeps quality), "torch",
            "onnx" or "onnx-int8".

    Raises:
        ArtifactError: the bundle is missing or damaged.

    Example:
        >>> model = unidec.load("outputs/bundle")
        >>> model.predict(["brushes for painting"], k=1)
        [[Label(uid=..., text=..., score=...)]]
    """

    def __init__(self, folder: str | Path, runtime: Runtime = "auto") -> None:
        from unidec.bundle.answer import Answerer

        self.folder = Path(folder)
        self.runtime = runtime
        self._own_folder: _OwnFolder | None = None
        self._opened: Answerer | None = Answerer.open(folder, runtime)

    @classmethod
    def _of_files(cls, files: Mapping[str, bytes], runtime: Runtime) -> Self:
        """A model in a temporary folder of its own, from a bundle's files by relative path."""
        own_folder = _OwnFolder()
        for name, content in files.items():
            path = own_folder.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return cls(own_folder.path, runtime)._owning(own_folder)

    def _owning(self, folder: _OwnFolder) -> Self:
        self._own_folder = folder
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        files = {}
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                files[path.relative_to(self.folder).as_posix()] = path.read_bytes()
        return type(self)._of_files, (files, self.runtime)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        folder = repr(str(self.folder))
        if self._opened is None:
            return f"Model({folder}, closed)"
        bundle = self._opened.bundle
        data = bundle.info.dataset.get("name", "unknown")
        facts = f"{bundle.num_labels:,} labels, data set {data!r}"
        return f"Model({folder}: {facts}, runtime {self._opened.encoder.name})"

    def close(self) -> None:
        """Release memory and files, and remove the model's own temporary folder."""
        self._opened = None
        if self._own_folder is not None:
            self._own_folder.close()

    @property
    def _answerer(self) -> Answerer:
        if self._opened is None:
            fix = "open it again: unidec.load(folder)"
            raise ConfigError("the model is closed", where=self.folder, fix=fix)
        return self._opened

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
            tail: above 0 ranks rare labels higher, below 0 lower; only for models with a learnt
                fusion.

        Raises:
            DataError: a query is blank or not a string, or k is below 1.
        """
        from unidec.bundle.answer import LabelQuery

        options: dict[str, Any] = {
            "k": k,
            "allow": None if allow is None else tuple(allow),
            "deny": tuple(deny),
            "min_score": min_score,
            "tail": tail,
        }
        requests = [LabelQuery(text, **options) for text in _listed(texts)]
        return [_labels_of(answer) for answer in self._answerer.answer(requests)]

    def explain(self, text: str, k: int = 5) -> Explanation:
        """Explain the labels of a text: the score of each part of the model, and similar training
        queries.
        """
        from unidec.bundle.answer import LabelQuery

        return self._answerer.explain(LabelQuery(text, k))

    def evaluate(self, queries: Any, pairs: Any) -> dict[str, float]:
        """All metrics over all labels, in percent: P@k, nDCG@k, R@k, coverage@k, MRR, PSP@k and
        PSnDCG@k.

        Queries without labels are skipped. The metrics with propensities (PSP, PSnDCG) need the
        number of training queries of each label, which a model knows if its training queries vote;
        else they are left out.

        Args:
            queries, pairs: as in `fit`; `pairs` names labels by uid, or by column if it is a
                matrix. If a column `split` names splits, the test queries are used.

        Raises:
            DataError: no query has a known label, or as in `fit`.
        """
        from unidec.evaluation.metrics import evaluate

        bundle = self._answerer.bundle
        texts, truth = _judged(bundle, queries, pairs)
        rows = np.flatnonzero(np.diff(truth.indptr))
        if not len(rows):
            what = "nothing to evaluate on: no query has a label"
            raise DataError(what, where="pairs", expected="pairs of these queries")
        found = self.predict([texts[row] for row in rows], min(_DEEPEST, self.num_labels))
        predicted = np.full((len(rows), _DEEPEST), -1, dtype=np.int64)
        for row, answer in enumerate(found):
            predicted[row, : len(answer)] = [bundle.row_of[label.uid] for label in answer]
        relevant = truth[rows].astype(bool)
        inverse_L = _inverse_propensity(bundle)
        no_group_L = np.zeros(self.num_labels, dtype=np.int64)
        left_out = "/"  # of frequency groups
        if inverse_L is None:
            inverse_L = np.ones(self.num_labels)
            left_out = "/|PS"
        figures = evaluate(predicted, relevant, inverse_L, no_group_L)
        return {name: value for name, value in figures.items() if not re.search(left_out, name)}

    def change_labels(
        self,
        folder: str | Path,
        *,
        add: Mapping[str, str] | None = None,
        remove: Sequence[str] = (),
        update: Mapping[str, str] | None = None,
        examples: Mapping[str, Sequence[str]] | None = None,
    ) -> Model:
        """Return a model with a changed label set, without training; this model is not modified.

        Args:
            folder: folder of the new bundle; must differ from this model's.
            add, update: text by uid.
            remove: uids.
            examples: queries for which an added label is relevant, by its uid.

        Raises:
            DataError: a uid is unknown, or already exists.
            ConfigError: the folder is this model's own.
        """
        from unidec.bundle.label_change import LabelChange, with_labels
        from unidec.bundle.label_file import LabelText

        bundle = self._answerer.bundle
        added = _label_texts(add)
        updated = _label_texts(update)
        queries = [
            LabelText(uid, query) for uid, texts in (examples or {}).items() for query in texts
        ]
        change = LabelChange.edit(bundle, added, list(remove), updated, queries)
        return Model(with_labels(bundle, folder, change), self.runtime)

    def save(self, folder: str | Path) -> Path:
        """Copy the model to a new folder, which `unidec.load` opens.

        Raises:
            ConfigError: the folder exists.
        """
        from unidec.data.storage import swap_folder

        if Path(folder).exists():
            fix = "remove it, or name another folder"
            raise ConfigError("exists already", where=folder, fix=fix)
        with swap_folder(folder) as copy:
            shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        return Path(folder)


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
        queries, labels: a list of texts (the uid of an entry is its position), a mapping of uid to
            text, a Series whose index holds the uids, or a table (pandas, polars, pyarrow,
            datasets) with the columns of the layout `tables` (docs/data.md): text, id (unless the
            index of a DataFrame holds the uids; without an index, the position is the uid), and
            optionally content and, for queries, split. Test queries are not trained on.
        pairs: a list of tuples (query, label) or (query, label, relevance), by uid; a table with
            the columns query_id, label_id and optionally relevance and split; or a matrix [queries,
            labels], in the order of both.
        recipe: name of a shipped recipe; `unidec config keys` lists them.
        folder: folder for data, checkpoints and the bundle; the same call with the same folder
            resumes a training that was killed. None: a temporary folder, which the model removes
            (`Model`); `model.save` keeps the model.
        params: other parameters by key: {"optim.epochs": 3}.
        runtime: see `Model`.

    Raises:
        DataError: the data cannot be trained on, or could be read in more than one way; every error
            is named.
        ConfigError: an unknown parameter, or too little memory.

    Example:
        >>> model = unidec.fit(queries, labels, pairs)
        >>> model.num_labels == len(labels)
        True
    """
    from unidec.config import load_params
    from unidec.data.formats import from_memory

    loaded = load_params(None, {"recipe": recipe, **(params or {})})
    raw = from_memory(queries, labels, pairs, loaded.raw)
    _warn_of_content(raw, loaded.tokens.text)
    if folder is not None:
        bundle = _train(loaded, raw, Path(folder).absolute())
        return Model(bundle, runtime)
    own_folder = _OwnFolder()
    training = own_folder.path / "training"
    kept = _train(loaded, raw, training).rename(own_folder.path / "bundle")
    shutil.rmtree(training)
    return Model(kept, runtime)._owning(own_folder)


def _train(params: Params, raw: RawData, folder: Path) -> Path:
    """Run the stages of the pipeline in a folder; returns the bundle."""
    import torch
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from unidec import pipeline
    from unidec.data.dataset import write_dataset
    from unidec.pipeline import paths

    folder.mkdir(parents=True, exist_ok=True)
    with (
        _training,
        threadpool_limits({"openmp": num_threads(), "blas": 1}),
        torch.random.fork_rng(_used_devices()),
        paths.root(folder),
    ):
        share = params.data.validation_share
        seed = params.data.split_seed
        write_dataset(paths.DATASET, raw, validation_share=share, split_seed=seed)
        pipeline.tokens(params)
        pipeline.propensity(params)
        if params.reads_label_graph:
            pipeline.label_graph(params)
        pipeline.train(params, track=False)
        pipeline.index(params)
        return paths.BUNDLE


def _used_devices() -> list[int]:
    import torch

    is_used = torch.cuda.is_initialized()
    return list(range(torch.cuda.device_count())) if is_used else []


def _warn_of_content(raw: RawData, text: str) -> None:
    """Warn if there are contents that the model does not read."""
    import pyarrow.compute as pc

    if text != "title":
        return
    for table in (raw.labels, *raw.queries.values()):
        if pc.any(pc.not_equal(table["content"], "")).as_py():
            fix = 'params={"tokens.text": "title+content"} to read it, or leave the column out'
            what = "the model does not read the column `content`"
            warnings.warn(f"{what}; {fix}", stacklevel=3)
            return


def _judged(bundle: Bundle, queries: Any, pairs: Any) -> tuple[list[str], csr_matrix]:
    """Texts of the queries to evaluate on, and their relevance, float32 CSR [queries, labels of the
    bundle].
    """
    from unidec.data.dataset import texts_read
    from unidec.data.formats import memory

    source = memory.Given(Path("memory"))
    labels = memory.known_labels(bundle.uids, bundle.titles)
    raw = memory.read_given(source, queries, labels, pairs)
    source.stop()
    split = "train" if set(raw.queries) <= {"train"} else "test"
    if split not in raw.queries:
        fix = "leave the column `split` out to evaluate on all queries"
        got = ", ".join(raw.queries)
        raise DataError("no query of the split test", where="queries", got=got, fix=fix)
    text = bundle.info.text
    return texts_read(raw.queries[split], text).to_pylist(), raw.relevance[split]


def _inverse_propensity(bundle: Bundle) -> np.ndarray | None:
    """Inverse propensity of each label, float64 [L]; None if the bundle has no training queries to
    count.
    """
    from unidec.data.propensity import inverse_propensity

    voters = bundle.neighbours
    if voters is None:
        return None
    constants = bundle.info.params["data"]
    a = constants["propensity_a"]
    b = constants["propensity_b"]
    return inverse_propensity(voters.label_counts, voters.num_queries, a, b)


def _labels_of(answer: Prediction) -> list[Label]:
    unknown = [None] * len(answer.labels)
    probabilities = answer.probabilities or unknown
    rows = zip(answer.labels, answer.titles, answer.scores, probabilities, strict=True)
    return [Label(*row) for row in rows]


def _label_texts(texts: Mapping[str, str] | None) -> list[LabelText]:
    from unidec.bundle.label_file import LabelText

    return [LabelText(uid, text) for uid, text in (texts or {}).items()]


def _listed(texts: Any) -> list[Any]:
    if isinstance(texts, list):
        return texts
    from unidec.data.formats.memory import listed  # imports pandas

    return listed(texts, "texts")
