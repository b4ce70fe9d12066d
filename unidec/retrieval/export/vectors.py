"""Label vectors as a file for any vector database: Parquet (uid, title, vector) or npy with the labels beside it.

Legend: L labels, n some of them, D' width of the space.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import pyarrow as pa

from unidec.data.storage import folder_sha256, read_manifest
from unidec.errors import DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle_folder import KIND, VERSION, BundleInfo, check_names, read_info, read_labels, read_vectors
from unidec.retrieval.export.heads import Scored
from unidec.retrieval.predict_file import beside

BLOCK_BYTES = 32 << 20  # of one block of rows, and of a Parquet row group: what is held at once
MAX_FLOAT16 = float(np.finfo(np.float16).max)
ENDINGS = (".parquet", ".npy")
_ARROW = {"float32": pa.float32(), "float16": pa.float16()}


def export_vectors(
    bundle: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    head: str | None = None,
    dtype: Literal["float32", "float16"] = "float32",
) -> dict[str, Any]:
    """Write the label side of a score; the query side comes from the other exports with the same head.

    Rows are in the bundle's order. Memory does not grow with the number of labels (but for uids and titles). The same
    bundle gives the same bytes.

    Args:
        bundle: a bundle's folder; its model and index are not loaded.
        target: .parquet: columns `uid`, `title` and `vector` (a list of fixed size D'), facts in the schema's metadata
            under `unidec`; .npy: [L, D'], with `<name>.labels.jsonl` (uid, title of each row) beside it.
        head: "both", "de" or "clf"; None: what the bundle ranks by.
        dtype: float16 halves the file and moves a score by about 1e-3 of the vectors' lengths.

    Returns:
        {"labels", "width", "head", "dtype", "bytes", "output"}.

    Raises:
        DataError: an unknown ending or head, or a value beyond float16.
        ArtifactError: the bundle is damaged.
    """
    path = Path(target)
    if path.suffix.lower() not in ENDINGS:
        raise DataError("an output of unknown format", where=str(path), expected=" or ".join(ENDINGS))
    if dtype not in _ARROW:
        raise DataError("an unknown dtype", where="--dtype", got=dtype, expected=" or ".join(_ARROW))
    side = _LabelSide.open(Path(bundle))
    score = Scored.of(side.info, head)
    if path.suffix.lower() == ".parquet":
        _write_parquet(path, side, score, dtype)
    else:
        _write_npy(path, side, score, dtype)
    facts = {"labels": side.info.num_labels, "width": score.width, "head": score.head, "dtype": dtype}
    return facts | {"bytes": path.stat().st_size, "output": str(path)}


@dataclass(frozen=True)
class _LabelSide:
    """Labels of a bundle without its model and index; the vectors are memory-mapped."""

    sha256: str
    info: BundleInfo
    labels: pa.Table
    vectors: Mapping[str, np.ndarray]

    @classmethod
    def open(cls, folder: Path) -> _LabelSide:
        """Every file's hash is checked."""
        manifest = read_manifest(folder, KIND, VERSION)
        check_names(folder, manifest["files"])
        info = read_info(folder)
        labels = read_labels(folder, info.num_labels)
        return cls(folder_sha256(folder), info, labels, read_vectors(folder, info))


def _blocks(side: _LabelSide, score: Scored, dtype: str) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, [n, D']) of all labels, a block of whole row groups at a time, with progress."""
    step = max(1, BLOCK_BYTES // (4 * score.width))
    bar: Progress[None] = progress(total=side.info.num_labels, desc="vectors", unit="label")
    with bar:
        for begin in range(0, side.info.num_labels, step):
            end = min(begin + step, side.info.num_labels)
            block = score.labels(side.vectors, begin, end)
            if dtype == "float16" and (largest := float(np.abs(block).max())) > MAX_FLOAT16:
                raise DataError(
                    "a value that float16 does not hold", where=f"label rows {begin} to {end}", got=largest,
                    expected=f"<= {MAX_FLOAT16}", fix="--dtype float32",
                )  # fmt: skip
            yield begin, block.astype(dtype, copy=False)
            bar.update(end - begin)


def _write_parquet(path: Path, side: _LabelSide, score: Scored, dtype: str) -> None:
    import pyarrow.parquet as pq

    vector = pa.list_(pa.field("element", _ARROW[dtype], nullable=False), score.width)
    facts = score.facts() | {"dtype": dtype, "bundle_sha256": side.sha256}
    schema = pa.schema(
        [
            pa.field("uid", pa.string(), nullable=False),
            pa.field("title", pa.string(), nullable=False),
            pa.field("vector", vector, nullable=False),
        ],
        metadata={"unidec": json.dumps(facts, sort_keys=True)},
    )
    # vectors hardly compress, and a dictionary of them would only cost time
    options: dict[str, Any] = {"compression": {"uid": "zstd", "title": "zstd", "vector.list.element": "none"}}
    with beside(path) as file, pq.ParquetWriter(file, schema, use_dictionary=False, **options) as writer:
        for begin, block in _blocks(side, score, dtype):
            some = side.labels.slice(begin, len(block))
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel(), _ARROW[dtype]), type=vector)
            columns = [some["uid"].combine_chunks(), some["title"].combine_chunks(), values]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=len(block))


def _write_npy(path: Path, side: _LabelSide, score: Scored, dtype: str) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (side.info.num_labels, score.width),
    }
    with beside(path.with_name(f"{path.stem}.labels.jsonl")) as labels, beside(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for begin, block in _blocks(side, score, dtype):
            file.write(block.tobytes())
            _write_labels(labels, side.labels.slice(begin, len(block)))


def _write_labels(file: IO[bytes], labels: pa.Table) -> None:
    rows = labels.to_pylist()
    file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
