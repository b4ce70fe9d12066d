"""Processes that a server starts: they end with it, whatever ends it, and leave the keyboard's Ctrl-C to it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def start_child(module: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
    """`python -m module words...` with pipes to its input and output, in a session of its own, and with some more
    environment variables.

    On Linux it is killed when the calling thread ends: call it from a thread that lives as long as the child shall.
    """
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "UNIDEC_PARENT": str(os.getpid())} | variables
    return subprocess.Popen(
        [sys.executable, "-m", module, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
        start_new_session=True,
    )  # fmt: skip


def end_child(child: subprocess.Popen[bytes]) -> None:
    """Kills it and waits; its pipes are closed. Again does nothing."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


def end_with_parent() -> None:
    """In a child, first: a kill when the server dies, where the system can (Linux); a child that reads its input sees
    its end anyhow."""
    parent = int(os.environ.get("UNIDEC_PARENT", "0"))
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent and os.name == "posix" and os.getppid() != parent:  # it died before the call above
        os._exit(1)


def answer_pipe() -> int:
    """In a child: a descriptor of its output for the answers alone; what libraries print goes to its errors."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers
