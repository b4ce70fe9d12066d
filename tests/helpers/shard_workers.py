"""What tests of shards do to the processes that write them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unidec.data.shards import Work
from unidec.pipeline.shard_jobs import run_shard


class Killed(BaseException):
    """In place of a signal that ends the process."""


def killed_after(most: int, written: list[int]) -> Callable[[Work], None]:
    """Writes missing shards and notes their numbers; raises `Killed` once `written` has `most`."""

    def write(work: Work) -> None:
        for number in work.missing():
            if len(written) == most:
                raise Killed
            run_shard(work.folder, number)
            written.append(number)

    return write


def dask_cluster(num_workers: int) -> Any:
    """A Dask cluster on loopback, started by somebody else than the flow."""
    import distributed

    return distributed.LocalCluster(
        n_workers=num_workers,
        threads_per_worker=1,
        host="127.0.0.1",
        dashboard_address=None,
        memory_limit=None,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
    )


def once_a_shard_is_whole(
    folder: Path, act: Callable[[], object], pattern: str = "0*-of-*"
) -> threading.Thread:
    """Calls `act` in a thread when the first shard is there."""

    def wait() -> None:
        end = time.monotonic() + 200
        while not list(folder.glob(pattern)) and time.monotonic() < end:
            time.sleep(0.002)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def workers_of(home: Path, servers: bool = False) -> list[int]:
    """Processes with this PREFECT_HOME (Linux); Prefect's temporary server, which a SIGKILL leaves,
    only if asked.
    """
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"PREFECT_HOME={home}".encode() in entry.read_bytes().split(b"\0") and (
                servers or b"prefect.server" not in (entry.parent / "cmdline").read_bytes()
            ):
                found.append(int(entry.parent.name))
        except OSError:  # gone, or not ours
            continue
    return found
