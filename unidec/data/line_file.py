"""Files to which lines are appended while other processes read them.

A full disk or a kill may leave a partial line. The next append begins a new line, and readers skip
the partial one with a warning.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unidec.config import RawBounds
from unidec.data.raw_lines import DEFAULT_BOUNDS, refuse
from unidec.data.table_file import ending, read_rows
from unidec.errors import DataError

log = logging.getLogger(__name__)


def append_line(path: str | os.PathLike[str], line: bytes, max_bytes: int) -> bool:
    """Append a line that ends in a line feed, durably; several processes may append. A new file is
    accessible only to its owner.

    Returns:
        False: the file would exceed `max_bytes`, and is unchanged.

    Raises:
        OSError: the line was not appended; the file is unchanged.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        size = os.fstat(file).st_size
        is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = b"\n" + line if is_torn else line
        if size + len(data) > max_bytes:
            return False
        _write_whole(file, data, size)
        return True
    finally:
        os.close(file)


def _write_whole(file: int, data: bytes, size: int) -> None:
    """Write all of `data`, or truncate the file to its former `size` and raise OSError."""
    try:
        if os.write(file, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)
    except OSError:
        os.ftruncate(file, size)
        raise


def readable_rows(
    path: Path,
    columns: Sequence[str],
    check: Callable[[list[str]], object] = lambda _names: None,
    bounds: RawBounds = DEFAULT_BOUNDS,
) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a table file, as by `read_rows`. Lines of a .jsonl file that are not JSON objects
    because they were cut off are skipped with a warning.

    Raises:
        DataError: as for `read_rows`, or no line can be read.
    """
    raise_at = refuse(path)
    skipped: dict[int, DataError] = {}

    def skip(what: str, line: int, got: object) -> None:
        try:
            raise_at(what, line, got)
        except DataError as error:
            if ending(path) != ".jsonl":
                raise
            skipped.setdefault(line, error)

    # a row is reported, if at all, before it is yielded
    rows = [
        (line, row)
        for line, row in read_rows(path, columns, check, bounds, skip)
        if line not in skipped
    ]
    if skipped and not rows:
        raise next(iter(skipped.values()))
    for line, error in skipped.items():
        log.warning("%s:%d is skipped: %s, %s", path, line, error.what, error.got)
    return rows
