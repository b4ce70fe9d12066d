"""The bundle's folder: what `bundle.json` holds, how the folder is written, and what is checked before any of it is
used. `bundle.py` lists the files.

Legend: L labels, D width of a head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unidec.data.dataset import write_texts_table
from unidec.data.raw import text_array
from unidec.data.storage import MANIFEST, load_array, write_folder, write_json
from unidec.errors import ArtifactError
from unidec.retrieval.arrow_file import read_texts_table
from unidec.retrieval.bundle_model import typical_texts, write_model
from unidec.retrieval.calibration import Calibration
from unidec.retrieval.fusion import Fusion
from unidec.retrieval.index import REPLACED, IndexOptions, Kind, LabelIndex, OldKind
from unidec.retrieval.neighbours import FILES as NEIGHBOURS
from unidec.retrieval.neighbours import Neighbours, Vote
from unidec.retrieval.scoring_space import LabelRows, Space, width
from unidec.retrieval.word_scores import WORD_FEATURES

KIND = "bundle"
# 1: no neighbours; 2: none compared by words; 3: flat, hnsw only; 4: no fusion; 5: no calibration; 6: no word network
VERSION = 7
MAX_INFO_BYTES = 16 << 20
LABEL_SCHEMA = pa.schema([pa.field("uid", pa.string(), nullable=False), pa.field("title", pa.string(), nullable=False)])
INDEX = "index.faiss"

Floats = npt.NDArray[np.float32]

_FILES = {"bundle.json", "labels.arrow", INDEX}
_OLD = {"index_rows.npy"}  # labels of a graph's nodes, for one that some labels left: such an index is built again
_VECTORS = {"vectors/de.npy", "vectors/clf.npy", "vectors/bias.npy"}
_FIX = "write the bundle again: unidec index build"
Count = Annotated[int, Field(ge=1, le=1 << 40)]
CountOrNone = Annotated[int, Field(ge=0, le=1 << 40)]
_STRICT = ConfigDict(frozen=True, extra="forbid", strict=True)


class KnnInfo(BaseModel):
    """How similar training queries vote; see `neighbours.py`.

    Attributes:
        weight: of their votes beside the heads' score. neighbours: how many of them vote.
        vote: what a vote counts by its cosine. space: the head in whose space queries are compared.
        num_queries, num_pairs: training queries, and their labels in all.
        num_words: words and pairs of words that queries are compared by; None: by their vectors in `space`.
        word_head: first tokens of a text whose words are compared alone too; 0: none.
    """

    model_config = _STRICT

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    neighbours: Count
    vote: Vote
    space: Literal["de", "clf"]
    num_queries: Count
    num_pairs: CountOrNone
    num_words: CountOrNone | None = None
    word_head: CountOrNone = 0

    @classmethod
    def of(
        cls, voters: Neighbours, weight: float, neighbours: int = 100, space: Literal["de", "clf"] = "de"
    ) -> KnnInfo:
        """Of these training queries."""
        words = voters.words
        num_words, head = (None, 0) if words is None else (words.num_features, words.head)
        return cls(
            weight=float(weight), neighbours=neighbours, vote=voters.vote, space=space, num_queries=voters.num_queries,
            num_pairs=int(voters.labels_ML.nnz), num_words=num_words,
            word_head=head,
        )  # fmt: skip


class BundleInfo(BaseModel):
    """`bundle.json`.

    Attributes:
        space: what is searched: "both", "de" or "clf".
        clf_weight: weight of the classifier's score beside the dual encoder's.
        clf_normalize: the classifier's score is a cosine.
        num_labels: L. dim: D, width of a head. width: width of the searched space.
        vectors: shape of each array under vectors/.
        index_kind, index_search: kind of index, and efSearch of HNSW.
        index_bytes: size of index.faiss.
        index_options: how it was built and is searched; None in a bundle of before format 4.
        index_nodes: not used; nodes of a graph some of whose labels left, in older bundles.
        estimated: row ranges [begin, end) of labels that came after the training: their classifier rows and biases are
            estimates (label_change.py).
        knn: the votes of similar training queries; None where there are none.
        fusion: what ranks in place of the blend of heads and votes; None: the blend does.
        calibration: what a score means as a probability; None: that was not measured.
        default_k, max_k: what a server offers.
        text: which text of a query the model was trained on: "title" or "title+content".
        dataset: name and sha256 of the data set. metrics: their summary. params: all parameters of the training.
        card: any further facts for people.
    """

    model_config = _STRICT

    space: Space
    clf_weight: Annotated[float, Field(allow_inf_nan=False)]
    clf_normalize: bool
    num_labels: Count
    dim: Count
    width: Count
    vectors: dict[Literal["de", "clf", "bias"], list[Count]]
    index_kind: Kind | OldKind
    index_search: Count
    index_bytes: Count
    index_options: IndexOptions | None = None
    index_nodes: Count | None = None
    estimated: list[tuple[CountOrNone, CountOrNone]] = []
    knn: KnnInfo | None = None
    fusion: Fusion | None = None
    calibration: Calibration | None = None
    default_k: Count = 5
    max_k: Count = 100
    text: str
    dataset: dict[str, Any]
    metrics: dict[str, Any]
    params: dict[str, Any]
    card: dict[str, Any]

    @model_validator(mode="after")
    def _check(self) -> BundleInfo:
        matrix = [self.num_labels, self.dim]
        shapes = {"de": matrix, "clf": matrix, "bias": [self.num_labels]}
        needed = {"de", "clf"} if self.space == "both" else {self.space}
        if any(shape != shapes[name] for name, shape in self.vectors.items()) or not needed <= set(self.vectors):
            raise ValueError(f"vectors {self.vectors} instead of {', '.join(sorted(needed))} of shape {matrix}")
        if any(not begin < end <= self.num_labels for begin, end in self.estimated):
            raise ValueError(f"rows of labels that do not exist: {str(self.estimated)[:80]}")
        if self.knn is not None and self.knn.space not in self.vectors:
            raise ValueError(f"votes in the space of a head that is not there: {self.knn.space}")
        if self.fusion is not None and (self.space != "both" or self.knn is None or self.knn.num_words is None):
            raise ValueError("a fusion without both heads and training queries that are compared by words")
        if self.knn is not None and self.knn.vote == "ridge-labels" and self.knn.num_words is None:
            raise ValueError("labels vote by their words, and queries are not compared by words")
        if self.fusion is not None and self.fusion.words is not None and self.knn is not None:
            num, expected = len(self.fusion.words.mean), len(WORD_FEATURES) * (2 if self.knn.word_head else 1)
            if num != expected:
                raise ValueError(f"a network of {num} word features instead of {expected}")
        if self.knn is not None and not self.knn.weight and self.fusion is None:
            raise ValueError("votes without a weight, and no fusion that reads them")
        expected = width(self.dim, self.space, self.clf_normalize, "bias" in self.vectors)
        if self.width != expected:
            raise ValueError(f"a space of width {self.width} instead of {expected}")
        return self

    @property
    def has_label_words(self) -> bool:
        """Whether the words of the labels' texts are kept beside those of training queries."""
        return self.fusion is not None or (self.knn is not None and self.knn.vote == "ridge-labels")


