"""A folder of raw files: found by name with or without .gz, read as UTF-8 lines, every fault noted with its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.bounded import DEFAULT_BOUNDS, read_blocks
from unidec.data.table_file import Report, decode
from unidec.errors import DataError
from unidec.sections import RawBounds

MAX_SAMPLES = 20
Lines = Callable[[np.ndarray], np.ndarray]
"""Maps row numbers (0-based, of pairs or of texts) to line numbers of their file (1-based); called for samples only."""


def next_line(rows: np.ndarray) -> np.ndarray:
    """`Lines` of a file without a header or blank lines."""
    return np.asarray(rows) + 1


def lines_of_some(lines: Lines, rows: np.ndarray) -> Lines:
    """`Lines` of a table that holds these rows of another."""
    return lambda some: lines(rows[some])


class Problems:
    """Kinds of fault, each with a count and samples as `file:line`; `stop` raises one DataError for all."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.count: dict[str, int] = {}
        self.samples: dict[str, list[str]] = {}

    def add(self, kind: str, file: str, line: int, detail: object = "") -> None:
        """One fault."""
        self.count[kind] = self.count.get(kind, 0) + 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:120]
            samples.append(f"{file}:{line}" + (f" ({text})" if text else ""))

    def add_rows(self, kind: str, file: str, rows: np.ndarray, lines: Lines, details: Callable[[int], object]) -> None:
        """Faults at many rows; only the first few are looked at one by one."""
        if not len(rows):
            return
        first = rows[:MAX_SAMPLES]
        for row, line in zip(first.tolist(), lines(first).tolist(), strict=True):
            self.add(kind, file, line, details(row))
        self.count[kind] += len(rows) - len(first)

    def stop(self) -> None:
        """Raise a DataError for what was found, if anything: every kind with its count, and at most 20 samples."""
        if not self.count:
            return
        turns = [(turn, kind) for kind, samples in self.samples.items() for turn in range(len(samples))]
        kept = sorted(turns, key=lambda sample: sample[0])[:MAX_SAMPLES]  # so that no kind hides another
        report = []
        for kind, number in self.count.items():
            report.append(f"{kind}: {number:,}")
            report += [f"    {self.samples[kind][turn]}" for turn, own in kept if own == kind]
        raise DataError(
            f"the raw data cannot be used: {len(self.count)} kind(s) of fault",
            where=str(self.root),
            got="\n    ".join(report),
            fix="correct or remove these lines; nothing was written",
        )


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
        self.labels_at: tuple[str, Lines] = ("", next_line)

    def find(self, *names: str) -> Path | None:
        """The first of the names that exists, as it is or with .gz."""
        paths = (self.root / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
        return next((path for path in paths if path.is_file()), None)

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

    def report(self, path: Path) -> Report:
        """Notes what is wrong in a file."""
        name = self.name(path)
        return lambda what, line, got: self.problems.add(what, name, line, got)

    def blocks(self, path: Path) -> Iterator[tuple[int, bytes]]:
        """Whole lines, some megabytes at a time: see `read_blocks`."""
        self.name(path)
        return read_blocks(path, self.bounds)

    def line_blocks(self, path: Path) -> Iterator[tuple[int, pa.Array]]:
        """The number of the first line, and a UTF-8 text a line (large_string), some megabytes at a time.

        A line that is not UTF-8 is noted as a fault and becomes an empty text.
        """
        report = self.report(path)
        for number, block in self.blocks(path):
            try:
                texts = pc.split_pattern(pa.array([block], pa.large_binary()).cast(pa.large_string()), "\n").flatten()
            except pa.ArrowInvalid:
                lines = enumerate(block.split(b"\n"), number)
                texts = pa.array([_text(line, row, report) for row, line in lines], pa.large_string())
            yield number, pc.replace_substring_regex(texts, "\r$", "") if b"\r" in block else texts

    def texts(self, path: Path) -> pa.ChunkedArray:
        """A text a line; see `line_blocks`."""
        return pa.chunked_array([texts for _, texts in self.line_blocks(path)], pa.large_string())


def _text(line: bytes, number: int, report: Report) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError:
        decode(line, number, report)
        return ""
