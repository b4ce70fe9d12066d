"""The processor cores that this process may use, and the sizes of all pools of threads.

The pools are those of OpenMP (torch, faiss, scikit-learn), BLAS (numpy, scipy), onnxruntime and our
own threads. Three rules: they have as many threads as there are usable cores; waiting threads
sleep, as spinning ones take the cores that others wait for; and a pool does not start another one.

`import unidec` calls `prepare`, which sets the variables that OpenMP, BLAS and torch read when they
are loaded, here and in child processes. Variables that the user has set are kept: OMP_NUM_THREADS
is the size of every pool."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

Result = TypeVar("Result")
_SYSTEM = Path("/")
_POOLS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_WAIT = "OMP_WAIT_POLICY"
_SIZE = "OMP_NUM_THREADS"
_BLAS = "OPENBLAS_NUM_THREADS"
_set_here: set[str] = set()  # variables that `prepare` has set
_had_threads = False  # of the parent, when this process was forked
# from a process with threads: its pools have lost them, and would wait for them without end
_is_forked = False
_thread = threading.local()  # is_pooled: set in the threads of our own pools


def usable_cores(system: Path = _SYSTEM) -> int:
    """Number of cores that this process may use: those of its affinity, limited by the quota of its
    control groups (container), rounded up.

    Args:
        system: root of the file system.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    quota = math.ceil(cpu_quota(system) or cores)
    return max(1, min(cores, quota))


def cpu_quota(system: Path) -> float | None:
    """Cores' worth of time that the control group of this process and those above it allow, the
    smallest of all; None: no limit. Read are the files cpu.max of version 2.
    """
    mounted = system / "sys" / "fs" / "cgroup"
    try:
        groups = (system / "proc" / "self" / "cgroup").read_text(encoding="utf-8")
    except OSError:
        return None
    quotas = []
    for group in re.findall("^0::/*(.*)", groups, re.MULTILINE):
        # in a container, the path may be one of the host
        for level in (Path(group), *Path(group).parents):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = (mounted / level / "cpu.max").read_text().split()
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def has_vnni(system: Path = _SYSTEM) -> bool:
    """Whether the processor adds products of 8-bit integers exactly in 32 bits (VNNI of x86); False
    where the system does not say.

    Args:
        system: root of the file system.
    """
    try:
        described = (system / "proc" / "cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"\bavx(512)?_vnni\b", described) is not None


def prepare() -> None:
    """Set the variables of OpenMP, BLAS and torch that are not set: threads sleep while they wait,
    and are no more than the usable cores; large arrays have huge pages. The libraries read them
    when they are loaded, so this runs before.
    """
    cores = usable_cores()
    wanted = {_WAIT: "PASSIVE", "THP_MEM_ALLOC_ENABLE": "1"}  # torch's, for large arrays
    if cores < (os.cpu_count() or 1):
        wanted |= dict.fromkeys(_POOLS, os.environ.get(_SIZE, str(cores)))
    for name, value in wanted.items():
        if name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)


def one_thread_of_blas() -> None:
    """Let numpy multiply in one thread, unless the user has set their number; only before numpy is
    loaded.

    It multiplies small matrices of one query each, for which more threads are slower, and take
    cores from torch, the encoder and the search."""
    if _BLAS not in os.environ or _BLAS in _set_here:
        os.environ[_BLAS] = "1"


def num_threads(wanted: int = 0) -> int:
    """Size of a pool of threads: `wanted`; for 0, OMP_NUM_THREADS or else the usable cores.

    In a thread of our own pools it is 1. So it is in a forked process: the pools of its parent
    exist there without their threads.
    """
    if _is_forked or getattr(_thread, "is_pooled", False):
        return 1
    if wanted > 0:
        return wanted
    given = os.environ.get(_SIZE, "").partition(",")[0]
    if given.isdigit() and int(given) > 0 and _SIZE not in _set_here:
        return int(given)
    return usable_cores()


@contextlib.contextmanager
def thread_pool(most: int | None = None) -> Iterator[ThreadPoolExecutor]:
    """Threads of our own, at most `most`. In each of them, and in BLAS, libraries use a single
    thread.
    """
    from concurrent.futures import ThreadPoolExecutor

    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    size = num_threads() if most is None else min(most, num_threads())
    torch: Any = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    try:
        with (
            threadpool_limits(1, "blas"),
            ThreadPoolExecutor(size, initializer=_begin_pooled) as threads,
        ):
            yield threads
    finally:
        if torch:  # a thread's own number is also that of threads which start later
            torch.set_num_threads(before)


def in_order(futures: Iterator[Future[Result]], most: int) -> Iterator[Result]:
    """Results of futures, of which at most so many are begun before they are asked for: memory does
    not grow with their number, and after an error there is little to wait for.
    """
    begun = deque(islice(futures, most))
    while begun:
        yield begun.popleft().result()
        begun.extend(islice(futures, 1))


def _begin_pooled() -> None:
    _thread.is_pooled = True
    _single_threaded()


def _single_threaded() -> None:
    """Let OpenMP, as the calling thread uses it through torch and faiss, have no other threads."""
    torch: Any = sys.modules.get("torch")
    faiss: Any = sys.modules.get("faiss")
    if hasattr(torch, "set_num_threads"):  # not while it is being imported
        torch.set_num_threads(1)
    if hasattr(faiss, "omp_set_num_threads"):
        faiss.omp_set_num_threads(1)


def _before_fork() -> None:
    global _had_threads
    try:
        _had_threads = len(os.listdir("/proc/self/task")) > 1
    except OSError:  # not Linux
        _had_threads = True


def _after_fork() -> None:
    global _is_forked
    if _had_threads or _is_forked:
        _is_forked = True
        _single_threaded()
