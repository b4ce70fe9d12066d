"""Queries, labels and pairs given as Python objects: lists, mappings, tables and matrices.

They are converted to tables of the layout `tables` and checked like its files. Input that is
ambiguous, or that would be read only in part, is refused. Errors name positions, counted from 0.

Legend: P pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.sparse import coo_matrix, issparse

from unidec.data.formats.files import Source, places_in
from unidec.data.formats.table_reader import Table, TableReader, check_columns
from unidec.data.formats.tables import LABEL_COLUMNS, PAIR_COLUMNS, QUERY_COLUMNS, join_tables
from unidec.data.raw import RawData
from unidec.data.table_file import check_names
from unidec.data.tokens import is_unicode
from unidec.errors import DataError

_TABLES = "a list, a mapping of uid to text, or a table of pandas, polars, pyarrow or datasets"
_PAIRS = (
    "a list of (query, label) or (query, label, relevance), a table with these columns, or a "
    "sparse matrix"
)
_AMBIGUOUS = "csr_matrix(pairs) for a matrix; [tuple(pair) for pair in pairs.tolist()] for pairs"


class Given(Source):
    """The errors found in data from memory."""

    fix = "correct these rows (positions count from 0); nothing was trained"


def read_given(source: Given, queries: Any, labels: Any, pairs: Any) -> RawData:
    """Read a data set from memory.

    Args:
        source: records the errors in single rows.
        queries, labels: texts, see `_text_table`; labels also as a `Table`.
        pairs: see `_pairs`.

    Raises:
        DataError: the data is none of the supported kinds, a column is missing or unknown, or a
        table has errors.
    """
    query_table = _text_table(source, queries, "queries", QUERY_COLUMNS)
    if not isinstance(labels, Table):
        labels = _text_table(source, labels, "labels", LABEL_COLUMNS)
    found = _pairs(source, pairs, query_table, labels)
    return join_tables(source, query_table, labels, found)


def known_labels(uids: pa.Array, titles: pa.Array) -> Table:
    """The labels of a model as a table."""
    table = pa.table({"id": uids, "text": titles})
    columns = {name: table[name].cast(pa.large_string()) for name in table.column_names}
    return Table(places_in("labels", np.asarray), columns, table.num_rows)


def listed(given: Any, what: str) -> list[Any]:
    """The values of a list, tuple, array, Series or column, in order.

    Raises:
        DataError: a single text, or something without an order or with more than one dimension.
    """
    shape = getattr(given, "shape", ())
    got = type(given).__name__
    if isinstance(given, str | bytes):
        got = "a single text"
    elif len(shape) > 1:
        got = f"an array of shape {shape}"
    elif isinstance(given, Sequence):
        return list(given)
    else:
        # of numpy and pandas, Arrow, polars
        for name in ("tolist", "to_pylist", "to_list"):
            if hasattr(given, name):
                return list(getattr(given, name)())
    raise DataError("expected a list of texts", where=what, got=got, fix=f"[text], or list({what})")


def _text_table(
    source: Given, given: Any, what: str, columns: tuple[Sequence[str], Sequence[str]]
) -> Table:
    """Texts as a table.

    Args:
        given: a list (the uid of an entry is its position); a mapping of uid to text; a Series (its
            index holds the uids); or a table with column `text` and, unless its index holds the
            uids, `id`.
        what: "queries" or "labels".
        columns: names of the required and of the optional columns.
    """
    named = _columns_of(given, what)
    if named is None:
        if isinstance(given, Mapping):
            named = [("id", list(given)), ("text", list(given.values()))]
        else:
            named = [("text", listed(given, what))]
    if "id" not in dict(named):
        uids = list(range(len(named[0][1]) if named else 0))
        if isinstance(given, pd.DataFrame | pd.Series):
            uids = _index_uids(given.index, what)
        named = [("id", uids), *named]
    elif isinstance(given, pd.DataFrame):
        _refuse_named_index(given, what)
    table = _table(source, what, named, columns)
    if not table.num_rows:
        raise DataError("no texts given", where=what, expected="at least one text")
    return table


def _pairs(source: Given, given: Any, queries: Table, labels: Table) -> Table:
    """Pairs as a table.

    Args:
        given: a table with columns query_id, label_id and optionally relevance and split; a list of
            tuples (query, label) or (query, label, relevance); or a matrix [queries, labels],
            sparse or dense. An array with two or three columns of ids is a list of pairs.
    """
    if issparse(given) or isinstance(given, np.ndarray):
        has_ids = given.dtype.kind in "iuUO"
        is_list = has_ids and given.ndim == 2 and given.shape[1] in (2, 3)
        if issparse(given) or not is_list:
            return _entries(given, queries, labels)
        if given.dtype.kind in "iu" and given.shape == (queries.num_rows, labels.num_rows):
            raise DataError(
                "ambiguous: an array of this shape may be a matrix of queries and labels, or a "
                "list of pairs",
                where="pairs",
                got=given.shape,
                fix=_AMBIGUOUS,
            )
        given = list(map(tuple, given.tolist()))
    named = _columns_of(given, "pairs")
    if named is None:
        return _list_of_pairs(source, given, queries.num_rows)
    if isinstance(given, pd.DataFrame):
        _refuse_named_index(given, "pairs")
    return _table(source, "pairs", named, PAIR_COLUMNS)


def _entries(given: Any, queries: Table, labels: Table) -> Table:
    """The entries of a matrix, whose rows and columns are in the order of the tables. Explicit
    zeros are not pairs; repeated entries are kept, so that they are reported as pairs given twice.
    """
    shape = (queries.num_rows, labels.num_rows)
    if given.shape != shape or given.dtype.kind not in "biuf":
        raise DataError(
            "pairs have the wrong shape, or the matrix does not hold numbers",
            where="pairs",
            got=f"{given.dtype} {given.shape}",
            expected=f"numbers of at least 0, {shape}, or whole numbers or texts in two columns",
        )
    matrix = coo_matrix(given)
    stored = np.flatnonzero(matrix.data)
    row_P = matrix.row[stored]
    columns = {
        "query_id": queries.columns["id"].take(pa.array(row_P)),
        "label_id": labels.columns["id"].take(pa.array(matrix.col[stored])),
        "relevance": pa.chunked_array([matrix.data[stored].astype(np.float64)]),
    }
    return Table(places_in("pairs", row_P.__getitem__), columns, len(stored))


def _columns_of(given: Any, what: str) -> list[tuple[str, list[Any]]] | None:
    """Names and values of a table's columns, in order; None if it is not a table."""
    if isinstance(given, pd.DataFrame):
        return [(str(name), column.tolist()) for name, column in given.items()]
    names: Any = getattr(given, "column_names", getattr(given, "columns", None))
    if names is None:
        return None
    if isinstance(given, pa.RecordBatch) or hasattr(given, "__arrow_c_stream__"):
        table = pa.table(given)
        columns = [column.to_pylist() for column in table.columns]
        return list(zip(table.column_names, columns, strict=True))
    # Hugging Face datasets
    if isinstance(names, list) and hasattr(given, "__getitem__"):
        return [(name, list(given[name])) for name in names]
    raise DataError(
        "a table that cannot be read",
        where=what,
        got=type(given).__name__,
        expected=_TABLES,
        fix="give the table itself, in memory: .collect() (polars), .compute() (dask), one split "
        "(datasets)",
    )


