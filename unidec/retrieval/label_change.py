"""Another label set for a bundle, without training: new labels answer from their text, removed ones are gone.

Legend: L labels of the new set, K of the bundle, S of the new set whose text is encoded, N nearest trained labels,
M training queries, D width of a head.

A new label's dual-encoder vector is that of its text, its classifier row an estimate (`estimated_rows`). Other labels
keep what they have; where the text changed, the dual-encoder vector is computed again, and the classifier row too if it
was an estimate. The index is built again, with the old one's options: a second for 10,000 labels, minutes for a million
(a graph: hours). The arrays of the new labels are held in memory.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import scipy.sparse as sp
from scipy.sparse import csr_matrix

from unidec.data.storage import read_manifest
from unidec.data.table_file import read_rows
from unidec.data.tokens import encode_texts
from unidec.errors import ConfigError, DataError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION, BundleLabels, Facts, KnnInfo, Scoring, write_bundle
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.scoring_space import LabelRows, unit_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

MOST_SHOWN = 10  # problems in one message
NEAREST = 3
TEXT_SHARE = 0.6
MEAN_WEIGHT = 3.0  # of the mean row, where scores are cosines
_BATCH = 1024  # texts encoded at once


@dataclass(frozen=True)
class LabelText:
    """A label to add, or the new text of an existing one.

    Attributes:
        uid: its name.
        text: what is encoded; for a model of long texts title and content joined by a space.
        title: what is shown; "": the text.
        where: `file:line`, for messages.
    """

    uid: str
    text: str
    title: str = ""
    where: str = ""

    @property
    def shown(self) -> str:
        return self.title if self.title.strip() else self.text


@dataclass(frozen=True)
class LabelChange:
    """How a label set differs from a bundle's; false where nothing differs.

    Attributes:
        uids, titles: of the L labels in their new order; the title is what is shown.
        source_L: int64 [L], each label's row in the bundle; -1: it is new.
        encoded_S: int64 [S] ascending, rows whose text is encoded; texts_S: these texts.
        added, removed, renamed: uids of new labels, of removed ones, and of those with another text or title.
    """

    uids: list[str]
    titles: list[str]
    source_L: Rows
    encoded_S: Rows
    texts_S: list[str]
    added: list[str]
    removed: list[str]
    renamed: list[str]

    @classmethod
    def of(
        cls, bundle: Bundle, uids: Sequence[str], texts: Sequence[str], titles: Sequence[str] | None = None
    ) -> LabelChange:
        """Compare a bundle's labels with a whole new set, given in its order.

        A bundle knows only its labels' titles: for a model of long texts every text is encoded again.

        Raises:
            DataError: no label, a uid twice, or lists of different lengths.
        """
        titles = texts if titles is None else titles
        if not len(uids) or not len(uids) == len(texts) == len(titles):
            got = f"{len(uids)} uids, {len(texts)} texts, {len(titles)} titles"
            raise DataError("labels need a uid, a text and a title each, and there must be at least one", got=got)
        ((twice, count),) = Counter(uids).most_common(1)
        if count > 1:
            raise DataError("a label uid is there twice", got=twice, fix="give each label its own uid")
        before, shown = _titles(bundle), dict(zip(uids, titles, strict=True))
        renamed = {uid for uid, title in shown.items() if before.get(uid, title) != title}
        long_texts = bundle.info.text != "title"
        pairs = zip(uids, texts, strict=True)
        encoded = {uid: text for uid, text in pairs if long_texts or uid in renamed or uid not in before}
        return cls._between(bundle, shown, encoded, renamed)

    @classmethod
    def edit(
        cls, bundle: Bundle, add: Sequence[LabelText] = (), remove: Sequence[str] = (), update: Sequence[LabelText] = ()
    ) -> LabelChange:
        """Add, remove and update some labels; all others stay, in their order, and new ones come last.

        Raises:
            DataError: all problems at once: a uid that is given twice, is unknown or is
                there already, an empty text, or no label left.
        """
        _check_edit(bundle, add, remove, update)
        shown, long_texts = _titles(bundle), bundle.info.text != "title"
        # the title of a model of titles is its text: one that is the same already is no change
        changed = [one for one in update if long_texts or not one.text == one.shown == shown[one.uid]]
        shown |= {one.uid: one.shown for one in (*changed, *add)}
        for uid in remove:
            del shown[uid]
        if not shown:
            raise DataError("a bundle needs a label", got="all are removed", fix="keep one, or add one")
        encoded = {one.uid: one.text for one in (*changed, *add)}
        return cls._between(bundle, shown, encoded, {one.uid for one in changed})

    @classmethod
    def _between(
        cls, bundle: Bundle, shown: Mapping[str, str], encoded: Mapping[str, str], renamed: Collection[str]
    ) -> LabelChange:
        row_of = bundle.row_of
        rows = [row for row, uid in enumerate(shown) if uid in encoded]
        uids = list(shown)
        return cls(
            uids, list(shown.values()), np.array([row_of.get(uid, -1) for uid in uids], dtype=np.int64),
            np.array(rows, dtype=np.int64), [encoded[uids[row]] for row in rows],
            added=[uid for uid in uids if uid not in row_of],
            removed=[uid for uid in row_of if uid not in shown],
            renamed=[uid for uid in uids if uid in renamed],
        )  # fmt: skip

    def __bool__(self) -> bool:
        """Whether anything differs, the order included."""
        return bool(self.added or self.removed or self.renamed or (np.diff(self.source_L) < 0).any())

    @property
    def counts(self) -> dict[str, int]:
        """How many labels were "added", "removed", "renamed" and "kept"."""
        counts = {name: len(getattr(self, name)) for name in ("added", "removed", "renamed")}
        return counts | {"kept": len(self.uids) - len(self.added)}


def _titles(bundle: Bundle) -> dict[str, str]:
    return dict(zip(bundle.row_of, bundle.titles.to_pylist(), strict=True))


def _check_edit(bundle: Bundle, add: Sequence[LabelText], remove: Sequence[str], update: Sequence[LabelText]) -> None:
    """Every problem of an edit in one error."""
    items = [("add", one) for one in add] + [("remove", LabelText(uid, "")) for uid in remove]
    problems: list[str] = []
    seen: dict[str, str] = {}
    for kind, item in items + [("update", one) for one in update]:
        known = item.uid in bundle.row_of
        checks = {
            f"{item.uid!r}: {seen.get(item.uid)} and {kind}; each label once": item.uid in seen,
            "a label without a uid": not item.uid.strip(),
            f"{item.uid!r} is in the bundle already: `unidec labels update` changes it": kind == "add" and known,
            f"no label {item.uid!r}": kind != "add" and not known,
            f"{item.uid!r} has no text to be found by": kind != "remove" and not item.text.strip(),
        }
        seen.setdefault(item.uid, kind)
        wrong = next((what for what, holds in checks.items() if holds), None)
        if wrong is not None:
            problems.append(f"{item.where}: {wrong}" if item.where else wrong)
    if problems:
        raise DataError(
            f"{len(problems):,} problems in a change of labels; nothing was written", where=str(bundle.path),
            got=_listed(problems),
            fix="correct them and run it again; `unidec export vectors` writes a table of all uids and titles",
        )  # fmt: skip


def _listed(problems: Sequence[str]) -> str:
    more = f"\n  and {len(problems) - MOST_SHOWN:,} more" if len(problems) > MOST_SHOWN else ""
    return "\n    ".join(["", *problems[:MOST_SHOWN]]) + more


def read_labels(path: Path) -> list[LabelText]:
    """The labels of a file with the columns uid, text and, where another text is shown, title.

    Args:
        path: .csv, .tsv and .jsonl (these also with .gz) or .parquet.

    Raises:
        DataError: as `read_rows`, or rows without uid or text: all of them at once, by line.
    """
    found, problems = [], []
    for line, row in read_rows(path, ("uid", "text", "title")):
        uid, text, title = row.get("uid"), row.get("text"), row.get("title") or ""
        uid, text = str(uid) if type(uid) is int else uid, title if text is None else text
        if not isinstance(uid, str):
            problems.append(f"{path}:{line}: no uid in {', '.join(map(str, row))[:80] or 'an empty row'}")
        elif not isinstance(text, str) or not isinstance(title, str):
            problems.append(f"{path}:{line}: not a text: {(text, title)!r}"[:200])
        else:
            found.append(LabelText(uid, text, title, f"{path.name}:{line}"))
    if problems or not found:
        raise DataError(
            "not a file of labels; nothing was written", where=str(path),
            got=_listed(problems) if problems else "no rows",
            expected="a header and the columns uid and text, and title where another text is shown",
        )  # fmt: skip
    return found


def with_labels(
    bundle: Bundle,
    path: str | os.PathLike[str],
    change: LabelChange,
    *,
    neighbours: Neighbours | None = None,
    dataset: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a bundle with another label set: same model, same blend. The same input gives the same bytes.

    Args:
        bundle: the bundle that the change was made with; it is not touched, and may answer meanwhile.
        path: the new bundle's folder, another one than the old one's.
        neighbours: training queries that vote, with the labels of the new set; None: those of the bundle, without the
            removed labels and the queries that had no others. A new label gets no votes then.
        dataset, card: of bundle.json; None: those of the old one. Metrics are left out.

    Raises:
        ConfigError: `path` is the bundle itself.
        ValueError: neighbours of other labels, or where none vote in the bundle.
        ArtifactError: the bundle's folder is damaged, or the new one cannot be written.
    """
    path, info = Path(path), bundle.info
    if path.resolve() == bundle.path.resolve():
        what, fix = "a bundle is not changed in place: it may be answering", f"name another folder: {path}-new"
        raise ConfigError(what, where=str(path), fix=fix)
    if info.knn is None and neighbours is not None:
        raise ValueError("no training queries vote in this bundle: it has no weight for them")
    read_manifest(bundle.path, KIND, VERSION, verify=True)
    knn, voters = None, None
    if info.knn is not None:
        voters = neighbours or _remapped(bundle, change)
        knn = None if voters is None else KnnInfo.of(voters, info.knn.weight, info.knn.neighbours, info.knn.space)
    vectors, estimated_L = _changed_vectors(bundle, change)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], estimated_L.astype(np.int8), [0]]))).tolist()
    rows = LabelRows(vectors, info.space, info.clf_normalize)
    index = LabelIndex.build(rows, bundle.index.kind, **bundle.index.options.model_dump())
    without_votes = info.knn is not None and knn is None  # then scores are others
    return write_bundle(
        path, bundle.path / "model", index,
        BundleLabels(change.uids, change.titles, vectors, list(zip(edges[::2], edges[1::2], strict=True))),
        Scoring(
            info.space, info.clf_weight, info.clf_normalize, knn,
            *((None, None) if without_votes else (info.fusion, info.calibration)),
        ),
        Facts(info.text, dataset or info.dataset, {}, info.params, card or info.card), voters,
    )  # fmt: skip


