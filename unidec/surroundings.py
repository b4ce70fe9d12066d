"""The environment of unidec's programs: variables, terminals and streams of other tools must not
break their work.

`settle` is called first, before slow imports; it does nothing when another program imports this
package."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


class Output:
    """A stream that outlives its reader: what cannot be written is dropped, and `failure` keeps the
    first error.

    A reader that left (`| head`) is no failure.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.failure: OSError | None = None
        self._is_closed = False

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        self._attempt(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._attempt(self.stream.flush)

    def _attempt(self, action: Any, *given: Any) -> None:
        if self._is_closed:
            return
        try:
            action(*given)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._is_closed = True
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                self.failure = error
            self._discard()

    def _discard(self) -> None:
        """Let Python's own flush at the end of the process succeed."""
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def settle() -> None:
    """Make this process, and those that it starts, independent of its surroundings."""
    _open_standard_streams()
    reach_local_servers()
    os.environ["MPLBACKEND"] = "agg"  # a notebook's is often not installed here
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, Output):
            continue
        with contextlib.suppress(AttributeError, OSError, ValueError):
            # what the terminal's encoding cannot show
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, Output(stream))


def reach_local_servers() -> None:
    """Reach servers on this machine without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        known = re.findall(r"[^,\s]+", os.environ.get(name, ""))
        missing = [host for host in LOCAL_HOSTS if host not in known]
        if known != ["*"] and missing:
            os.environ[name] = ",".join([*known, *missing])


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def output_failure() -> OSError | None:
    """Why the output could not be written; None if it was, or if its reader left."""
    sys.stdout.flush()
    return sys.stdout.failure if isinstance(sys.stdout, Output) else None


def _open_standard_streams() -> None:
    """Streams that the caller closed (`>&-`) lead nowhere; otherwise the next file that is opened
    would get their number.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))