@dataclass(frozen=True)
class BundleLabels:
    """The labels of a bundle that is written.

    Attributes:
        uids, titles: of the L labels; uids are unique.
        vectors: float32 arrays "de" and "clf" [L, D], "bias" [L]; those that the model has, others None or left out.
        estimated: see `BundleInfo`.
    """

    uids: Iterable[str]
    titles: Iterable[str]
    vectors: Mapping[str, Floats | None]
    estimated: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Scoring:
    """How a bundle that is written ranks: the fields of `BundleInfo` of the same names."""

    space: Space
    clf_weight: float
    clf_normalize: bool
    knn: KnnInfo | None = None
    fusion: Fusion | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Facts:
    """What else `bundle.json` keeps: the fields of `BundleInfo` of the same names, JSON-able."""

    text: str = "title"
    dataset: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    card: Mapping[str, Any] = field(default_factory=dict)


def write_bundle(
    path: str | os.PathLike[str],
    model_path: str | os.PathLike[str],
    index: LabelIndex,
    labels: BundleLabels,
    scoring: Scoring,
    facts: Facts = Facts(),
    neighbours: Neighbours | None = None,
) -> Path:
    """Write a bundle; an existing folder is replaced when all is written. The same input gives the same bytes.

    Args:
        model_path: a trained model's folder; checked and copied, without the records of its training.
        index: built over the labels' vectors in the space of `scoring`.
        neighbours: training queries that vote, as `scoring.knn` describes them.

    Returns:
        The folder's path.

    Raises:
        ValueError: parts that do not fit together.
        ArtifactError: the model's folder is damaged, or the bundle cannot be written.
    """
    given = {name: labels.vectors.get(name) for name in ("de", "clf", "bias")}
    vectors = {name: np.ascontiguousarray(array, np.float32) for name, array in given.items() if array is not None}
    columns = [text_array(texts, pa.string()) for texts in (labels.uids, labels.titles)]
    table = pa.table(columns, schema=LABEL_SCHEMA).combine_chunks()
    dim = next(array.shape[1] for array in vectors.values() if array.ndim == 2)
    shapes = {name: list(array.shape) for name, array in vectors.items()}
    info = BundleInfo(
        num_labels=index.num_labels, dim=dim, width=index.dim, vectors=shapes, estimated=list(labels.estimated),
        index_kind=index.kind, index_search=index.options.search, index_options=index.options, index_bytes=1,
        **vars(scoring), **vars(facts),
    )  # fmt: skip
    _check_parts(info, table, neighbours)
    size = sum(array.nbytes for array in vectors.values()) + 4 * index.num_labels * index.dim
    size += neighbours.num_bytes if neighbours is not None else 0
    with write_folder(path, KIND, VERSION, num_bytes=size) as out:
        texts = typical_texts(table["title"], None if neighbours is None else neighbours.titles)
        hashes = write_model(Path(model_path), out.path / "model", index.num_labels, texts)
        out.hashes.update({f"model/{name}": digest for name, digest in hashes.items()})
        (out.path / "vectors").mkdir()
        for name, array in vectors.items():
            np.save(out.path / "vectors" / f"{name}.npy", array)
        write_texts_table(out.path / "labels.arrow", table)
        if neighbours is not None:
            neighbours.write(out.path, label_words=info.has_label_words)
        index.save(out.path / INDEX)
        info = info.model_copy(update={"index_bytes": (out.path / INDEX).stat().st_size})
        write_json(out.path / "bundle.json", info.model_dump())
        out.meta.update(space=scoring.space, num_labels=index.num_labels, index=index.kind)
    return Path(path)


