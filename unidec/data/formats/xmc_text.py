"""Layouts of a text a line: XMC text files, with pairs as sparse text or npz, and PECOS, with npz.

Both have one text for a query and no uids: the text is the title, the row number the uid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from unidec.data.formats.files import Source, next_line
from unidec.data.formats.pairs import read_npz, read_sparse_text
from unidec.data.formats.xmc_json import read_filters
from unidec.data.raw import RawData, row_uids, text_table
from unidec.errors import DataError

SHORT = {"train": "trn", "test": "tst"}


@dataclass(frozen=True)
class TextLayout:
    """Names of the files; {} is trn or tst. X.*.npz holds features: not read."""

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
    return text_table(row_uids(offset, len(texts)), texts)
