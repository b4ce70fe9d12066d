"""Label vectors as a file for any vector database: Parquet (uid, title, vector) or npy with the labels beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from unidec.data.storage import folder_sha256, read_manifest, write_file
from unidec.errors import DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle_folder import (
    KIND,
    LABEL_SCHEMA,
    VERSION,
    check_names,
    read_info,
    read_labels,
    read_vectors,
)
from unidec.retrieval.export.heads import Scored
from unidec.retrieval.scoring_space import space_rows

BLOCK_BYTES = 32 << 20  # of one block of rows, and of a Parquet row group: what is held at once
MAX_FLOAT16 = float(np.finfo(np.float16).max)


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
        target: .parquet: columns `uid`, `title` and `vector` (a list of fixed size), facts in the schema's metadata
            under `unidec`; .npy: [labels, width], with `<name>.labels.jsonl` (uid, title of each row) beside it.
        head: "both", "de" or "clf"; None: what the bundle ranks by.
        dtype: float16 halves the file and moves a score by about 1e-3 of the vectors' lengths.

    Returns:
        {"labels", "width", "head", "dtype", "bytes", "output"}.

    Raises:
        DataError: an unknown ending or head, or a value beyond float16.
        ArtifactError: the bundle is damaged, or the file cannot be written.
    """
    path, root = Path(target), Path(bundle)
    if path.suffix.lower() not in (".parquet", ".npy"):
        raise DataError("an output of unknown format", where=str(path), expected=".parquet or .npy")
    check_names(root, read_manifest(root, KIND, VERSION)["files"])  # checks every file's hash
    info = read_info(root)
    score, labels, vectors = Scored.of(info, head), read_labels(root, info.num_labels), read_vectors(root, info)

    def blocks() -> Iterator[np.ndarray]:
        """All rows, a whole row group at a time."""
        step = max(1, BLOCK_BYTES // (4 * score.width))
        bar: Progress[None] = progress(total=info.num_labels, desc="vectors", unit="label")
        with bar:
            for begin in range(0, info.num_labels, step):
                block = space_rows(vectors, slice(begin, begin + step), score.head, score.clf_normalize)
                if dtype == "float16" and (largest := float(np.abs(block).max())) > MAX_FLOAT16:
                    raise DataError(
                        "a value that float16 does not hold", where=f"label rows from {begin}", got=largest,
                        expected=f"<= {MAX_FLOAT16}", fix="--dtype float32",
                    )  # fmt: skip
                yield block.astype(dtype, copy=False)
                bar.update(len(block))

    facts = {"dtype": dtype, "bundle_sha256": folder_sha256(root), **score.facts()}
    if path.suffix.lower() == ".parquet":
        _write_parquet(path, labels, blocks(), score.width, facts)
    else:
        header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (info.num_labels, score.width)}
        with write_file(path) as file:
            np.lib.format.write_array_header_1_0(file, header)
            file.writelines(block.tobytes() for block in blocks())
        with write_file(path.with_name(f"{path.stem}.labels.jsonl")) as file:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in labels.to_pylist())
    facts = {"labels": info.num_labels, "width": score.width, "head": score.head, "dtype": dtype}
    return facts | {"bytes": path.stat().st_size, "output": str(path)}


def _write_parquet(
    path: Path, labels: pa.Table, blocks: Iterator[np.ndarray], width: int, facts: dict[str, Any]
) -> None:
    import pyarrow.parquet as pq

    vector = pa.list_(pa.field("element", pa.type_for_alias(facts["dtype"]), nullable=False), width)
    schema = LABEL_SCHEMA.append(pa.field("vector", vector, nullable=False))
    schema = schema.with_metadata({"unidec": json.dumps(facts, sort_keys=True)})
    # vectors hardly compress, and a dictionary of them would only cost time
    options: dict[str, Any] = {"compression": {"uid": "zstd", "title": "zstd", "vector.list.element": "none"}}
    begin = 0
    with write_file(path) as file, pq.ParquetWriter(file, schema, use_dictionary=False, **options) as writer:
        for block in blocks:
            some = labels.slice(begin, len(block)).combine_chunks()
            values = pa.FixedSizeListArray.from_arrays(pa.array(block.ravel()), type=vector)
            writer.write_table(pa.table([*some.columns, values], schema=schema), row_group_size=len(block))
            begin += len(block)
