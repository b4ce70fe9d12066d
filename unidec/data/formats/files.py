"""A folder of raw files: found by name with or without .gz, read as UTF-8 lines, every fault noted with its line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from unidec.data.raw import RawData
from unidec.data.table_file import DEFAULT_BOUNDS, Report, decode, in_blocks, read_lines
from unidec.errors import DataError
from unidec.sections import RawBounds

MAX_SAMPLES = 20
Lines = Callable[[np.ndarray], np.ndarray]
"""Maps row numbers (0-based, of pairs or of texts) to line numbers of their file (1-based); called for samples only."""


def next_line(rows: np.ndarray) -> np.ndarray:
    """`Lines` of a file without a header or blank lines."""
    return np.asarray(rows) + 1


class Source:
    """A folder of raw files, the faults found in it, the files read and where texts came from.

    Attributes:
        count, samples: of each kind of fault how many there are, and the first few as `file:line`.
        read: files that were read, by their path within the folder.
        queries_at: by split, the file of its queries and the line of each row in it.
        labels_at: the same of the labels.
    """

    def __init__(self, root: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> None:
        self.root, self.bounds = root, bounds
        self.count: Counter[str] = Counter()
        self.samples: dict[str, list[str]] = {}
        self.read: dict[str, Path] = {}
        self.queries_at: dict[str, tuple[str, Lines]] = {}
        self.labels_at: tuple[str, Lines] = ("", next_line)

    def note(self, kind: str, file: str, line: int, detail: object = "") -> None:
        """One fault."""
        self.count[kind] += 1
        samples = self.samples.setdefault(kind, [])
        if len(samples) < MAX_SAMPLES:
            text = str(detail)[:120]
            samples.append(f"{file}:{line}" + (f" ({text})" if text else ""))

    def note_rows(self, kind: str, at: tuple[str, Lines], rows: np.ndarray, detail: str, *columns: Any) -> None:
        """Faults at many rows of a file; `detail` is a format for the columns' values at a row."""
        first = rows[:MAX_SAMPLES]
        for row, line in zip(first.tolist(), at[1](first).tolist() if len(first) else (), strict=True):
            self.note(kind, at[0], line, detail.format(*(column[row] for column in columns)))
        if len(rows) > MAX_SAMPLES:
            self.count[kind] += len(rows) - MAX_SAMPLES

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
        return lambda what, line, got: self.note(what, name, line, got)

    def texts(self, path: Path) -> pa.ChunkedArray:
        """A text a line, as large_string."""
        report = self.report(path)
        lines = read_lines(path, self.bounds)
        texts = (decode(line, number, report).removesuffix("\r") for number, line in lines)
        return pa.chunked_array([pa.array(block, pa.large_string()) for block in in_blocks(texts)], pa.large_string())


@dataclass(frozen=True)
class Layout:
    """A way to lay raw data out in files.

    Attributes:
        expected: the files, for people. needs: names of files; a folder has this layout if it has one of each.
        read: reads it; faults are noted in the source.
    """

    expected: str
    needs: tuple[Sequence[str], ...]
    read: Callable[[Source], RawData]
