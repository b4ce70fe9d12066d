"""The bundle's folder: how it is written, and what is checked before any of it is used.

Legend: L labels, D width of a head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import ValidationError

from unidec.data.array_file import write_array
from unidec.data.storage import MANIFEST, load_array, write_folder, write_json
from unidec.errors import ArtifactError
from unidec.retrieval.arrow_file import read_plain_table
from unidec.retrieval.bundle_index import INDEX, NODES, write_index
from unidec.retrieval.bundle_info import BundleInfo, KnnInfo
from unidec.retrieval.bundle_model import place, write_model
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.neighbours import FILES as NEIGHBOURS
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.scoring_space import Space, label_vectors, width

KIND = "bundle"
VERSION = 4  # 1 had no neighbours, 2 none that are compared by words, 3 flat and hnsw indexes only
MAX_INFO_BYTES = 16 << 20
LABEL_SCHEMA = pa.schema([pa.field("uid", pa.string(), nullable=False), pa.field("title", pa.string(), nullable=False)])
LABEL_ROWS = 65_536

Floats = npt.NDArray[np.float32]
Ready = tuple[Path, str]
"""A file with the bytes that are wanted, and their sha256."""

_FILES = {"bundle.json", "labels.arrow", INDEX}
_OPTIONAL = {NODES}
_VECTORS = {"vectors/de.npy", "vectors/clf.npy", "vectors/bias.npy"}
_FIX = "write the bundle again: unidec index build"


def write_bundle(
    path: str | os.PathLike[str],
    model_path: str | os.PathLike[str],
    index: LabelIndex,
    *,
    de_LD: Floats | None,
    clf_LD: Floats | None,
    bias_L: Floats | None = None,
    uids: Iterable[str],
    titles: Iterable[str],
    space: Space,
    clf_weight: float,
    clf_normalize: bool,
    neighbours: Neighbours | None = None,
    knn_weight: float = 0.0,
    knn_neighbours: int = 100,
    knn: KnnInfo | None = None,
    estimated: Sequence[tuple[int, int]] = (),
    ready: Mapping[str, Ready] | None = None,
    text: str = "title",
    dataset: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write a bundle; a folder that is there is replaced when all is written. The same input gives the same bytes.

    Args:
        path: the folder.
        model_path: a trained model's folder; checked and copied, without the records of its training.
        index: built over `scoring_space.label_vectors(de_LD, clf_LD, bias_L, space, clf_normalize)`.
        de_LD, clf_LD: float32 [L, D] label embeddings and classifier rows; those that the model has.
        bias_L: float32 [L] biases of the classifier.
        uids, titles: of the L labels; uids are unique.
        space, clf_weight, clf_normalize: what is searched and how it is blended; see `scoring_space.py`.
        neighbours: training queries that vote, compared by de_LD's head, or by clf_LD's where there is no de_LD; or by
            their words.
        knn_weight, knn_neighbours: weight of the votes, above 0 with `neighbours`, and how many vote.
        knn: the votes of another bundle whose neighbours are all in `ready`, instead of these three.
        estimated: see `BundleInfo`.
        ready: files of the bundle that are written already, by their names in it: linked, or copied. With them the
            model is a bundle's, its hashes were checked, and its files that stay as they are are linked too.
        text: "title" or "title+content".
        dataset, metrics, params, card: facts kept in bundle.json, JSON-able.

    Returns:
        The folder's path.

    Raises:
        ValueError: parts that do not fit together.
        ArtifactError: the model's folder is damaged, or the bundle cannot be written.
    """
    ready = ready or {}
    vectors = {
        name: np.ascontiguousarray(array, dtype=np.float32)
        for name, array in (("de", de_LD), ("clf", clf_LD), ("bias", bias_L))
        if array is not None
    }
    labels = pa.table({"uid": _strings(uids), "title": _strings(titles)}, schema=LABEL_SCHEMA)
    dim = _check_parts(index, vectors, labels, space, clf_normalize)
    head: Literal["de", "clf"] = "de" if "de" in vectors else "clf"
    knn = knn or _knn_info(neighbours, (index.num_labels, dim), knn_weight, knn_neighbours, head)
    size = sum(array.nbytes for array in vectors.values()) + 4 * index.num_labels * index.dim
    size += neighbours.num_bytes if neighbours is not None else 0
    with write_folder(path, KIND, VERSION, num_bytes=size) as out:
        count, link = (index.num_labels, True) if ready else (None, False)
        hashes = write_model(Path(model_path), out.path / "model", count, verify=not link, link=link)
        out.hashes.update({f"model/{name}": digest for name, digest in hashes.items()})
        (out.path / "vectors").mkdir()
        for name, (file, digest) in ready.items():
            (out.path / name).parent.mkdir(exist_ok=True)
            out.hashes[name] = place(file, out.path / name, digest, link=True)
        for name, array in vectors.items():
            if (own := f"vectors/{name}.npy") not in ready:
                out.hashes[own] = write_array(out.path / own, array)
        write_index(out.path, index)
        _write_labels(out.path / "labels.arrow", labels)
        if neighbours is not None:
            neighbours.write(out.path)
        info = BundleInfo(
            space=space,
            clf_weight=float(clf_weight),
            clf_normalize=clf_normalize,
            num_labels=index.num_labels,
            dim=dim,
            width=index.dim,
            vectors={name: list(array.shape) for name, array in vectors.items()},  # type: ignore[misc]
            index_kind=index.kind,
            index_search=index.options.search,
            index_bytes=(out.path / INDEX).stat().st_size,
            index_options=index.options,
            index_nodes=None if index.nodes is None else len(index.nodes),
            estimated=list(estimated),
            knn=knn,
            text=text,
            dataset=dict(dataset or {}),
            metrics=dict(metrics or {}),
            params=dict(params or {}),
            card=dict(card or {}),
        )
        write_json(out.path / "bundle.json", info.model_dump())
        out.meta.update(space=space, num_labels=index.num_labels, index=index.kind)
    return Path(path)