def _changed_vectors(bundle: Bundle, change: LabelChange) -> tuple[dict[str, Floats], npt.NDArray[np.bool_]]:
    """The new bundle's arrays by name, and which labels' classifier rows are estimates, bool [L]."""
    source_L, at, before, model = change.source_L, change.encoded_S, bundle.vectors, bundle.model
    tokens = encode_texts(change.texts_S, model.tokenizer_folder, model.max_length)
    desc = "labels" if len(change.texts_S) > _BATCH else None
    de_SD, clf_SD = model.vectors("labels", tokens, batch_size=_BATCH, desc=desc)
    vectors = {name: array[np.maximum(source_L, 0)] for name, array in before.items()}
    estimated_L = np.zeros(len(source_L), dtype=bool)
    if de_SD is not None:
        vectors["de"][at] = de_SD
    if clf_SD is not None:
        estimated_K = np.zeros(bundle.num_labels, dtype=bool)
        for begin, end in bundle.info.estimated:
            estimated_K[begin:end] = True
        estimated_L = (source_L < 0) | estimated_K[source_L]
        own = estimated_L[at]  # the others keep their trained rows, whatever their text
        vectors["clf"][at[own]], bias = estimated_rows(
            before, np.flatnonzero(~estimated_K), clf_SD[own], None if de_SD is None else de_SD[own],
            bundle.info.clf_normalize,
        )  # fmt: skip
        if "bias" in vectors:
            vectors["bias"][at[own]] = bias
    return vectors, estimated_L


