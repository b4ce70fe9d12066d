"""Sparse matrices in scipy's npz files, read without trusting what they declare."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix, save_npz

from unidec.data.bounded import check_unpacked
from unidec.data.formats.files import Source
from unidec.data.formats.problems import pair_matrix
from unidec.errors import DataError

_NEEDS = {"csr": ("indptr", "indices", "data"), "csc": ("indptr", "indices", "data"), "coo": ("row", "col", "data")}
_NPZ_ERRORS = (zipfile.BadZipFile, ValueError, OSError, KeyError, EOFError, NotImplementedError)


def read_npz(source: Source, path: Path, shape: tuple[int, int]) -> csr_matrix:
    """Relevance from an npz file as written by `scipy.sparse.save_npz` (csr, csc or coo).

    The headers of all arrays are checked against the number of texts before one of them is allocated; nothing is
    unpickled.

    Args:
        shape: (queries, labels) as the text files have it.

    Raises:
        DataError: not such a file, or row counts that differ from the texts. Faults of single pairs are noted in
            `source`.
    """
    name = source.name(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_unpacked(path, sum(info.file_size for info in archive.infolist()), source.bounds)
            headers = {info.filename.removesuffix(".npy"): _header(archive, info) for info in archive.infolist()}
            kind = str(_load(archive, "format", headers).astype("U8"))
            if kind not in _NEEDS or not set(_NEEDS[kind]) <= headers.keys():
                raise ValueError(f"format {kind!r} with arrays {', '.join(sorted(headers))}")
            found = tuple(int(n) for n in _load(archive, "shape", headers).ravel()[:3])
            if found != shape:
                raise DataError(
                    "row counts that differ: the matrix does not match the texts",
                    where=str(path),
                    got=f"{found} (queries, labels)",
                    expected=f"{shape}, as the text files have",
                )
            _check_sizes(kind, headers, shape)
            arrays = {part: _load(archive, part, headers) for part in _NEEDS[kind]}
    except _NPZ_ERRORS as error:
        raise DataError(
            "not a sparse matrix in npz",
            where=str(path),
            got=str(error)[:200],
            fix="write it with scipy.sparse.save_npz",
        ) from error
    query_P, label_P = _rows_and_columns(kind, arrays, path)
    return pair_matrix(
        query_P,
        label_P,
        arrays["data"].astype(np.float64),
        shape,
        problems=source.problems,
        file=name,
        lines=lambda pairs: query_P[pairs] + 1,
    )


def write_npz(path: Path, matrix: csr_matrix) -> None:
    """Write a CSR matrix as npz; zip entries have a fixed date, so the bytes depend on the matrix only."""
    with open(path, "wb") as file:
        save_npz(file, matrix)


def _header(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype]:
    with archive.open(info) as member:
        version = np.lib.format.read_magic(member)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, _, dtype = read(member)
        stored = info.file_size - member.tell()
    declared = dtype.itemsize
    for extent in shape:  # Python integers: no overflow
        declared *= int(extent)
    if dtype.hasobject or declared != stored:
        raise ValueError(f"{info.filename}: {dtype} {shape} declared, {stored} bytes stored")
    return shape, dtype


def _load(archive: zipfile.ZipFile, name: str, headers: dict) -> np.ndarray:
    limit = 1 << 12 if name in ("format", "shape") else None
    shape, dtype = headers[name]
    if limit and (np.prod(shape, dtype=object) * dtype.itemsize > limit):
        raise ValueError(f"{name} of impossible size {shape}")
    with archive.open(f"{name}.npy") as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _check_sizes(kind: str, headers: dict, shape: tuple[int, int]) -> None:
    num_pairs = headers["data"][0]
    if len(num_pairs) != 1 or num_pairs[0] > shape[0] * shape[1]:
        raise ValueError(f"data of shape {num_pairs}: more pairs than queries x labels")
    for part in _NEEDS[kind]:
        extent, dtype = headers[part]
        expected = num_pairs if part != "indptr" else (shape[0 if kind == "csr" else 1] + 1,)
        if extent != expected or dtype.kind not in ("biuf" if part == "data" else "iu"):
            raise ValueError(f"{part} is {dtype} {extent}, expected {expected}")


def _rows_and_columns(kind: str, arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray]:
    if kind == "coo":
        return arrays["row"].astype(np.int64), arrays["col"].astype(np.int64)
    indptr = arrays["indptr"].astype(np.int64)
    if indptr[0] != 0 or indptr[-1] != arrays["data"].size or np.any(np.diff(indptr) < 0):
        raise DataError("row pointers that do not ascend from 0 to the number of pairs", where=str(path))
    major = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    minor = arrays["indices"].astype(np.int64)
    return (major, minor) if kind == "csr" else (minor, major)
