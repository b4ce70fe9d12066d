"""Layouts of a text a line: XMC text files, with pairs as sparse text or npz, and PECOS, with npz.

Both have one text for a query and no uids: the text is the title, the row number the uid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix, save_npz

from unidec.data.formats.files import Source, next_line
from unidec.data.formats.pairs import read_npz, read_sparse_text
from unidec.data.formats.xmc_json import read_filters, write_filters
from unidec.data.raw import RawData, text_table
from unidec.errors import DataError

SHORT = {"train": "trn", "test": "tst"}


@dataclass(frozen=True)
class TextLayout:
    """Names of the files, the first of each is written; {} is trn or tst. X.*.npz holds features: not read."""

    EXPECTED: str
    labels: tuple[str, ...]
    queries: tuple[str, ...]
    pairs: tuple[str, ...]

    @property
    def NEEDS(self) -> tuple[Sequence[str], ...]:  # noqa: N802 (the other layouts are modules)
        return self.labels, _named(self.queries + self.pairs, "trn")

    def read(self, source: Source) -> RawData:
        """Read the layout; faults of single lines are noted in the source."""
        if source.find("X.trn.npz") and not source.find(*_named(self.queries, "trn")):
            raise DataError(
                "features without texts: a text encoder cannot be trained on X.trn.npz",
                where=str(source.root),
                expected="X.trn.txt and X.tst.txt, a text a line",
                fix="add the text files that the features were made of",
            )
        path = source.need(*self.labels)
        source.labels_at, labels = (source.name(path), next_line), _table(source, path, 0)
        queries, relevance, filters = {}, {}, {}
        offset = 0
        for split, short in SHORT.items():
            names = _named(self.queries, short)
            found = source.need(*names) if split == "train" else source.find(*names)
            if found is None:
                continue
            source.queries_at[split] = (source.name(found), next_line)
            queries[split] = _table(source, found, offset)
            shape = (queries[split].num_rows, labels.num_rows)
            path = source.need(*_named(self.pairs, short))
            pairs = read_npz(source, path, shape) if path.suffix == ".npz" else read_sparse_text(source, path, shape)
            relevance[split] = pairs.matrix(shape)
            filters[split] = read_filters(source, split, shape)
            offset += shape[0]
        return RawData(source.root.name, queries, labels, relevance, filters)

    def write(self, raw: RawData, out: Path) -> None:
        """Write the layout; line breaks in texts become spaces, contents and uids are left out."""
        _write_texts(out / self.labels[0], raw.labels)
        for split, short in SHORT.items():
            if split in raw.queries:
                _write_texts(out / self.queries[0].format(short), raw.queries[split])
                _write_pairs(out / self.pairs[0].format(short), raw.relevance[split])
        write_filters(raw, out)


XMC_TEXT = TextLayout(
    "trn_X.txt, Y.txt (also in raw/), trn_X_Y.txt or Y.trn.npz (and the same with tst)",
    ("Y.txt", "raw/Y.txt"),
    ("{}_X.txt", "raw/{}_X.txt"),
    ("{}_X_Y.txt", "raw/{}_X_Y.txt", "Y.{}.npz"),
)
PECOS = TextLayout(
    "X.trn.txt, Y.trn.npz, output-items.txt (and the same with tst)",
    ("output-items.txt",),
    ("X.{}.txt",),
    ("Y.{}.npz",),
)


def _named(patterns: tuple[str, ...], short: str) -> list[str]:
    return [pattern.format(short) for pattern in patterns]


def _table(source: Source, path: Path, offset: int) -> pa.Table:
    texts = source.texts(path)
    return text_table(pc.cast(pa.array(np.arange(offset, offset + len(texts))), pa.large_string()), texts)


def _write_texts(path: Path, table: pa.Table) -> None:
    titles = pc.replace_substring_regex(table["title"], r"[\r\n]+", " ")
    path.write_bytes("".join(f"{title}\n" for title in titles.to_pylist()).encode())


def _write_pairs(path: Path, matrix: csr_matrix) -> None:
    with open(path, "wb") as file:
        if path.suffix == ".npz":
            save_npz(file, matrix)  # zip entries have a fixed date: the same bytes
            return
        file.write(f"{matrix.shape[0]} {matrix.shape[1]}\n".encode())
        pairs = [f"{i}:{v:.9g}" for i, v in zip(matrix.indices.tolist(), matrix.data.tolist(), strict=True)]
        for first, last in zip(matrix.indptr[:-1].tolist(), matrix.indptr[1:].tolist(), strict=True):
            file.write((" ".join(pairs[first:last]) + "\n").encode())