def _remapped(bundle: Bundle, change: LabelChange) -> Neighbours | None:
    """The training queries with the labels of the new set, without those whose labels are all removed; None: no query
    is left."""
    neighbours, source_L = bundle.neighbours, change.source_L
    if neighbours is None:
        return None
    kept = np.flatnonzero(source_L >= 0)
    shape = (neighbours.num_labels, len(source_L))
    place = csr_matrix((np.ones(len(kept), dtype=np.float32), (source_L[kept], kept)), shape=shape)
    labels_ML = csr_matrix(neighbours.labels_ML @ place)
    stay = np.flatnonzero((np.diff(labels_ML.indptr) > 0) | (np.diff(neighbours.labels_ML.indptr) == 0))
    if not len(stay):
        return None
    uids, titles = (column.take(pa.array(stay)) for column in (neighbours.uids, neighbours.titles))
    words, label_words = neighbours.words, neighbours.label_words_LF
    if words is not None and label_words is not None:
        tokens = encode_texts(change.texts_S, bundle.about.tokenizer_folder, bundle.about.max_length)
        changed = words.vectors(*tokens.ragged(np.arange(len(change.texts_S))))
        place_L = source_L.copy()
        place_L[change.encoded_S] = bundle.num_labels + np.arange(len(change.texts_S))
        label_words = sp.vstack([label_words, changed], format="csr")[place_L]
    vectors_MD = neighbours.vectors_MD[stay]
    return Neighbours(vectors_MD, labels_ML[stay], uids, titles, neighbours.vote, words, label_words)


