"""XMC text files: a text a line in {trn,tst}_X.txt and Y.txt, pairs as sparse text or npz; and PECOS, its sibling.

Both have one text for a query and no uids: the text is the title, the row number the uid.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix, save_npz

from unidec.data.formats.files import Source, next_line
from unidec.data.formats.pairs import Pairs, read_npz, read_sparse_text
from unidec.data.formats.xmc_json import read_filters, write_filters
from unidec.data.raw import RawData, text_table
from unidec.errors import DataError

EXPECTED = "trn_X.txt, Y.txt (also in raw/), trn_X_Y.txt or Y.trn.npz (and the same with tst)"
SHORT = {"train": "trn", "test": "tst"}


def fits(source: Source) -> bool:
    """Whether the folder has files of this layout."""
    return bool(source.find("trn_X.txt", "raw/trn_X.txt") and source.find("Y.txt", "raw/Y.txt"))


def read(source: Source) -> RawData:
    """Read the layout; faults of single lines are noted in `source.problems`."""

    def pairs(short: str, shape: tuple[int, int]) -> Pairs:
        path = source.need(f"{short}_X_Y.txt", f"raw/{short}_X_Y.txt", f"Y.{short}.npz")
        return read_npz(source, path, shape) if path.suffix == ".npz" else read_sparse_text(source, path, *shape)

    return _read(source, ("Y.txt", "raw/Y.txt"), lambda short: (f"{short}_X.txt", f"raw/{short}_X.txt"), pairs)


def write(raw: RawData, out: Path) -> None:
    """Write the layout with sparse text; line breaks in texts become spaces, contents and uids are left out."""
    _write_texts(out / "Y.txt", raw.labels)
    for split, short in SHORT.items():
        if split in raw.queries:
            _write_texts(out / f"{short}_X.txt", raw.queries[split])
            _write_sparse_text(out / f"{short}_X_Y.txt", raw.relevance[split])
    write_filters(raw, out)


def _read(
    source: Source,
    label_files: tuple[str, ...],
    query_files: Callable[[str], tuple[str, ...]],
    pairs_of: Callable[[str, tuple[int, int]], Pairs],
) -> RawData:
    path = source.need(*label_files)
    source.labels_at, labels = (source.name(path), next_line), _table(source, path, 0)
    queries, relevance, filters = {}, {}, {}
    offset = 0
    for split, short in SHORT.items():
        found = source.need(*query_files(short)) if split == "train" else source.find(*query_files(short))
        if found is None:
            continue
        source.queries_at[split] = (source.name(found), next_line)
        queries[split] = _table(source, found, offset)
        shape = (queries[split].num_rows, labels.num_rows)
        relevance[split] = pairs_of(short, shape).matrix(shape)
        filters[split] = read_filters(source, split, shape)
        offset += shape[0]
    return RawData(source.root.name, queries, labels, relevance, filters)


def _table(source: Source, path: Path, offset: int) -> pa.Table:
    texts = source.texts(path)
    return text_table(pc.cast(pa.array(np.arange(offset, offset + len(texts))), pa.large_string()), texts)


def _write_texts(path: Path, table: pa.Table) -> None:
    titles = pc.replace_substring_regex(table["title"], r"[\r\n]+", " ")
    path.write_bytes("".join(f"{title}\n" for title in titles.to_pylist()).encode())


def _write_sparse_text(path: Path, matrix: csr_matrix) -> None:
    with open(path, "w", encoding="ascii", newline="\n") as file:
        file.write(f"{matrix.shape[0]} {matrix.shape[1]}\n")
        pairs = [f"{i}:{v:.9g}" for i, v in zip(matrix.indices.tolist(), matrix.data.tolist(), strict=True)]
        for first, last in zip(matrix.indptr[:-1].tolist(), matrix.indptr[1:].tolist(), strict=True):
            file.write(" ".join(pairs[first:last]) + "\n")


class Pecos:
    """PECOS: X.{trn,tst}.txt (a text a line), Y.{trn,tst}.npz, output-items.txt. X.*.npz holds features: not read."""

    EXPECTED = "X.trn.txt, Y.trn.npz, output-items.txt (and the same with tst)"

    @staticmethod
    def fits(source: Source) -> bool:
        """Whether the folder has files of this layout."""
        return bool(source.find("output-items.txt") and source.find("Y.trn.npz"))

    @staticmethod
    def read(source: Source) -> RawData:
        """Read the layout; faults of single lines are noted in `source.problems`."""
        if source.find("X.trn.npz") and not source.find("X.trn.txt"):
            raise DataError(
                "features without texts: a text encoder cannot be trained on X.trn.npz",
                where=str(source.root),
                expected="X.trn.txt and X.tst.txt, a text a line",
                fix="add the text files that the features were made of",
            )
        return _read(
            source,
            ("output-items.txt",),
            lambda short: (f"X.{short}.txt",),
            lambda short, shape: read_npz(source, source.need(f"Y.{short}.npz"), shape),
        )

    @staticmethod
    def write(raw: RawData, out: Path) -> None:
        """Write the layout (no features); line breaks in texts become spaces, contents and uids are left out."""
        _write_texts(out / "output-items.txt", raw.labels)
        for split, short in SHORT.items():
            if split in raw.queries:
                _write_texts(out / f"X.{short}.txt", raw.queries[split])
                with open(out / f"Y.{short}.npz", "wb") as file:  # zip entries have a fixed date: the same bytes
                    save_npz(file, raw.relevance[split])
        write_filters(raw, out)
