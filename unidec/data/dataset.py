"""The stored data set: texts (Arrow), relevance and filter pairs (CSR), all memory-mapped, with a
manifest.

Shape suffixes: N queries of all splits, L labels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from unidec.data.array_file import load_csr, row_blocks, write_csr
from unidec.data.chunks import blocks
from unidec.data.raw import SPLITS, TEXT_SCHEMA, RawData, are_blank, hold_out
from unidec.data.storage import (
    files_sha256,
    load_array,
    manifest_sha256,
    read_manifest,
    verify_once,
    write_folder,
)
from unidec.errors import ArtifactError

KIND = "dataset"
VERSION = 1
BATCH_ROWS = 65_536
Split = Literal["train", "validation", "test"]
Text = Literal["title", "title+content"]
Rows = Sequence[int] | np.ndarray | None


class XMCDataset:
    """A data set opened from its folder; texts and pairs stay on disk until they are read.

    Queries of all splits are one table: training and validation queries in raw order, then test
    queries.

    Attributes:
        path, manifest: the folder and its manifest; "meta" holds name, format, sizes and the hash
            of the raw files.
        name: of the data set.
        num_queries, num_labels: N and L.
        queries, labels: tables with columns uid, title, content.
        split_N: uint8 [N], 0 train, 1 validation, 2 test.
        relevance: float32 CSR [N, L], positive, sorted indices; the arrays are memory-mapped and
            read-only.
        filter_pairs: bool CSR [N, L]: pairs that are neither positives nor negatives.
        sha256: of the contents, computed from the manifest's file hashes.

    Example:
        >>> dataset = unidec.XMCDataset.open("data/dataset")
        >>> dataset.relevance.shape == (dataset.num_queries, dataset.num_labels)
        True
    """

    def __init__(self, path: Path, manifest: dict[str, Any], check: bool) -> None:
        self.path = path
        self.manifest = manifest
        meta = manifest["meta"]
        self.name = str(meta.get("name"))
        self.sha256 = manifest_sha256(manifest)
        self.queries = _open_texts(path / "queries.arrow", meta.get("num_queries"))
        self.labels = _open_texts(path / "labels.arrow", meta.get("num_labels"))
        self.num_queries = self.queries.num_rows
        self.num_labels = self.labels.num_rows
        splits = path / "split.npy"
        self.split_N = load_array(splits, np.uint8)
        num_rows = len(self.split_N)
        if num_rows != self.num_queries:
            _refuse(splits, "number of rows differs from the queries", num_rows, self.num_queries)
        if check and num_rows and (last := int(self.split_N.max())) >= len(SPLITS):
            _refuse(splits, "an unknown split", last, f"at most {len(SPLITS) - 1}")
        shape = (self.num_queries, self.num_labels)
        self.relevance = load_csr(path, "relevance_", shape, np.float32, check)
        self.filter_pairs = load_csr(path, "filter_", shape, bool, check)

    @classmethod
    def open(cls, path: str | os.PathLike[str], verify: bool = True) -> XMCDataset:
        """Open a folder written by `write_dataset`.

        Args:
            verify: also check every file's sha256 and every index, once per process unless the
                files change.

        Raises:
            ArtifactError: the data set is missing, damaged, or of a newer version.
        """
        root = Path(path)
        with verify_once(root, verify) as needed:
            return cls(root, read_manifest(root, KIND, VERSION, verify=needed), check=needed)

    def rows(self, split: Split) -> np.ndarray:
        """Row numbers of the queries of a split, ascending: int64 [n]."""
        return np.flatnonzero(self.split_N == SPLITS.index(split))

    def query_texts(self, rows: Rows = None, text: Text = "title") -> list[str]:
        """Texts of the queries at these rows (None: all).

        "title+content" joins the non-empty parts with a space. "title" is the content where the
        title is blank."""
        return texts_read(_take(self.queries, rows), text).to_pylist()

    def label_texts(self, rows: Rows = None, text: Text = "title") -> list[str]:
        """Texts of the labels at these rows (None: all); see `query_texts`."""
        return texts_read(_take(self.labels, rows), text).to_pylist()

    def query_uids(self, rows: Rows = None) -> list[str]:
        """uids of the queries at these rows (None: all)."""
        return _take(self.queries, rows)["uid"].to_pylist()

    def query_columns(self, rows: Rows) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """`query_uids` and `query_texts` as Arrow arrays, without a Python object per text."""
        table = _take(self.queries, rows)
        return table["uid"], texts_read(table, "title")

    def label_uids(self, rows: Rows = None) -> list[str]:
        """uids of the labels at these rows (None: all)."""
        return _take(self.labels, rows)["uid"].to_pylist()

    def text_batches(
        self,
        which: Literal["queries", "labels"],
        text: Text = "title",
        batch_size: int = 8192,
        first: int = 0,
        end: int | None = None,
    ) -> Iterator[list[str]]:
        """Texts of queries or labels in the order of their rows, in batches.

        Args:
            first, end: the first row, and the last one (exclusive; None: of all).
        """
        table = (self.queries if which == "queries" else self.labels)[first:end]
        for some in blocks(table.num_rows, batch_size):
            yield texts_read(table[some], text).to_pylist()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{self.rows(split).size:,} {split}" for split in SPLITS)
        return (
            f"XMCDataset({self.name!r}: {sizes}; {self.num_labels:,} labels; "
            f"{self.relevance.nnz:,} pairs)"
        )


def write_dataset(
    path: str | os.PathLike[str],
    raw: RawData,
    *,
    validation_share: float = 0.05,
    split_seed: int = 0,
) -> XMCDataset:
    """Store raw data as an `XMCDataset`; the same data and arguments give the same bytes.

    Args:
        path: folder to write; an existing one is replaced once everything is written.
        validation_share, split_seed: share of the training queries held out for validation
            (`hold_out`), and its seed; not used if the raw data has a validation split.

    Raises:
        ArtifactError: the folder cannot be written.
    """
    order = [split for split in SPLITS if split in raw.queries]
    queries = pa.concat_tables([raw.queries[split] for split in order])
    relevance = [raw.relevance[split] for split in order]
    filter_pairs = [raw.filter_pairs[split] for split in order]
    num_pairs = sum(matrix.nnz for matrix in relevance)
    num_filter_pairs = sum(matrix.nnz for matrix in filter_pairs)
    numbers = [SPLITS.index(split) for split in order]
    sizes = [raw.queries[split].num_rows for split in order]
    split_N = np.repeat(np.asarray(numbers, dtype=np.uint8), sizes)
    if "validation" not in order:
        train = raw.queries["train"]
        folder = Path(os.path.abspath(path)).parent
        folder.mkdir(parents=True, exist_ok=True)
        held = hold_out(train, raw.filter_pairs["train"], validation_share, split_seed, folder)
        split_N[: len(held)][held] = SPLITS.index("validation")
    split_sizes = np.bincount(split_N, minlength=len(SPLITS))
    meta = {
        "name": raw.name,
        "format": raw.format,
        "num_queries": queries.num_rows,
        "num_labels": raw.num_labels,
        "num_pairs": num_pairs,
        "num_filter_pairs": num_filter_pairs,
        "splits": dict(zip(SPLITS, split_sizes.tolist(), strict=True)),
        "raw_sha256": files_sha256(raw.files),
        "raw_files": raw.files,
    }
    num_bytes = queries.nbytes + raw.labels.nbytes + 17 * queries.num_rows
    num_bytes += 8 * num_pairs + 4 * num_filter_pairs
    with write_folder(path, KIND, VERSION, meta, num_bytes=num_bytes) as out:
        write_texts_table(out.path / "queries.arrow", queries)
        write_texts_table(out.path / "labels.arrow", raw.labels)
        np.save(out.path / "split.npy", split_N, allow_pickle=False)
        write_csr(out.path, "relevance_", _row_blocks(relevance), np.float32)
        write_csr(out.path, "filter_", _row_blocks(filter_pairs), bool)
    return XMCDataset.open(path, verify=False)


def _row_blocks(matrices: Sequence[csr_matrix]) -> Iterator[csr_matrix]:
    """Blocks of rows of the vertically stacked matrices."""
    for matrix in matrices:
        for start, end in row_blocks(matrix.indptr):
            yield csr_matrix(matrix[start:end])


def _refuse(path: Path, what: str, got: object, expected: object) -> NoReturn:
    raise ArtifactError(
        what, where=path, got=got, expected=expected, fix="run `unidec data ingest` again"
    )


def write_texts_table(path: Path, table: pa.Table) -> None:
    """Write an uncompressed Arrow IPC file in batches of a fixed size, so that its bytes depend on
    the texts only.
    """
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        for some in blocks(table.num_rows, BATCH_ROWS):
            writer.write_table(table[some].combine_chunks())


def _open_texts(path: Path, num_rows: int | None) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        _refuse(path, "not a readable Arrow file", error, "an Arrow file")
    if table.schema.remove_metadata() != TEXT_SCHEMA:
        _refuse(path, "unexpected columns", table.schema.names, TEXT_SCHEMA.names)
    if table.num_rows != num_rows:
        _refuse(path, "number of rows differs from the manifest", table.num_rows, num_rows)
    return table


def _take(table: pa.Table, rows: Rows) -> pa.Table:
    if rows is None:
        return table
    return table.take(pa.array(np.asarray(rows, dtype=np.int64)))


def texts_read(table: pa.Table, text: Text) -> pa.ChunkedArray:
    """The texts that a model reads: titles, or titles with contents (see `query_texts`)."""
    title = table["title"]
    content = table["content"]
    if text == "title":
        is_blank = are_blank(title)
        return pc.if_else(is_blank, content, title) if pc.any(is_blank).as_py() else title
    if text != "title+content":
        raise ValueError(f"text must be 'title' or 'title+content', not {text!r}")
    nothing = pa.scalar(None, title.type)
    parts = [pc.if_else(pc.equal(part, ""), nothing, part) for part in (title, content)]
    separator = pa.scalar(" ", title.type)
    return pc.binary_join_element_wise(*parts, separator, null_handling="skip")