def check_names(root: Path, files: Iterable[str]) -> None:
    """Refuse a folder that lacks a file of a bundle, or lists one that is none.

    Raises:
        ArtifactError: naming the file.
    """
    names = set(files)
    for missing in sorted((_FILES | {f"model/{MANIFEST}"}) - names):
        raise ArtifactError("a file of a bundle is missing", where=str(root / missing), fix=_FIX)
    for name in sorted(names - _FILES - _OLD - _VECTORS - NEIGHBOURS):
        if not name.startswith("model/") or name.endswith((".pkl", ".pickle", ".pt", ".pth", ".bin", ".py")):
            raise ArtifactError(
                "a file that has no place in a bundle", where=str(root / name), fix="do not use this bundle"
            )


def read_info(root: Path) -> BundleInfo:
    """`bundle.json`, each field of the right type.

    Raises:
        ArtifactError: too large, damaged, or numbers that contradict each other.
    """
    where = root / "bundle.json"
    if (size := where.stat().st_size) > MAX_INFO_BYTES:
        raise ArtifactError("a file of impossible size", where=str(where), got=size, expected=f"<= {MAX_INFO_BYTES}")
    try:
        info = BundleInfo.model_validate_json(where.read_bytes())
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors()[:5]]
        raise ArtifactError("a damaged bundle.json", where=str(where), got="; ".join(lines)[:500], fix=_FIX) from error
    index = root / INDEX
    if (size := index.stat().st_size) != info.index_bytes:
        raise ArtifactError("an index of another size", where=str(index), got=size, expected=info.index_bytes, fix=_FIX)
    return info


