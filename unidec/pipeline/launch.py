"""Training in several processes.

A phase of a training runs on all ranks in one of two ways:

- `torchrun`, for `run.devices` above 1: starts torchrun with a `worker` for each device and returns what the first rank
  returned. Signals are passed on; no process is left behind.
- `torchrun_ranks`, under the user's torchrun (`torchrun --nproc-per-node 8 -m unidec.cli train`, also over several
  machines): the first rank does what one process would; where it trains, the other ranks train with it.
"""

from __future__ import annotations

import contextlib
import json
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
from unidec.data.storage import write_json
from unidec.errors import ConfigError, TrainingError, UnidecError
from unidec.pipeline.parent_watch import GRACE_S, LAUNCHER, watch
from unidec.progress import silence
from unidec.training.distributed import LostRank, Ranks
from unidec.training.fit import Report, RoundReport
from unidec.training.precision import choose_device

Job = dict[str, Any]
Work = Callable[[Ranks, Job], Report]
# name of the phase ("refresh" or "train_round"), parameters, the run's folder, keys of its identity that may differ ->
# report of the first rank
Launcher = Callable[[str, Params, Path, Collection[str]], Report]


def _job(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Job:
    return {"name": name, "params": params.model_dump(), "run_dir": str(run_dir), "accept": list(accept)}


@contextlib.contextmanager
def torchrun_ranks(params: Params, work: Work) -> Iterator[tuple[bool, Launcher | None]]:
    """`with torchrun_ranks(params, work) as (leads, launcher):` the first rank leads, the others do its phases.

    Without torchrun this process leads, and the launcher is None."""
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
    at_work = False  # an error in a phase reaches the others by itself

    def launcher(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Report:
        nonlocal at_work
        at_work = True
        report = work(ranks, ranks.share(_job(name, params, run_dir, accept)))
        at_work = False
        return report

    try:
        yield True, launcher
    except UnidecError as error:
        if not at_work:  # the others wait for the next phase
            ranks.share({"exit_code": error.exit_code})
        raise
    ranks.share(None)
    ranks.close()


def torchrun(name: str, params: Params, run_dir: Path, accept: Collection[str]) -> Report:
    """A `Launcher`; `run.restarts` times, torchrun starts all processes again after one died.

    Raises:
        ConfigError: more devices than this machine has. TrainingError: a process died. UnidecError: that of a rank.
    """
    here = torch.cuda.device_count()
    if choose_device(params.device).type == "cuda" and params.run.devices > here:
        raise ConfigError(
            "more devices than this machine has", where="run.devices", got=params.run.devices,
            expected=f"at most {here}", fix="fewer, or torchrun on several machines: docs/scale.md",
        )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="unidec-launch-") as folder:
        write_json(Path(folder) / "job.json", _job(name, params, run_dir, accept))
        process = _start(params.run.devices, folder, params.run.restarts)
        try:
            code = process.wait()
        except BaseException:  # a signal; when it takes effect, every process of ours has ended
            process.terminate()  # saves a checkpoint
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S + 10)  # torchrun itself kills workers that do not end
            process.kill()
            raise
        report = _result(Path(folder), code)
    return RoundReport(**report) if name == "train_round" else report


def _start(devices: int, folder: str, restarts: int) -> subprocess.Popen[bytes]:
    env = dict(os.environ)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    env[LAUNCHER] = str(os.getpid())
    loopback = {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}
    if loopback:  # all on this machine: no name to resolve, no port open to others
        env.setdefault("GLOO_SOCKET_IFNAME", loopback.pop())
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(devices),
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1",
        "--max-restarts", str(restarts), "--monitor-interval", "0.5", "-m", "unidec.pipeline.training", folder,
    ]  # fmt: skip
    return subprocess.Popen(command, env=env, start_new_session=True)


def _result(folder: Path, code: int) -> dict[str, Any]:
    """What the first rank wrote; or the error of the rank that reported one."""
    outcomes = _outcomes(folder)
    for outcome in outcomes:
        if outcome.get("exit_code"):
            error = UnidecError(outcome["message"])
            error.exit_code = outcome["exit_code"]
            raise error
    if code == 0 and outcomes and "report" in outcomes[0]:
        return outcomes[0]["report"]
    how = f"torchrun ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code} of torchrun"
    raise TrainingError(
        "a process of the training died", where="torchrun", got=how,
        fix="torchrun names it above; start again: the run resumes from its last checkpoint, with any run.devices",
    )  # fmt: skip


def _outcomes(folder: Path) -> list[dict[str, Any]]:
    """What the ranks wrote: the first one's {"report"}, or {"message", "exit_code"}, which is 0 for a lost peer."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]


def worker(folder: Path, work: Work) -> int:
    """One process that `torchrun` started: does the phase of job.json on this rank; returns the exit code.

    The first rank writes its report into rank-0.json. An error with a fix is written as rank-<rank>.json and ends in
    0, so that torchrun does not retry it; the launcher raises it. Whatever else ends a rank (a signal, a lost peer, a
    bug) has another code."""
    watch(os.getppid())
    job, rank = json.loads((folder / "job.json").read_text(encoding="utf-8")), int(os.environ["RANK"])
    outcome = folder / f"rank-{rank}.json"
    outcome.unlink(missing_ok=True)  # of the start before this one
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
        # a peer reports its own error before its connections close
        if lost and not any(other.get("exit_code") for other in _outcomes(folder)):
            print(f"rank {rank}: {error}", file=sys.stderr)
            return 1
    return 0
