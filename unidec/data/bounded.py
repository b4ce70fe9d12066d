"""Files from outside, read once from front to back: never more in memory than a block and a row, whatever they hold."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from unidec.errors import DataError
from unidec.sections import RawBounds

BYTES_AT_ONCE = 1 << 23
ALWAYS_UNPACKED = 64 << 20  # bytes that any compressed file may unpack to, whatever its own size
BOM = b"\xef\xbb\xbf"
DEFAULT_BOUNDS = RawBounds()


def check_unpacked(path: Path, num_bytes: int, bounds: RawBounds) -> None:
    """Refuse a compressed file that unpacks to so many bytes: more than `max_unpack_ratio` times its own size."""
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_UNPACKED, bounds.max_unpack_ratio * size):
        raise DataError(
            "a compressed file that unpacks to too much",
            where=str(path),
            got=f"{size:,} bytes unpack to {num_bytes:,} or more",
            expected=f"at most {bounds.max_unpack_ratio} times its size",
            fix="check the file; if the raw data is right as it is, raise raw.max_unpack_ratio",
        )


class BoundedFile(io.RawIOBase):
    """A file that is read forwards only; counts its bytes, and in `quotes` its double quotes."""

    def __init__(self, file: IO[bytes], path: Path, bounds: RawBounds) -> None:
        self.path, self.bounds, self.quotes = path, bounds, 0
        self._file, self._read, self._packed = file, 0, path.suffix.lower() == ".gz"

    def readable(self) -> bool:
        """Always."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next `size` bytes, or a block if no size is given; fewer only at the end."""
        block = self._file.read(BYTES_AT_ONCE if size is None or size < 0 else size)
        self._read += len(block)
        self.quotes += block.count(b'"')
        if self._packed:
            check_unpacked(self.path, self._read, self.bounds)
        return block


@contextlib.contextmanager
def open_bounded(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[BoundedFile]:
    """The file's bytes, unpacked if its name ends with .gz.

    Raises:
        DataError: it cannot be opened, is a damaged gzip file, or unpacks to more than it may.
    """
    try:
        with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else open(path, "rb") as file:
            yield BoundedFile(file, path, bounds)  # type: ignore[arg-type]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("a damaged gzip file", where=str(path), got=str(error), fix="fetch it again") from error
    except OSError as error:
        raise DataError("a file that cannot be read", where=str(path), got=error.strerror or error) from error


def read_blocks(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[tuple[int, bytes]]:
    """The number of the first line (1-based) and whole lines, some megabytes at a time, without a byte order mark and
    the last line's end.

    Raises:
        DataError: a line of more than `bounds.max_row_bytes`, or as `open_bounded`.
    """
    with open_bounded(path, bounds) as file:
        first = file.read(len(BOM)).removeprefix(BOM)
        begun, size, number = [first], len(first), 1  # pieces of the line that is not complete yet, and their bytes
        while block := file.read(BYTES_AT_ONCE):
            whole, newline, rest = block.rpartition(b"\n")
            if not newline:
                begun.append(block)
                size += len(block)
                if size > bounds.max_row_bytes:
                    raise row_too_long(path, number, bounds)
                continue
            lines = b"".join([*begun, whole])
            _check_lines(lines, path, number, bounds)
            yield number, lines
            number += lines.count(b"\n") + 1
            begun, size = [rest], len(rest)
        if last := b"".join(begun):
            _check_lines(last, path, number, bounds)
            yield number, last.removesuffix(b"\n")


def read_lines(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[tuple[int, bytes]]:
    """Number (1-based) and bytes of each line, without its line feed; otherwise as `read_blocks`."""
    for number, lines in read_blocks(path, bounds):
        yield from enumerate(lines.split(b"\n"), number)


def row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    """The error for a line or row beyond its bound."""
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="correct the row; if the raw data is right as it is, raise raw.max_row_bytes",
    )


def _check_lines(lines: bytes, path: Path, first: int, bounds: RawBounds) -> None:
    if len(lines) <= bounds.max_row_bytes:
        return
    ends = np.flatnonzero(np.frombuffer(lines, dtype=np.uint8) == ord("\n"))
    lengths = np.diff(np.concatenate(([-1], ends, [len(lines)]))) - 1
    too_long = np.flatnonzero(lengths > bounds.max_row_bytes)
    if too_long.size:
        raise row_too_long(path, first + int(too_long[0]), bounds)
