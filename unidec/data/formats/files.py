"""Raw files: found by name with or without .gz, read as UTF-8 lines; numbers are parsed without a loop over rows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.bounded import DEFAULT_BOUNDS, not_utf8, read_blocks, read_lines
from unidec.data.formats.problems import Lines, Problems
from unidec.errors import DataError
from unidec.sections import RawBounds

_PAIR = re.compile(rb"([+-]?\d{1,18}):(\S+)")


class Source:
    """A folder of raw files, the faults found in it, the files read and where texts came from.

    Attributes:
        queries_at: by split, the file of its queries and the line of each row in it.
        labels_at: the same of the labels.
    """

    def __init__(self, root: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> None:
        self.root, self.bounds = root, bounds
        self.problems = Problems(root)
        self.read: dict[str, Path] = {}
        self.queries_at: dict[str, tuple[str, Lines]] = {}
        self.labels_at: tuple[str, Lines] | None = None

    def find(self, *names: str) -> Path | None:
        """The first of the names that is there, as it is or with .gz."""
        for name in names:
            for path in (self.root / name, self.root / f"{name}.gz"):
                if path.is_file():
                    return path
        return None

    def need(self, *names: str) -> Path:
        """`find`, or a DataError that lists what was looked for."""
        path = self.find(*names)
        if path is None:
            expected = " or ".join(f"{name}[.gz]" for name in names)
            raise DataError("a file is missing", where=str(self.root), expected=expected, fix="add it")
        return path

    def name(self, path: Path) -> str:
        """Path relative to the folder, as errors show it; remembers that the file was read."""
        relative = path.relative_to(self.root).as_posix()
        self.read[relative] = path
        return relative

    def lines(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Number (1-based) and bytes of each line, unpacked, without line end and byte order mark."""
        self.name(path)
        for number, line in read_lines(path, self.bounds):
            yield number, line.rstrip(b"\r")

    def blocks(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Whole lines, some megabytes at a time: see `read_blocks`."""
        self.name(path)
        return read_blocks(path, self.bounds)

    def texts(self, path: Path) -> pa.ChunkedArray:
        """A UTF-8 text a line, large_string; a line that is not UTF-8 is noted as a fault and stands as an empty
        text."""
        chunks = []
        for number, lines in self.blocks(path):
            try:
                block = pa.array([lines], pa.large_binary()).cast(pa.large_string())
            except pa.ArrowInvalid:
                some = enumerate(lines.split(b"\n"), number)
                decoded = [self.decode(line.rstrip(b"\r"), path, row) or "" for row, line in some]
                chunks.append(pa.array(decoded, pa.large_string()))
                continue
            texts = pc.split_pattern(block, "\n").flatten()
            chunks.append(pc.replace_substring_regex(texts, "\r$", "") if b"\r" in lines else texts)
        return pa.chunked_array(chunks, pa.large_string())

    def decode(self, line: bytes, path: Path, number: int) -> str | None:
        """UTF-8 to text; a fault is noted and None returned."""
        try:
            return line.decode("utf-8")
        except UnicodeDecodeError as error:
            self.problems.add("text that is not UTF-8", self.name(path), number, not_utf8(line, error))
            return None


def read_sparse_text(
    source: Source, path: Path, num_queries: int, num_labels: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, Lines]:
    """XMC sparse text: a header `N L`, then `label:relevance ...` a row.

    Returns:
        query_P int32, label_P int32 (int64 where one is too large for that), relevance_P float64, and the line of each
        pair.

    Raises:
        DataError: a header that does not match the texts, before anything of its size is allocated.
    """
    name, query_blocks, label_blocks, value_blocks, num_lines = source.name(path), [], [], [], -1
    for number, lines in source.blocks(path):
        if number == 1:
            head, newline, lines = lines.partition(b"\n")
            _check_header(head, path, num_queries, num_labels)
            num_lines = 0
            if not newline:
                continue
        values, row_T = _parse(lines, per_token=2) or _parse_slowly(source, name, lines, num_lines)
        # 16 bytes a pair: half of what the parser gives
        smallest = np.int32 if np.abs(values[:, 0]).max(initial=0) < 2**31 else np.int64
        label_blocks.append(values[:, 0].astype(smallest))
        value_blocks.append(values[:, 1].copy())
        query_blocks.append((row_T + num_lines).astype(np.int32))
        num_lines += lines.count(b"\n") + 1
    if num_lines < 0:
        _check_header(b"", path, num_queries, num_labels)
    if num_lines != num_queries:
        raise DataError(
            "row counts that differ",
            where=str(path),
            got=f"{num_lines:,} rows",
            expected=f"{num_queries:,}, as the header says",
        )
    query_P = joined(query_blocks, np.int32)
    label_P, value_P = joined(label_blocks, np.int32), joined(value_blocks, np.float64)
    return query_P, label_P, value_P, lambda pairs: query_P[pairs].astype(np.int64) + 2


def joined(blocks: list[np.ndarray], dtype: Any) -> np.ndarray:
    """The blocks one after the other; the list is emptied."""
    whole = np.concatenate(blocks) if blocks else np.zeros(0, dtype)
    blocks.clear()
    return whole


def _check_header(head: bytes, path: Path, num_queries: int, num_labels: int) -> None:
    found = head.split()
    if len(found) != 2 or not all(n.isdigit() and len(n) <= 18 for n in found):
        raise DataError(
            "not a header `N L`", where=f"{path}:1", got=repr(head[:60]), fix="put both counts on the first line"
        )
    counts = tuple(int(n) for n in found)
    if counts != (num_queries, num_labels):
        raise DataError(
            "row counts that differ: the header does not match the texts",
            where=f"{path}:1",
            got=f"{counts[0]:,} queries and {counts[1]:,} labels",
            expected=f"{num_queries:,} queries and {num_labels:,} labels, as the text files have",
        )


def read_filter_text(source: Source, path: Path) -> tuple[np.ndarray, np.ndarray, Lines]:
    """Filter file: `query_row label_row` a line, 0-based, no header. Returns query_P, label_P (int64) and the lines."""
    blocks = [_filter_pairs(source, path, number, lines) for number, lines in source.blocks(path)]
    table = np.concatenate([np.zeros((0, 3), dtype=np.int64), *blocks])
    return table[:, 0], table[:, 1], lambda rows: table[rows, 2]


def _filter_pairs(source: Source, path: Path, first: int, lines: bytes) -> np.ndarray:
    """Query, label and line of each pair in some lines, of which `first` is the number: int64 [P, 3]."""
    parsed = _parse(lines, per_token=1)
    if parsed is not None:
        values, line_T = parsed
        well_formed = line_T.size % 2 == 0 and np.all(line_T[::2] == line_T[1::2]) and np.all(np.diff(line_T[::2]) > 0)
        if well_formed and np.all(np.floor(values) == values):
            return np.column_stack((values.reshape(-1, 2).astype(np.int64), line_T[::2] + first))
    good: list[tuple[int, int, int]] = []
    for number, line in enumerate(lines.split(b"\n"), first):
        tokens = line.split()
        if len(tokens) == 2 and all(re.fullmatch(rb"-?\d{1,18}", token) for token in tokens):
            good.append((int(tokens[0]), int(tokens[1]), number))
        elif tokens:
            source.problems.add("not `query_row label_row`", source.name(path), number, _shown(line))
    return np.asarray(good, dtype=np.int64).reshape(-1, 3)


def _parse(body: bytes, per_token: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Numbers [T, per_token] float64 and the line (0-based) of each of T tokens; None where anything is not as it
    should be.

    A token is what stands between white space: `label:relevance` (per_token 2) or one number (1).
    """
    raw = np.frombuffer(body, dtype=np.uint8)
    space = (raw == 32) | (raw == 9) | (raw == 10) | (raw == 13)
    starts = np.flatnonzero(~space & np.concatenate(([True], space[:-1]))) if raw.size else np.zeros(0, dtype=np.int64)
    colons = np.flatnonzero(raw == ord(":"))
    if colons.size != (per_token - 1) * starts.size:
        return None
    if per_token == 2 and not np.all(np.searchsorted(colons, starts) == np.arange(starts.size)):
        return None
    line_T = np.searchsorted(np.flatnonzero(raw == 10), starts)
    del space, raw
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy warns, and returns the numbers before it, where one cannot be parsed
            values = np.fromstring(body.replace(b":", b" "), sep=" ", dtype=np.float64)
    except (DeprecationWarning, ValueError):
        return None
    if values.size != per_token * starts.size:
        return None
    values = values.reshape(-1, per_token)
    whole = values[:, 0]
    if not np.all(np.isfinite(whole) & (np.abs(whole) < 2.0**53) & (np.floor(whole) == whole)):
        return None
    return values, line_T


def _parse_slowly(source: Source, name: str, body: bytes, first_row: int) -> tuple[np.ndarray, np.ndarray]:
    """`_parse` for sparse text with faults: notes each malformed token, returns the others."""
    values: list[tuple[int, float]] = []
    rows: list[int] = []
    for row, line in enumerate(body.split(b"\n")):
        for token in line.split():
            match = _PAIR.fullmatch(token)
            try:
                pair = (int(match[1]), float(match[2])) if match else None
            except ValueError:
                pair = None
            if pair is None:
                source.problems.add("not `label:relevance`", name, first_row + row + 2, _shown(token))
            else:
                values.append(pair)
                rows.append(row)
    return np.asarray(values, dtype=np.float64).reshape(-1, 2), np.asarray(rows, dtype=np.int64)


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "backslashreplace"))