def _index_uids(index: pd.Index, what: str) -> list[Any]:
    if isinstance(index, pd.MultiIndex):
        raise DataError(
            "an index of several levels cannot hold the uids",
            where=what,
            fix="reset_index(), with one column `id`",
        )
    return list(index.tolist())


def _refuse_named_index(frame: pd.DataFrame, what: str) -> None:
    """Raise a DataError for a named or multi-level index: its columns would not be read."""
    names = [str(name) for name in frame.index.names if name is not None]
    if names or isinstance(frame.index, pd.MultiIndex):
        raise DataError(
            "the index would not be read",
            where=what,
            got=", ".join(names) or "several levels",
            fix="reset_index() if it is needed, else reset_index(drop=True)",
        )


def _list_of_pairs(source: Given, given: Any, num_queries: int) -> Table:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence | Set):
        raise DataError(
            "pairs cannot be read",
            where="pairs",
            got=type(given).__name__,
            expected=_PAIRS,
            fix="list(pairs)" if isinstance(given, Iterator) else None,
        )
    entries = list(given)
    lengths = [len(one) if isinstance(one, tuple | list | np.ndarray) else 0 for one in entries]
    # if the entries differ in length, the shortest valid length is expected
    length = 2 if 2 in lengths else 3
    for place, entry in enumerate(entries):
        if lengths[place] != length:
            raise DataError(
                "not a pair",
                where=f"pairs, position {place}",
                got=repr(entry)[:80],
                expected=_PAIRS,
            )
    if len(entries) == num_queries and not any(isinstance(entry, tuple) for entry in entries):
        raise DataError(
            "ambiguous: as many lists as queries may be pairs, or the labels of each query",
            where="pairs",
            fix="[tuple(pair) for pair in pairs] for pairs",
        )
    columns = [list(column) for column in zip(*entries, strict=True)] or [[], []]
    names = ("query_id", "label_id", "relevance")
    return _table(source, "pairs", list(zip(names, columns, strict=False)), PAIR_COLUMNS)


