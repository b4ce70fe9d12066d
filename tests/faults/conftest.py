"""Where fault tests write: in memory if there is such a place, for they fsync hundreds of times."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """To a process that is killed, a file system in memory is like any other; on a power cut it is
    not.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
