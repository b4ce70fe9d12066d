"""Probes a bundle in a fresh process: whether it answers as in a server, its speed and its size.

A hostile or damaged bundle may crash a C++ library, exhaust memory or loop; only the fresh process
is affected.

    python -m unidec.bundle.probe < job.json    {"bundle": folder, "texts": [...], "k": 10, ...}

The last line of the output is a `Probe` as JSON. Only modules needed for serving are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unidec import machine
from unidec.bundle.bundle_model import evenly_spaced
from unidec.errors import ArtifactError

if TYPE_CHECKING:
    from unidec.bundle.bundle import Bundle
    from unidec.ranking.query_encoder import Runtime

WARM_UP = 8  # queries answered before measuring
# of `known_texts`; characters
NUM_TITLES = 16
LONGEST_TITLE = 400
_ODD_TEXTS = ("zzyzx ⸘ 42", "a " * 100)  # unknown words, and more tokens than a model reads
_NICE = 5


@dataclass(frozen=True)
class Probe:
    """Result of probing a bundle in a fresh process.

    Attributes:
        sha256: hash of the folder, after each file was verified.
        load_seconds: time from the start of the process to its first answer.
        load_cpu_seconds: the same in CPU time of all threads, which excludes other processes on the
        machine.
        p50_ms, p95_ms: latency percentiles over the queries, one query at a time, after a warm-up.
        p95_cpu_ms: as p95_ms, in CPU time.
        peak_megabytes: peak resident memory. megabytes: size of the folder.
    """

    sha256: str
    load_seconds: float
    load_cpu_seconds: float
    p50_ms: float
    p95_ms: float
    p95_cpu_ms: float
    peak_megabytes: float
    megabytes: float


def probe_bundle(
    bundle: Path,
    texts: Sequence[str] | None,
    k: int,
    timeout: float,
    *,
    runtime: Runtime = "auto",
    threads: int = 0,
    max_bytes: int = 0,
) -> Probe:
    """Probe a bundle in a fresh process, which is killed after `timeout` seconds.

    Args:
        texts: queries; None: `known_texts`.
        runtime, threads: arguments of `open_encoder`, as set by the server.
        max_bytes: memory that the process may allocate after importing its libraries (Linux); 0:
        unlimited.

    Raises:
        ArtifactError: the bundle does not load, crashes the process or does not answer in time;
            with the end of the process's error output.
    """
    job = {
        "bundle": str(bundle),
        "texts": None if texts is None else list(texts),
        "k": k,
        "began": time.time(),
        "runtime": runtime,
        "threads": threads,
        "max_bytes": max_bytes,
        "seconds": math.ceil(timeout),
    }
    fix = f"look at it with: unidec predict --bundle {bundle} TEXT"
    # as in the server: spinning threads would count as CPU time
    environment = {"OPENBLAS_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"} | os.environ
    if max_bytes:  # Arrow's own pool reserves a gigabyte in advance
        environment["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "unidec.bundle.probe"],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ArtifactError(
            "no answer from a fresh process",
            where=bundle,
            got=f"nothing in {timeout:.0f} s",
            fix=fix,
        ) from error
    with contextlib.suppress(ValueError, IndexError, TypeError):
        if done.returncode == 0:
            return Probe(**json.loads(done.stdout.splitlines()[-1]))
    raise ArtifactError(
        "a fresh process cannot serve it",
        where=bundle,
        got=done.stderr.strip()[-500:] or f"exit code {done.returncode}",
        fix=fix,
    )


def known_texts(bundle: Bundle) -> list[str]:
    """Queries for any bundle: titles of some of its labels, and two unusual texts."""
    titles = evenly_spaced(bundle.titles, NUM_TITLES)
    known = [title[:LONGEST_TITLE] for title in titles if title.strip()]
    return [*known, *_ODD_TEXTS]


def main() -> None:
    """Read a job from standard input and print the result; on an error, print a message and exit
    with code 1.
    """
    job = json.load(sys.stdin)
    # also ends a loop in a C++ library if the process that waits for the answer was killed
    signal.alarm(job["seconds"])
    try:
        print(json.dumps(asdict(_probe(job))))
    except Exception as error:  # any error is a reason not to serve the bundle
        sys.exit(f"{type(error).__name__}: {error}")


def _probe(job: dict[str, Any]) -> Probe:
    from unidec.bundle.answer import Answerer, LabelQuery
    from unidec.bundle.bundle import Bundle
    from unidec.data.storage import folder_bytes
    from unidec.ranking.query_encoder import open_encoder

    if job["max_bytes"]:
        with contextlib.suppress(OSError, AttributeError):
            os.nice(_NICE)
        _limit_memory(job["max_bytes"])
    folder = Path(job["bundle"])
    bundle = Bundle.load(folder, lazy=True)
    texts = job["texts"]
    if texts is None:
        texts = known_texts(bundle)
    threads = job["threads"]
    bundle.index.threads = threads
    answerer = Answerer(bundle, open_encoder(bundle, job["runtime"], threads))

    def ask(text: str) -> tuple[float, float]:
        """Wall-clock and CPU seconds of an answer."""
        began = time.perf_counter()
        used = time.process_time()
        answerer.answer([LabelQuery(text, job["k"])])
        return time.perf_counter() - began, time.process_time() - used

    ask(texts[0])
    load_seconds = time.time() - job["began"]
    load_cpu_seconds = time.process_time()
    for text in texts[:WARM_UP]:
        ask(text)
    # [queries, 2]: wall clock, CPU
    times = [ask(text) for text in texts]
    milliseconds = 1000 * np.sort(times, axis=0)
    p50_ms, _ = milliseconds[len(times) // 2].tolist()
    place = int(0.95 * (len(times) - 1))
    p95_ms, p95_cpu_ms = milliseconds[place].tolist()
    num_bytes = folder_bytes(folder)
    return Probe(
        sha256=bundle.sha256,
        load_seconds=load_seconds,
        load_cpu_seconds=load_cpu_seconds,
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        p95_cpu_ms=p95_cpu_ms,
        peak_megabytes=machine.host_peak() / 1e6,
        megabytes=num_bytes / 1e6,
    )


def _limit_memory(more: int) -> None:
    """Limit this process to `more` bytes of further allocations (Linux); memory-mapped files do not
    count.

    Libraries are imported and their thread pools started before, so that only the bundle counts.
    """
    import faiss
    import torch

    import unidec.ranking.query_encoder  # noqa: F401

    torch.zeros(8) @ torch.zeros(8)
    rows = np.zeros((10_000, 8), dtype=np.float32)
    index = faiss.IndexFlatIP(8)
    index.add(rows)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: index.search(rows[:1], 1), range(2)))
    with contextlib.suppress(ImportError):
        importlib.import_module("onnxruntime")
    with contextlib.suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        import psutil

        most = psutil.Process().memory_info().data + more
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


if __name__ == "__main__":
    main()
