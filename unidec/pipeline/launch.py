"""Training in several processes.

A phase of a training runs on all ranks in one of two ways:

- `torchrun`, for `run.devices` above 1: starts torchrun with a `worker` per device and returns the
  first rank's report. Signals are forwarded to the processes, and no process outlives the call.
- `torchrun_ranks`, if the user started torchrun (`torchrun --nproc-per-node 8 -m unidec.cli train`,
  also on several machines): the first rank runs the whole command; the other ranks join it in each
  phase.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from unidec.config import Params
from unidec.cores import num_threads
from unidec.data.storage import read_json, write_json
from unidec.errors import ConfigError, TrainingError, UnidecError
from unidec.pipeline import paths
from unidec.pipeline.parent_watch import GRACE_S, LAUNCHER, watch
from unidec.progress import silence
from unidec.training.distributed import LostRank, Ranks
from unidec.training.fit import Report, RoundReport
from unidec.training.precision import choose_device

Job = dict[str, Any]
Work = Callable[[Ranks, Job], Report]
# (phase: "mine" or "train_round", parameters, run folder, keys of the run's identity that may
# differ) -> report of the first rank
Launcher = Callable[[str, Params, Path, Collection[str]], Report]


def _job(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Job:
    return {
        "name": name,
        "params": params.model_dump(),
        "run_dir": str(run_dir),
        "accept": list(accept),
    }


@contextlib.contextmanager
def torchrun_ranks(params: Params, work: Work) -> Iterator[tuple[bool, Launcher | None]]:
    """`with torchrun_ranks(params, work) as (leads, launcher):`, for a command that the user
    started with torchrun.

    On the first rank `leads` is True, and `launcher` runs a phase on all ranks. The other ranks run
    these phases until the first one ends, and then enter the block with `leads` False. Without
    torchrun: True and None.
    """
    ranks = Ranks.from_environment(params.device)
    if ranks.alone:
        yield True, None
        return
    watch(os.getppid())
    if not ranks.is_first:
        silence()
        while (job := ranks.share()) is not None:
            if "exit_code" in job:
                sys.exit(job["exit_code"])
            work(ranks, job)
        ranks.close()
        yield False, None
        return
    in_phase = False

    def launcher(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Report:
        nonlocal in_phase
        in_phase = True
        report = work(ranks, ranks.share(_job(name, params, run_dir, accept)))
        in_phase = False
        return report

    try:
        yield True, launcher
    except UnidecError as error:
        # other ranks wait for the next phase; within a phase, they detect the error themselves
        if not in_phase:
            ranks.share({"exit_code": error.exit_code})
        raise
    ranks.share(None)
    ranks.close()


def torchrun(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Report:
    """A `Launcher` that starts torchrun, which restarts all processes up to `run.restarts` times if
    one dies.

    Raises:
        ConfigError: more devices than this machine has. TrainingError: a process died. UnidecError:
        a rank's error.
    """
    check_devices(params)
    with tempfile.TemporaryDirectory(prefix="unidec-launch-") as folder:
        write_json(Path(folder) / "job.json", _job(name, params, run_dir, accept))
        process = _start(params.run.devices, folder, params.run.restarts)
        try:
            code = process.wait()
        except BaseException:  # e.g. a signal: all processes must end before it takes effect
            process.terminate()  # makes the ranks save a checkpoint
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S + 10)  # torchrun kills workers that do not end in time
            process.kill()
            raise
        report = _result(Path(folder), code)
    return RoundReport(**report) if name == "train_round" else report


def check_devices(params: Params) -> None:
    """Raises ConfigError: `device` is a GPU that cannot be used, or `run.devices` are more than
    this machine has.
    """
    device = choose_device(params.device)
    available = torch.cuda.device_count()
    if device.type == "cuda" and params.run.devices > available:
        raise ConfigError(
            "more devices than this machine has",
            where="run.devices",
            got=params.run.devices,
            expected=f"at most {available}",
            fix="set fewer, or use torchrun on several machines: docs/scale.md",
        )


def _start(devices: int, folder: str, restarts: int) -> subprocess.Popen[bytes]:
    env = {"OMP_NUM_THREADS": str(max(1, num_threads() // devices))}
    # all ranks are on this machine: no host name is resolved, no port is open to other machines
    for loopback in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        env["GLOO_SOCKET_IFNAME"] = loopback
    env |= os.environ | {LAUNCHER: str(os.getpid())}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={devices}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.5",
        "--module",
        "unidec.pipeline.training",
        folder,
    ]
    return subprocess.Popen(command, env=env, cwd=paths.working_folder(), start_new_session=True)


def _result(folder: Path, code: int) -> dict[str, Any]:
    """The first rank's report; raises the error that a rank reported, or a TrainingError if a rank
    died.
    """
    outcomes = _outcomes(folder)
    for outcome in outcomes:
        if outcome.get("exit_code"):
            error = UnidecError(outcome["message"])
            error.exit_code = outcome["exit_code"]
            raise error
    if code == 0 and outcomes and "report" in outcomes[0]:
        return outcomes[0]["report"]
    got = f"exit code {code} of torchrun"
    if code < 0:
        got = f"torchrun ended by {signal.Signals(-code).name}"
    raise TrainingError(
        "a process of the training died",
        where="torchrun",
        got=got,
        fix="torchrun names it above; start again: the run resumes from its last checkpoint, "
        "with any run.devices",
    )


def _outcomes(folder: Path) -> list[dict[str, Any]]:
    """Contents of the files that `worker` processes wrote: {"report"} from the first rank;
    {"message", "exit_code"} from ranks with an error, with exit code 0 if the rank only lost the
    connection to another one.
    """
    return [read_json(file) for file in sorted(folder.glob("rank-*.json"))]


def worker(folder: Path, work: Work) -> int:
    """Run the phase of job.json as one rank that `torchrun` started; returns the exit code.

    The first rank writes its report to rank-0.json. A known error is written to rank-<rank>.json,
    for the launcher to raise; the exit code is then 0, so that torchrun does not restart the
    processes. Anything else that ends a rank (a signal, a lost connection, a bug) gives a nonzero
    exit code.
    """
    watch(os.getppid())
    job = read_json(folder / "job.json")
    rank = int(os.environ["RANK"])
    outcome = folder / f"rank-{rank}.json"
    outcome.unlink(missing_ok=True)  # from before a restart
    if rank > 0:
        silence()
    try:
        ranks = Ranks.from_environment(job["params"]["device"])
        report = work(ranks, job)
        if ranks.is_first:
            write_json(outcome, {"report": report})
        ranks.barrier()
        ranks.close()
    except UnidecError as error:
        lost = isinstance(error, LostRank)
        write_json(outcome, {"message": str(error), "exit_code": 0 if lost else error.exit_code})
        # a rank writes its error before it closes its connections
        if lost and not any(other.get("exit_code") for other in _outcomes(folder)):
            print(f"rank {rank}: {error}", file=sys.stderr)
            return 1
    return 0