def check_names(root: Path, files: Iterable[str]) -> None:
    """Refuse a folder that lacks a file of a bundle, or lists one that is none.

    Raises:
        ArtifactError: naming the file.
    """
    names = set(files)
    for missing in sorted((_FILES | {f"model/{MANIFEST}"}) - names):
        raise ArtifactError("a file of a bundle is missing", where=str(root / missing), fix=_FIX)
    for name in sorted(names - _FILES - _OPTIONAL - _VECTORS - NEIGHBOURS):
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
    size = where.stat().st_size
    if size > MAX_INFO_BYTES:
        raise ArtifactError("a file of impossible size", where=str(where), got=size, expected=f"<= {MAX_INFO_BYTES}")
    try:
        info = BundleInfo.model_validate_json(where.read_bytes())
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'document'}: {e['msg']}" for e in error.errors()[:5]]
        raise ArtifactError("a damaged bundle.json", where=str(where), got="; ".join(lines)[:500], fix=_FIX) from error
    matrix = [info.num_labels, info.dim]
    shapes = {"de": matrix, "clf": matrix, "bias": [info.num_labels]}
    needed = {"both": {"de", "clf"}}.get(info.space, {info.space})
    has_bias = "bias" in info.vectors
    expected = width(info.dim, info.space, info.clf_normalize, has_bias)
    if any(shape != shapes[name] for name, shape in info.vectors.items()) or not needed <= set(info.vectors):
        raise ArtifactError(
            "vectors that do not fit the bundle's size",
            where=str(where),
            got=info.vectors,
            expected=f"{', '.join(sorted(needed))} of shape {matrix}",
        )
    if any(not begin < end <= info.num_labels for begin, end in info.estimated):
        raise ArtifactError(
            "rows of labels that are not there", where=str(where), got=str(info.estimated)[:80], fix=_FIX
        )
    if info.knn is not None and info.knn.space not in info.vectors:
        raise ArtifactError("votes in the space of a head that is not there", where=str(where), got=info.knn.space)
    if info.width != expected:
        raise ArtifactError("a space of another width", where=str(where), got=info.width, expected=expected)
    size = (root / INDEX).stat().st_size
    if size != info.index_bytes:
        raise ArtifactError(
            "an index of another size", where=str(root / INDEX), got=size, expected=info.index_bytes, fix=_FIX
        )
    return info


