"""Reads the lines of an input file, plain or gzip-compressed, within bounds; refuses anything that
is not a regular file.

An error in a line is passed to a `Report`, which records it or raises.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from unidec.config import RawBounds
from unidec.errors import DataError

Report = Callable[[str, int, object], None]
"""Called for each error in a file with a description, the line (1-based) and the
offending value.
"""

ALWAYS_UNPACKED = 64 << 20  # unpacked bytes that any compressed file may have
BOM = b"\xef\xbb\xbf"
DEFAULT_BOUNDS = RawBounds()
NOT_UTF8 = "text that is not UTF-8"
AS_UTF8 = (
    "save the file as UTF-8 (Excel: CSV UTF-8), or convert it: iconv -f CP1252 -t UTF-8 FILE > NEW "
    "(-f UTF-16 for text in UTF-16)"
)
NOT_JSON = "not a JSON object"
DATABASE_NULL = r"\N, a database's mark for a missing value"
FIXES = {  # of errors in a line
    NOT_UTF8: AS_UTF8,
    NOT_JSON: "write one object per line (pandas: to_json(FILE, orient='records', lines=True))",
    DATABASE_NULL: "export CSV with empty cells for missing values (PostgreSQL: COPY ... WITH "
    "(FORMAT csv, HEADER, NULL '')); other exports also mark tabs and line ends with backslashes",
}
_UTF16 = "text in UTF-16", AS_UTF8
_NOT_TEXT = {  # by the first two bytes
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"\x1f\x8b": ("packed with gzip, without .gz in its name", "add .gz to its name, or unpack it"),
}


def check_file(path: Path) -> None:
    """Raise a DataError unless `path` is a readable file, or a link to one."""
    try:
        path.stat()
    except FileNotFoundError as error:
        if not path.is_symlink():
            raise DataError("no such file", where=path, fix="check the path") from error
        raise DataError(
            "a link to a missing file",
            where=path,
            got=f"-> {os.readlink(path)}",
            fix="correct the link, or remove it",
        ) from error
    except OSError as error:
        raise DataError(
            "the file cannot be read",
            where=path,
            got=error.strerror,
            fix="correct or remove it, or grant the permission to read it",
        ) from error
    if not path.is_file():
        other = "a pipe" if path.is_fifo() else "a special file"
        kind = "a folder" if path.is_dir() else other
        raise DataError(
            f"{kind} instead of a file",
            where=path,
            fix="replace it by a regular file, or remove it",
        )
    if not os.access(path, os.R_OK):
        raise DataError("no permission to read the file", where=path, fix=f"chmod u+r {path}")


def refuse(path: Path) -> Report:
    """A `Report` that raises a DataError for the first error."""

    def report(what: str, line: int, got: object) -> None:
        raise DataError(
            what,
            where=f"{path}:{line}",
            got=str(got)[:200],
            fix=FIXES.get(what),
        )

    return report


def decode(line: bytes, number: int, report: Report) -> str:
    """Decode UTF-8; invalid bytes are reported and replaced."""
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        report(NOT_UTF8, number, f"byte {error.start + 1} is {line[error.start]:#04x}")
        return line.decode("utf-8", "replace")


def check_unpacked(path: Path, num_bytes: int, bounds: RawBounds) -> None:
    """Raise a DataError if `num_bytes`, the unpacked size of a file, exceeds `max_unpack_ratio`
    times its size.
    """
    size = path.stat().st_size
    if num_bytes > max(ALWAYS_UNPACKED, bounds.max_unpack_ratio * size):
        raise DataError(
            "the unpacked size of a compressed file is too large",
            where=path,
            got=f"{size:,} bytes unpack to {num_bytes:,} or more",
            expected=f"at most {bounds.max_unpack_ratio} times its size",
            fix="check the file; increase raw.max_unpack_ratio if it is valid",
        )


def read_lines(path: Path, bounds: RawBounds) -> Iterator[tuple[int, bytes]]:
    """Number (1-based) and bytes of each line, without line feed and byte order mark; .gz files are
    unpacked.

    Raises:
        DataError: a line is longer than `bounds.max_row_bytes`, or the file cannot be read, is a
            damaged gzip file, or exceeds the allowed unpacked size.
    """
    packed = path.suffix.lower() == ".gz"
    total = number = 0
    try:
        with gzip.open(path, "rb") if packed else open(path, "rb") as file:
            start = file.read(len(BOM))
            if wrong := _NOT_TEXT.get(start[:2]):
                raise DataError(wrong[0], where=path, fix=wrong[1])
            if start != BOM:
                file.seek(0)
            while line := file.readline(bounds.max_row_bytes + 2):
                total += len(line)
                number += 1
                if packed and total > ALWAYS_UNPACKED:
                    check_unpacked(path, total, bounds)
                line = line.removesuffix(b"\n")
                if len(line) > bounds.max_row_bytes:
                    raise row_too_long(path, number, bounds)
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError("damaged gzip file", where=path, got=error, fix="fetch it again") from error
    except OSError as error:
        raise DataError(
            "the file cannot be read",
            where=path,
            got=error,
            fix="check the file and its permissions",
        ) from error


def row_too_long(path: Path, number: int, bounds: RawBounds, hint: str = "") -> DataError:
    """The error for a row beyond `bounds.max_row_bytes`."""
    return DataError(
        f"a row of more than {bounds.max_row_bytes:,} bytes{hint}",
        where=f"{path}:{number}",
        fix="shorten the row, or increase raw.max_row_bytes if the row is valid",
    )
