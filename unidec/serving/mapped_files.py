"""Whether the files that an engine has mapped into memory are still what was loaded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
import weakref
from pathlib import Path
from typing import BinaryIO

_BLOCK, _BLOCKS = 4096, 16  # bytes of a sample, samples of a file; a file of up to 64 KiB is read whole
_PAUSE_SECONDS = 1.0


class MappedFiles:
    """All files of a bundle, held open, with their sizes and a hash of blocks sampled from each.

    A file that is edited in place changes answers; one that gets shorter ends the process with SIGBUS. A file or folder
    replaced by renaming does neither: the old one stays what is mapped, and what is checked here.
    """

    def __init__(self, folder: Path) -> None:
        self._open = contextlib.ExitStack()
        weakref.finalize(self, self._open.close)
        self._files: dict[str, BinaryIO] = {
            path.relative_to(folder).as_posix(): self._open.enter_context(path.open("rb", buffering=0))
            for path in sorted(folder.rglob("*")) if path.is_file()
        }  # fmt: skip
        self._seen = {name: _sample(file) for name, file in self._files.items()}
        self._lock, self._checked, self._changed = threading.Lock(), 0.0, ""

    def changed(self) -> str:
        """Name of a file that changed since it was loaded, "" where none did; reads at most once a second."""
        if time.monotonic() - self._checked >= _PAUSE_SECONDS and self._lock.acquire(blocking=False):
            try:
                self._changed = next((name for name in self._files if self._differs(name)), "")
                self._checked = time.monotonic()
            finally:
                self._lock.release()
        return self._changed

    def _differs(self, name: str) -> bool:
        try:
            return _sample(self._files[name]) != self._seen[name]
        except OSError:
            return True


def _sample(file: BinaryIO) -> tuple[int, bytes]:
    """Size, and a hash of blocks at equal distances, the first and the last among them."""
    size, digest = os.fstat(file.fileno()).st_size, hashlib.sha256()
    last = max(0, size - _BLOCK)
    for start in sorted({last * i // (_BLOCKS - 1) for i in range(_BLOCKS)}):
        file.seek(start)
        digest.update(file.read(_BLOCK))
    return size, digest.digest()