def _table(
    source: Given,
    what: str,
    named: list[tuple[str, list[Any]]],
    columns: tuple[Sequence[str], Sequence[str]],
) -> Table:
    """A table of these columns, with the checks that a file's header and rows get."""
    names = [name for name, _ in named]
    values = [column for _, column in named]
    allowed = [*columns[0], *columns[1]]
    check_columns(names, *columns, where=what)
    check_names(names, allowed, what)
    if unknown := ", ".join(name for name in names if name not in allowed):
        raise DataError(
            "unknown columns",
            where=what,
            got=unknown[:300],
            expected=", ".join(allowed),
            fix="remove them",
        )
    if len({len(column) for column in values}) > 1:
        raise DataError(
            "columns of different lengths",
            where=what,
            got=", ".join(f"{name}: {len(column)}" for name, column in named),
            expected="one length",
        )
    reader = TableReader(source, *columns)
    rows = _rows(source, what, names, zip(*values, strict=True))
    return reader.table([(what, reader.blocks(rows, what))])


def _rows(
    source: Given, what: str, names: Sequence[str], rows: Iterable[tuple[Any, ...]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Position and cells of each row. A cell of a wrong type is recorded as an error and left
    empty.
    """
    for place, values in enumerate(rows):
        row = {}
        for name, given in zip(names, values, strict=True):
            value = _plain(given)
            if fault := _fault(name, value):
                source.note(fault, f"{what}:{place}", repr(given)[:80])
                value = ""
            row[name] = value
        yield place, row


def _plain(value: Any) -> Any:
    """A cell as a built-in Python type; None if it is missing."""
    if isinstance(value, np.generic):
        value = value.item()
    if pd.isna(value) is True:  # for a list, isna returns an array
        return None
    return str(value) if isinstance(value, str) else value  # without subclasses of str


_ID = (str, int), "neither a text nor a whole number"
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("id", "query_id", "label_id"), _ID),
    "relevance": ((int, float), "not a number"),
}
"""Types of a column's cells, and what another cell is; other columns are texts."""


def _fault(name: str, value: Any) -> str | None:
    """The error of a cell in the column `name`; None if there is none."""
    if name == "text" and (value is None or (isinstance(value, str) and not value.strip())):
        return "the text is missing or empty"
    if value is None:
        # an id, a relevance or a split that is missing is found by the checks of all tables
        return None
    if isinstance(value, str) and not is_unicode(value):
        return f"{name} is not valid Unicode"
    kinds, else_is = _KINDS.get(name, ((str,), "not a text"))
    if type(value) in kinds:
        return None
    if kinds == _ID[0] and isinstance(value, float):
        return (
            f"{name} is a float: 7.0 is not the id 7 (pandas makes floats of ids beside missing "
            "values: Int64)"
        )
    return f"{name} is {else_is}"