def estimated_rows(
    vectors: Mapping[str, Floats], trained: Rows, clf_SD: Floats, de_SD: Floats | None, normalize: bool = False
) -> tuple[Floats, float]:
    """Classifier rows and bias of labels without training, from their texts and from labels like them.

        row(s) = 0.6 h unit(Phi_C(s)) + 0.4 mean of the rows of the 3 nearest trained labels [+ 3 mean of all rows]

    with h the mean length of the trained rows, 1 at most. Nearest is the largest inner product of dual-encoder vectors;
    without a dual encoder, the largest classifier score of the text. The text alone finds new labels well but pushes
    others out: it has not learnt which queries to stay away from, the neighbours' rows have. The last term only where
    scores are cosines, which ignore a row's length. Measurements: benchmarks/results/label-changes.md.

    Args:
        vectors: a bundle's arrays: "clf" [K, D], "de" [K, D] and "bias" [K] where it has them; may be memory maps.
        trained: int64 ascending, rows of labels that were trained; without any, a row is its text.
        clf_SD, de_SD: float32 [S, D], the texts through both heads; de_SD None: there is no dual encoder.
        normalize: the classifier's score is a cosine.

    Returns:
        float32 [S, D], and the mean bias of the trained labels (0 without biases).
    """
    text_SD = unit_rows(clf_SD)
    if not len(trained):
        return text_SD, 0.0
    bias = float(np.mean(vectors["bias"][trained], dtype=np.float64)) if "bias" in vectors else 0.0
    clf_TD = vectors["clf"][trained]
    nearest = LabelIndex.build(clf_TD if de_SD is None else vectors["de"][trained])
    near_SN = nearest.search(text_SD if de_SD is None else de_SD, min(NEAREST, len(trained)))[1]
    length = min(1.0, float(np.linalg.norm(clf_TD, axis=1).mean(dtype=np.float64)))
    share = np.float32(TEXT_SHARE)
    rows_SD = share * np.float32(length) * text_SD + (1 - share) * clf_TD[near_SN].mean(axis=1)
    if normalize:
        rows_SD += np.float32(MEAN_WEIGHT) * clf_TD.mean(axis=0, dtype=np.float64).astype(np.float32)
    return rows_SD, bias
