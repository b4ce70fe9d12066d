"""Runs the tasks of a comparison: some at once, each a child process; what is done is skipped, what fails is told.

A stopped comparison ends its children in order (training writes a checkpoint); the same command goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unidec.comparison.cell import ACCEPT, PARENT
from unidec.comparison.workspace import FAILURE, LOG, SPEC, Task, Workspace, read_json
from unidec.data.storage import write_json
from unidec.errors import ArtifactError
from unidec.pipeline.interrupts import signals_raise
from unidec.progress import progress

State = Literal["done", "failed", "not run"]
_AGAIN = "run the same command again, it goes on where it stopped"
COMMAND = (sys.executable, "-m", "unidec.comparison.cell")
POLL_S = 0.2
LOOK_S = 5.0  # between two looks at what the children say
GRACE_S = 120.0  # for the checkpoint of a child that is stopped
_LOG_LINES = 6


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    Attributes:
        state: "done" now or before; "failed"; "not run": something that it needs failed.
        reason: its last words, "" where it is done. made: whether it was made now.
    """

    task: Task
    state: State
    reason: str = ""
    made: bool = False


def run_tasks(
    workspace: Workspace,
    *,
    at_once: int = 1,
    threads: int = 0,
    accepted: Iterable[str] = (),
    environment: Callable[[Task], Mapping[str, str]] = lambda _task: {},
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> list[Outcome]:
    """Make what is not made yet, in the workspace's order.

    Args:
        at_once: child processes at a time.
        threads: of each; 0: this machine's cores over `at_once`.
        accepted: keys of an identity that may differ in what is taken as done ("code").
        environment: further variables for a task's process.
        say: is told what begins and what failed.

    Returns:
        One outcome a task, in the workspace's order.

    Raises:
        Stopped: by SIGINT or SIGTERM, after the children have ended.
    """
    outcomes: dict[str, Outcome] = {}
    waiting: list[Task] = []
    for task in workspace.tasks.values():
        if _is_current(task, workspace, waiting, accepted):
            outcomes[task.key] = Outcome(task, "done")
        else:
            waiting.append(task)
    threads = threads or max(1, (os.cpu_count() or 1) // at_once)
    base = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), PARENT: str(os.getpid()),
            ACCEPT: " ".join(accepted), "PYTHONUNBUFFERED": "1"}  # fmt: skip
    base.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    total = len(waiting)
    running: dict[str, subprocess.Popen[bytes]] = {}
    looked, shown = 0.0, set[str]()
    with signals_raise(_AGAIN), _ended(running), progress(total=total, desc="compare", unit="task", every=30.0) as bar:
        while waiting or running:
            for key, process in list(running.items()):
                if process.poll() is not None:
                    del running[key]
                    outcomes[key] = _outcome(workspace.tasks[key], process.returncode)
                    bar.update(1)
                    if outcomes[key].state == "failed":
                        say(f"{key} failed: {outcomes[key].reason} ({workspace.tasks[key].folder / LOG})")
            for task in list(waiting):
                failed = [need for need in task.needs if need in outcomes and outcomes[need].state != "done"]
                if failed:
                    waiting.remove(task)
                    outcomes[task.key] = Outcome(task, "not run", f"needs {failed[0]}, which failed")
                    bar.update(1)
                elif len(running) < at_once and all(need in outcomes for need in task.needs):
                    waiting.remove(task)
                    try:
                        running[task.key] = _start(task, {**base, **environment(task)})
                    except (OSError, ArtifactError) as error:
                        outcomes[task.key] = Outcome(task, "failed", f"cannot be started: {error}")
                        bar.update(1)
                        say(f"{task.key} failed: {outcomes[task.key].reason}")
            if time.monotonic() - looked > LOOK_S or running.keys() != shown:
                looked, shown = time.monotonic(), set(running)
                bar.note("; ".join(f"{key}{doing(workspace.tasks[key])}" for key in running))
            bar.update(0)
            time.sleep(POLL_S if running else 0)
    return [outcomes[key] for key in workspace.tasks]


def _is_current(task: Task, workspace: Workspace, waiting: Sequence[Task], accepted: Iterable[str]) -> bool:
    """Whether a task need not be made: it is done, and made anew is nothing that it needs.

    Data that is gone is no reason: only a cell that must be made needs it.
    """
    if task.job is None:  # wanted only by what must be made
        users = [other for other in workspace.cells() if task.key in other.needs]
        return task.is_done() or all(user.is_done(accepted) for user in users)
    again = {other.key for other in waiting}
    return task.is_done(accepted) and (task.job.needs is None or task.job.needs not in again)


def _start(task: Task, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    task.folder.mkdir(parents=True, exist_ok=True)
    write_json(task.folder / SPEC, dict(task.spec))
    with open(task.folder / LOG, "ab") as log:
        # a group of its own: Ctrl-C reaches it through us, and whatever it starts ends with it
        return subprocess.Popen(
            [*COMMAND, str(task.folder.resolve())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(environment), process_group=0,
        )  # fmt: skip


def _outcome(task: Task, code: int) -> Outcome:
    if code == 0 and task.is_done(("code", "graphs", "needs")):
        return Outcome(task, "done", made=True)
    told = read_json(task.folder / FAILURE)
    if told is not None:
        return Outcome(task, "failed", str(told["what"]))
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if code == -signal.SIGKILL:
        how += " (not enough memory?)"
    reason = f"{how}: {last_words(task)}"
    write_json(task.folder / FAILURE, {"what": reason, "exit_code": code})
    return Outcome(task, "failed", reason)


def doing(task: Task) -> str:
    """What a task's log said last, in brackets and in short."""
    try:
        with open(task.folder / LOG, "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 500))
            lines = log.read().decode("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f" [{said[-80:]}]" if said else ""


def last_words(task: Task) -> str:
    """The end of a task's log."""
    try:
        lines = (task.folder / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "no log"
    return " | ".join(line.strip() for line in lines[-_LOG_LINES:] if line.strip())[-600:]


# -- signals ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ended(running: dict[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever ends this, the children end too: SIGTERM, time to write a checkpoint, then SIGKILL."""
    try:
        yield
    finally:
        for process in running.values():
            _kill(process, signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
            _kill(process, signal.SIGKILL)
            process.wait()


def _kill(process: subprocess.Popen[Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
