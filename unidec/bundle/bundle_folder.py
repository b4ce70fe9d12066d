"""The bundle's folder: how it is written, and how its parts are read and checked before use.
`bundle.py` lists the files.

Legend: L labels, D width of a head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError

from unidec.bundle.arrow_file import read_texts_table
from unidec.bundle.bundle_info import BundleInfo, KnnInfo
from unidec.bundle.bundle_model import typical_texts, write_model
from unidec.bundle.checked_arrays import damaged, read_array
from unidec.bundle.neighbour_files import FILES as NEIGHBOURS
from unidec.bundle.neighbour_files import write_neighbours
from unidec.data.dataset import Text, write_texts_table
from unidec.data.raw import text_array
from unidec.data.storage import MANIFEST, write_folder, write_json
from unidec.errors import ArtifactError
from unidec.ranking.fusion import Fusion
from unidec.ranking.heads import Heads, Space
from unidec.ranking.index import LabelIndex
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.ranker import Calibration
from unidec.ranking.sparse import Floats

KIND = "bundle"
VERSION = 7
MAX_INFO_BYTES = 16 << 20
LABEL_SCHEMA = pa.schema([pa.field(name, pa.string(), nullable=False) for name in ("uid", "title")])
INDEX = "index.faiss"

_FILES = {"bundle.json", "labels.arrow", INDEX}
# suffixes of files that could execute code when loaded
_CODE = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".py")
_VECTORS = {"vectors/de.npy", "vectors/clf.npy", "vectors/bias.npy"}


@dataclass(frozen=True)
class BundleLabels:
    """The labels of a new bundle.

    Attributes:
        uids, titles: one for each of the L labels; uids are unique.
        vectors: float32 arrays "de" and "clf" [L, D], "bias" [L]; None or absent if the model lacks
        the array.
        estimated: see `BundleInfo`.
    """

    uids: Iterable[str]
    titles: Iterable[str]
    vectors: Mapping[str, Floats | None]
    estimated: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class Scoring:
    """How a new bundle ranks: fields of `BundleInfo` of the same names."""

    space: Space
    clf_weight: float
    clf_normalize: bool
    knn: KnnInfo | None = None
    fusion: Fusion | None = None
    calibration: Calibration | None = None


@dataclass(frozen=True)
class Facts:
    """Further fields of `BundleInfo` for a new bundle, serialisable as JSON."""

    text: Text = "title"
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
    """Write a bundle, deterministically; an existing folder is replaced once all files are written.

    Args:
        model_path: a trained model's folder; checked, and copied without its training records, with
            heads as wide as the labels' vectors.
        index: index over the labels' vectors in the space of `scoring`.
        neighbours: training queries that vote, as described by `scoring.knn`.

    Returns:
        The folder's path.

    Raises:
        ValueError: the parts do not fit together.
        ArtifactError: the model's folder is damaged, or the bundle cannot be written.
    """
    vectors: dict[Any, Floats] = {
        name: np.ascontiguousarray(array, np.float32)
        for name, array in labels.vectors.items()
        if array is not None
    }
    columns = [text_array(texts, pa.string()) for texts in (labels.uids, labels.titles)]
    table = pa.table(columns, schema=LABEL_SCHEMA).combine_chunks()
    texts = [table["title"]]
    if neighbours is not None:
        texts.append(neighbours.titles)
    size = sum(array.nbytes for array in vectors.values())  # at least
    info = BundleInfo(
        num_labels=index.num_labels,
        dim=next(array.shape[1] for array in vectors.values() if array.ndim == 2),
        width=index.dim,
        vectors={name: list(array.shape) for name, array in vectors.items()},
        estimated=list(labels.estimated),
        index_kind=index.spec.kind,
        index_search=index.spec.search,
        index_options=index.spec,
        index_bytes=1,
        **vars(scoring),
        **vars(facts),
    )
    _check_parts(info, table, neighbours)
    with write_folder(path, KIND, VERSION, num_bytes=size) as out:
        hashes = write_model(
            Path(model_path),
            out.path / "model",
            num_labels=index.num_labels,
            dim=info.dim,
            texts=typical_texts(*texts),
        )
        out.hashes.update({f"model/{name}": digest for name, digest in hashes.items()})
        (out.path / "vectors").mkdir()
        for name, array in vectors.items():
            np.save(_vectors_file(out.path, name), array)
        write_texts_table(out.path / "labels.arrow", table)
        if neighbours is not None:
            write_neighbours(out.path, neighbours)
        index.save(out.path / INDEX)
        index_bytes = {"index_bytes": (out.path / INDEX).stat().st_size}
        write_json(out.path / "bundle.json", info.model_dump() | index_bytes)
        out.meta.update(space=scoring.space, num_labels=index.num_labels, index=index.spec.kind)
    return Path(path)


def _vectors_file(root: Path, name: str) -> Path:
    return root / "vectors" / f"{name}.npy"


def check_names(root: Path, files: Iterable[str]) -> None:
    """Check that a bundle's folder has all required files and no file of another kind.

    Raises:
        ArtifactError: with the name of the missing or unexpected file.
    """
    names = set(files)
    for missing in sorted((_FILES | {f"model/{MANIFEST}"}) - names):
        raise damaged("a file of a bundle is missing", root / missing)
    for name in sorted(names - _FILES - _VECTORS - NEIGHBOURS):
        if not name.startswith("model/") or name.endswith(_CODE):
            raise ArtifactError(
                "the file does not belong in a bundle",
                where=root / name,
                fix="restore the bundle from a copy that you trust",
            )


def read_info(root: Path) -> BundleInfo:
    """Read and validate `bundle.json`.

    Raises:
        ArtifactError: the file is too large or damaged, or its numbers are inconsistent.
    """
    where = root / "bundle.json"
    size = where.stat().st_size
    if size > MAX_INFO_BYTES:
        raise damaged("bundle.json is too large", where, size, f"<= {MAX_INFO_BYTES}")
    try:
        info = BundleInfo.model_validate_json(where.read_bytes())
    except ValidationError as error:
        problems = []
        for problem in error.errors()[:5]:
            place = ".".join(map(str, problem["loc"])) or "document"
            problems.append(f"{place}: {problem['msg']}")
        raise damaged("bundle.json is damaged", where, "; ".join(problems)[:500]) from error
    size = (root / INDEX).stat().st_size
    if size != info.index_bytes:
        raise damaged("the index has another size", root / INDEX, size, info.index_bytes)
    return info


def read_labels(root: Path, num_labels: int) -> pa.Table:
    """Read uid and title of each label into memory; raises ArtifactError if the file is damaged."""
    return read_texts_table(root / "labels.arrow", LABEL_SCHEMA, num_labels).combine_chunks()


def read_heads(root: Path, info: BundleInfo, verify: bool) -> Heads:
    """Memory-map the arrays under vectors/, with the settings by which they score.

    Raises:
        ArtifactError: a file is missing, has another dtype or shape, or (with `verify`) is not
        finite.
    """
    vectors: dict[str, Floats] = {
        name: read_array(_vectors_file(root, name), np.float32, tuple(shape), verify)
        for name, shape in info.vectors.items()
    }
    return Heads(vectors, info.space, info.clf_normalize, info.clf_weight)


def read_index(root: Path, info: BundleInfo, heads: Heads) -> LabelIndex:
    """Load a bundle's index, memory-mapped and checked against bundle.json.

    Args:
        heads: from `read_heads`; a compressed index scores its candidates with them.

    Raises:
        ArtifactError: with the name of a file that is missing, damaged or inconsistent.
    """
    return LabelIndex.load(root / INDEX, info.num_labels, info.width, info.index_spec, heads)


def _check_parts(info: BundleInfo, labels: pa.Table, voters: Neighbours | None) -> None:
    """Raise ValueError if the parts of a new bundle do not fit together."""
    counts = {"index": info.num_labels, "labels": labels.num_rows}
    if (info.knn is None) != (voters is None):
        raise ValueError("training queries that vote need both neighbours and `Scoring.knn`")
    if voters is not None:
        counts["neighbours"] = voters.num_labels
        dim = voters.vectors_MD.shape[1]
        if voters.words is None and dim != info.dim:
            raise ValueError(f"neighbours have width {dim}, but the heads have {info.dim}")
    if len(set(counts.values())) != 1:
        raise ValueError(f"parts differ in their number of labels: {counts}")
    if len(labels["uid"].unique()) != labels.num_rows:
        raise ValueError("label uids are not unique")
