"""The environment of unidec's programs: variables, terminals and streams of other tools must not
break their work.

`settle` is called first, before slow imports; it does nothing when another program imports this
package."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import warnings
from typing import Any, TextIO

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
_THREADS = tuple(
    f"{name}_NUM_THREADS" for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM")
)
_SIZES = ("COLUMNS", "LINES")


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

    def writelines(self, lines: Any) -> None:
        """Write texts, or drop them."""
        self._attempt(self.stream.writelines, lines)

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
    _no_warning_is_an_error()
    _drop_invalid_values()
    reach_local_servers()
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
        known = list(filter(None, map(str.strip, os.environ.get(name, "").split(","))))
        missing = [host for host in LOCAL_HOSTS if host not in known]
        if known != ["*"] and missing:
            os.environ[name] = ",".join([*known, *missing])


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


def _no_warning_is_an_error() -> None:
    """PYTHONWARNINGS=error would end work at the first warning of any library."""
    asked = list(filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")))
    actions = [rule.partition(":")[0].strip().lower() or "default" for rule in asked]
    # Python accepts abbreviations
    kept = [rule for rule, action in zip(asked, actions, strict=True) if action[0] != "e"]
    if kept != asked:
        os.environ["PYTHONWARNINGS"] = ",".join(kept)
        filters: Any = warnings.filters
        filters[:] = [entry for entry in filters if entry[0] != "error"]


def _drop_invalid_values() -> None:
    valid = dict.fromkeys(_THREADS, r"[1-9]\d*(,[1-9]\d*)*|") | dict.fromkeys(_SIZES, r"\d+|")
    for name, pattern in valid.items():
        if not re.fullmatch(pattern, os.environ.get(name, "")):
            del os.environ[name]
    level = os.environ.get("MLFLOW_LOGGING_LEVEL", "INFO")
    if level.upper() not in logging.getLevelNamesMapping():
        del os.environ["MLFLOW_LOGGING_LEVEL"]