def read_labels(root: Path, num_labels: int) -> pa.Table:
    """uid and title of each label, in memory; an ArtifactError for anything else in the file."""
    return read_texts_table(root / "labels.arrow", LABEL_SCHEMA, num_labels).combine_chunks()


def read_vectors(root: Path, info: BundleInfo, verify: bool = True) -> dict[str, Floats]:
    """The arrays under vectors/, memory-mapped.

    Raises:
        ArtifactError: missing, of another dtype or shape, or (with `verify`) not finite.
    """
    vectors: dict[str, Floats] = {}
    for name, shape in info.vectors.items():
        where = root / "vectors" / f"{name}.npy"
        if not where.is_file():
            raise ArtifactError("a file of a bundle is missing", where=str(where), fix=_FIX)
        array = load_array(where, np.float32, ndim=len(shape))
        if list(array.shape) != shape:
            raise ArtifactError("another shape", where=str(where), got=list(array.shape), expected=shape, fix=_FIX)
        step = max(1, (1 << 22) // (shape[1] if len(shape) > 1 else 1))
        if verify and not all(np.isfinite(array[i : i + step]).all() for i in range(0, len(array), step)):
            raise ArtifactError("numbers that are not finite", where=str(where), fix="look at the last training steps")
        vectors[name] = np.asarray(array)  # a plain view: np.memmap costs microseconds at each use
    return vectors


def read_index(root: Path, info: BundleInfo, vectors: Mapping[str, Floats]) -> LabelIndex:
    """The index of a bundle, mapped into memory, checked against bundle.json; `vectors`: of `read_vectors`, on which a
    compressed index scores its candidates. One of a kind that there is no more, or a graph that some labels left, is
    built again of the vectors: seconds for 100,000 labels.

    Raises:
        ArtifactError: naming a file that is missing, damaged, or does not fit.
    """
    options = info.index_options or IndexOptions(search=info.index_search)
    rows = LabelRows(vectors, info.space, info.clf_normalize)
    kind: Any = REPLACED.get(info.index_kind, "pq" if info.index_nodes is not None else info.index_kind)
    if kind != info.index_kind:
        return LabelIndex.build(rows, kind, **options.model_dump())
    return LabelIndex.load(root / INDEX, info.num_labels, info.width, kind, options, rows)


def _check_parts(info: BundleInfo, labels: pa.Table, voters: Neighbours | None) -> None:
    """ValueError: parts that do not fit together."""
    counts = {"index": info.num_labels, "labels": labels.num_rows}
    if (info.knn is None) != (voters is None):
        raise ValueError("training queries that vote need both neighbours and `Scoring.knn`")
    if voters is not None:
        counts["neighbours"] = voters.num_labels
        if voters.words is None and voters.vectors_MD.shape[1] != info.dim:
            raise ValueError(f"neighbours of width {voters.vectors_MD.shape[1]}, the heads are {info.dim} wide")
    if len(set(counts.values())) != 1:
        raise ValueError(f"parts differ in their number of labels: {counts}")
    if len(labels["uid"].unique()) != labels.num_rows:
        raise ValueError("label uids are not unique")
