"""Lines of files from outside, read once from front to back: never more in memory than a line and a buffer."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from unidec.errors import DataError
from unidec.sections import RawBounds

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


def read_lines(path: Path, bounds: RawBounds = DEFAULT_BOUNDS) -> Iterator[tuple[int, bytes]]:
    """Number (1-based) and bytes of each line, without its line feed and a byte order mark; .gz is unpacked.

    Raises:
        DataError: a line of more than `bounds.max_row_bytes`, or a file that cannot be opened, is a damaged gzip file,
            or unpacks to more than it may.
    """
    packed = path.suffix.lower() == ".gz"
    total = number = 0
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            if file.read(len(BOM)) != BOM:
                file.seek(0)
            while line := file.readline(bounds.max_row_bytes + 2):
                total, number = total + len(line), number + 1
                if packed and total > ALWAYS_UNPACKED:
                    check_unpacked(path, total, bounds)
                line = line.removesuffix(b"\n")
                if len(line) > bounds.max_row_bytes:
                    raise row_too_long(path, number, bounds)
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("a damaged gzip file", where=str(path), got=str(error), fix="fetch it again") from error
    except OSError as error:
        raise DataError("a file that cannot be read", where=str(path), got=error.strerror or error) from error


def row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    """The error for a line or row beyond its bound."""
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="correct the row; if the raw data is right as it is, raise raw.max_row_bytes",
    )
