"""Cores that this process may use, and pools of threads of that size, which survive a fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_training import tiny_params
from scipy.sparse import csr_matrix

import unidec
from unidec import cores
from unidec.config import leaves


@pytest.fixture
def container(tmp_path: Path) -> Any:
    """A function that writes files of a system with many cores, and returns its root."""

    def write(groups: str, **files: str) -> Path:
        (tmp_path / "proc" / "self").mkdir(parents=True)
        (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "sys" / "fs" / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("groups", "files", "quota", "usable"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5, 2),  # version 2 in a container
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None, 8),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 16.0, 8),
        # of a level above
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3.0, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "20000 10000"}, 2.0, 2),
        ("0::/kubepods/x\n", {"cpu.max": "100000 100000"}, 1.0, 1),  # the path is that of the host
        ("5:cpuset:/x\n", {"cpuset/x/cpu.max": "100000 100000"}, None, 8),  # of another controller
        ("0::/\n", {"cpu.max": "nonsense\n"}, None, 8),
        ("0::/\n", {}, None, 8),
    ],
)
def test_the_quota_of_a_container(container, monkeypatch, groups, files, quota, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    root = container(groups, **files)
    assert cores.cpu_quota(root) == quota
    assert cores.usable_cores(root) == usable


def test_a_system_without_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5})
    assert cores.cpu_quota(tmp_path) is None
    assert cores.usable_cores(tmp_path) == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 avx512_vnni amx_int8", True),
        ("avx2 avx_vnni", True),
        ("avx2 avx512f", False),
        ("avx2 avx_vnni_int16", False),  # of another width
    ],
)
def test_whether_the_processor_has_vnni(tmp_path, flags, expected):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(f"model name\t: x\nflags\t\t: fpu {flags}\n")
    assert cores.has_vnni(tmp_path) is expected


def test_a_system_that_does_not_describe_its_processor(tmp_path):
    assert cores.has_vnni(tmp_path) is False


SIZES = """
import os, sys
import unidec
from unidec import cores
cores.one_thread_of_blas()
import numpy, torch
from threadpoolctl import threadpool_info
blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
waiting = os.environ["OMP_WAIT_POLICY"]
print(cores.usable_cores(), cores.num_threads(), torch.get_num_threads(), *blas, waiting)
"""


def sizes(*command: str, **variables: str) -> list[str]:
    clean = {
        name: value
        for name, value in os.environ.items()
        if "_THREADS" not in name and "OMP_" not in name
    }
    command = (*command, sys.executable, "-c", SIZES)
    done = subprocess.run(
        command, env=clean | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_pools_have_the_size_of_the_affinity_or_of_the_users_variable():
    one = str(min(os.sched_getaffinity(0)))
    expected = ["1", "1", "1", "1", "PASSIVE"]
    assert sizes("taskset", "-c", one) == expected
    given = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "ACTIVE", "OPENBLAS_NUM_THREADS": "2"}
    assert sizes(**given)[1:] == ["1", "1", "2", "ACTIVE"]


def test_a_pool_within_a_pool_has_one_thread(monkeypatch):
    def workers(_number: int) -> int:
        with cores.thread_pool() as threads:
            return len(set(threads.map(lambda _: threading.get_ident(), range(8))))

    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with cores.thread_pool() as threads:
        assert list(threads.map(workers, range(4))) == [1] * 4
        assert threads.submit(cores.num_threads, 3).result() == 1
    assert cores.num_threads() == 4


def test_pools_do_not_nest():
    import torch
    from threadpoolctl import threadpool_info

    def inside(_number: int) -> tuple[int, set[int]]:
        pools = threadpool_info()
        return torch.get_num_threads(), {
            pool["num_threads"] for pool in pools if pool["user_api"] == "blas"
        }

    before = torch.get_num_threads()
    pools = threadpool_info()
    torch.set_num_threads(2)
    try:
        with cores.thread_pool(3) as threads:
            expected = [(1, {1})] * 6
            assert list(threads.map(inside, range(6))) == expected
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [pool["num_threads"] for pool in threadpool_info()] == [
        pool["num_threads"] for pool in pools
    ]


FORK = """
import multiprocessing, os, sys, time
import torch
import unidec

models = {runtime: unidec.load(sys.argv[1], runtime) for runtime in ("torch", "auto")}
texts = [f"garden query w{number}" for number in range(300)]
answers = {runtime: model.predict(texts, 3) for runtime, model in models.items()}
(torch.randn(1000, 1000) @ torch.randn(1000, 1000)).relu().sum()  # starts threads of OpenMP


def same(runtime, others):  # but for rounding: sums are those of one thread
    pairs = zip(sum(answers[runtime], []), sum(others, []), strict=True)
    return all(abs(label.score - other.score) < 1e-4 for label, other in pairs)


def child(number):
    runtime = ("torch", "auto")[number % 2]
    again = unidec.load(sys.argv[1], runtime)
    found = [model.predict(texts, 3) for model in (models[runtime], again)]
    return all(same(runtime, answers) for answers in found)


with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map_async(child, range(4)).get(timeout=60))
"""


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_answer_in_forked_processes(tiny_raw, tiny_bert, tmp_path):
    tiny = tiny_params(tiny_bert, **{"optim.epochs": 1, "encoder.kind": "both"})
    queries = tiny_raw.queries["train"]["title"].to_pylist()
    labels = tiny_raw.labels["title"].to_pylist()
    pairs = csr_matrix(tiny_raw.relevance["train"])
    model = unidec.fit(
        queries,
        labels,
        pairs,
        params=dict(leaves(tiny)),
        folder=tmp_path,
    )
    command = [sys.executable, "-W", "ignore", "-c", FORK, str(model.folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "[True, True, True, True]\n", done.stderr


def test_a_fork_without_threads_keeps_its_pools():
    code = """
import os
from unidec import cores
before = cores.num_threads()
if os.fork() == 0:
    os._exit(0 if cores.num_threads() == before else 3)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