def read_labels(root: Path, num_labels: int) -> pa.Table:
    """uid and title of each label, in memory.

    Raises:
        ArtifactError: not such a file, another number of labels, a missing text, or text that is not UTF-8.
    """
    where = root / "labels.arrow"
    try:
        table = read_plain_table(where, LABEL_SCHEMA)
        table.validate(full=True)
    except (pa.ArrowException, ValueError, MemoryError, OSError, StopIteration) as error:
        raise ArtifactError("not a readable Arrow file", where=str(where), got=str(error)[:200], fix=_FIX) from error
    if table.num_rows != num_labels or any(column.null_count for column in table.columns):
        raise ArtifactError(
            "another number of labels", where=str(where), got=table.num_rows, expected=num_labels, fix=_FIX
        )
    return table.combine_chunks()


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


def _check_parts(
    index: LabelIndex, vectors: Mapping[str, Floats], labels: pa.Table, space: Space, clf_normalize: bool
) -> int:
    """Parts that fit together, and the width of a head."""
    matrices = [vectors[name] for name in ("de", "clf") if name in vectors]
    if len({array.shape for array in matrices}) != 1:
        raise ValueError(f"heads of different shapes: {[array.shape for array in matrices]}")
    counts = {"index": index.num_labels, "labels": labels.num_rows, **{n: len(v) for n, v in vectors.items()}}
    if len(set(counts.values())) != 1:
        raise ValueError(f"parts differ in their number of labels: {counts}")
    sample = np.unique(np.linspace(0, index.num_labels - 1, 16).astype(np.int64))
    some = {name: array[sample] for name, array in vectors.items()}
    expected = label_vectors(some.get("de"), some.get("clf"), some.get("bias"), space, clf_normalize)
    if index.dim != expected.shape[1]:
        raise ValueError(f"the index is {index.dim} wide, space {space!r} {expected.shape[1]}")
    if len(labels["uid"].unique()) != labels.num_rows:
        raise ValueError("label uids are not unique")
    scores, _ = index.search(expected, 1)
    own = np.einsum("bd,bd->b", expected, expected)
    if index.kind == "flat" and (scores[:, 0] < own - 1e-3 * np.maximum(1.0, own)).any():
        raise ValueError("the index holds other vectors than de_LD, clf_LD and bias_L give")
    return matrices[0].shape[1]


def _knn_info(
    neighbours: Neighbours | None, shape: tuple[int, int], weight: float, num: int, space: Literal["de", "clf"]
) -> KnnInfo | None:
    """Votes that fit the labels and the heads."""
    if neighbours is None:
        if weight:
            raise ValueError(f"a weight of the votes ({weight}) without neighbours")
        return None
    got = (neighbours.num_labels, neighbours.vectors_MD.shape[1] if neighbours.words is None else shape[1])
    if got != shape:
        raise ValueError(f"neighbours of {got[0]} labels and width {got[1]}, the bundle has {shape[0]} and {shape[1]}")
    return KnnInfo(
        weight=float(weight),
        neighbours=num,
        vote=neighbours.vote,
        space=space,
        num_queries=neighbours.num_queries,
        num_pairs=int(neighbours.labels_ML.nnz),
        num_words=None if neighbours.words is None else neighbours.words.num_features,
    )


def _strings(values: Iterable[str] | Sequence[str]) -> pa.Array:
    array = values if isinstance(values, pa.Array) else pa.array(list(values), pa.string())
    return array.cast(pa.string())


def _write_labels(path: Path, table: pa.Table) -> None:
    """Uncompressed, in batches of a fixed size: the bytes depend on the texts only."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, LABEL_SCHEMA) as writer:
        for start in range(0, table.num_rows, LABEL_ROWS):
            writer.write_table(table.slice(start, LABEL_ROWS).combine_chunks())
