"""Fault 21: a server that is sent what means harm answers 4xx in JSON, soon, grows no memory, and
continues to serve.

A real server in a process of its own gets the requests of `helpers/hostile_requests.py`, and what
schemathesis makes of its OpenAPI.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers.served_bundle import make_served_bundle

from unidec.config import Serve

pytest.importorskip("uvicorn")

ROOT = Path(__file__).parents[2]
NUM_LABELS = 60  # fewer than max_k
GROWTH = 0.05
MIB = 2**20


@pytest.fixture(scope="module")
def load(benchmark_module: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark_module("http_load")


@pytest.fixture(scope="module")
def server_of(benchmark_module: Callable[[str], ModuleType]) -> Any:
    """`Served`: a server in a process of its own."""
    return benchmark_module("served").Served


@pytest.fixture(scope="module")
def hostile(load: ModuleType) -> ModuleType:
    """The requests; they import `http_load`."""
    from helpers import hostile_requests

    return hostile_requests


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    return Path(make_served_bundle(folder, NUM_LABELS))


@pytest.fixture(scope="module")
def served(server_of: Any, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that gives a body 3 s; away from this project's params.yaml."""
    folder = tmp_path_factory.mktemp("server")
    with server_of(bundle, "serve.timeout_seconds=3", folder=folder) as server:
        yield server


def fair_answers(served: Any) -> list[Any]:
    """What fair questions are answered: the same before and after."""
    what = {"queries": ["redcar oldboat", "newhouse bigtree", "🚗"], "k": 100}
    found = served.ask("/predict", what)["predictions"]
    assert [len(one["labels"]) for one in found] == [NUM_LABELS] * 3
    return [[(label["uid"], round(label["score"], 5)) for label in one["labels"]] for one in found]


def no_trace(served: Any, quiet: str) -> None:
    """The log holds no exception, and did not grow with the requests: nobody can fill the disk."""
    grown = served.log[len(quiet) :]
    assert "Traceback" not in grown, grown[-3000:]
    assert "Exception" not in grown, grown[-3000:]
    assert " ERROR " not in grown, grown[-3000:]
    assert len(grown) < 5000, grown[-3000:]


def test_hostile_requests_are_refused_one_by_one(
    hostile: ModuleType, load: ModuleType, served: Any
) -> None:
    """Some 800 requests; what follows them is answered as before."""
    before = fair_answers(served)
    quiet = served.log
    requests = hostile.hostile_requests()
    faults = load.run(hostile.attack(served.port, requests))
    assert not faults, f"{len(faults)} faults:\n" + "\n".join(faults[:10])
    assert len(requests) > 700
    must_fail = [request for request in requests if 200 not in request.allowed]
    assert len(must_fail) > 300
    assert fair_answers(served) == before
    no_trace(served, quiet)
    counted = served.metrics()
    errors = [value for name, value in counted.items() if name.startswith("unidec_errors_total")]
    assert sum(errors) > 300


def test_requests_at_once_and_clients_that_leave(
    hostile: ModuleType, load: ModuleType, served: Any
) -> None:
    """Five requests in one piece have five answers; a client that disconnects in the middle
    of one delays no other client.
    """
    data = hostile.posted(hostile.BODY)

    async def talk() -> list[Any]:
        for end in range(1, len(data) + 1, 7):
            leaving = await load.Connection.open(served.port)
            leaving.send(data[:end])
            leaving.close(reset=True)
        connection = await load.Connection.open(served.port)
        connection.send(data * 5)
        answers = [await connection.answer() for _ in range(5)]
        connection.close()
        return answers

    quiet = served.log
    for answer in load.run(talk()):
        assert answer.status == 200
        assert len(answer.json()["predictions"]) == len(hostile.QUERIES)
    no_trace(served, quiet)


def test_slow_bodies_are_ended_and_slow_clients_disturb_no_other(
    load: ModuleType, served: Any
) -> None:
    """Forty connections that send a byte now and then, half of them within the head: each body is
    ended in its time (heads are a reverse proxy's to end), and other requests are answered
    meanwhile.
    """
    num = 40
    begins = [
        load.post("/predict", {"queries": ["x" * 99]})[:-50],
        b"POST /predict HTTP/1.1\r\nhost: a\r\n",
    ]

    async def slow(row: int) -> tuple[int, float]:
        connection = await load.Connection.open(served.port)
        connection.send(begins[row % 2])
        loop = asyncio.get_running_loop()
        begun = asyncio.get_running_loop().time()
        answer = asyncio.create_task(connection.answer())
        while not answer.done() and loop.time() < begun + 8:
            await asyncio.wait([answer], timeout=0.5)
            connection.send(b"a")
        connection.close()
        return (await answer).status, loop.time() - begun

    async def talk() -> tuple[list[tuple[int, float]], Any]:
        slow_ones = [asyncio.create_task(slow(row)) for row in range(num)]
        requests = (load.post("/predict", {"queries": [f"redcar {i}"]}) for i in range(10**6))
        measured = await load.closed_loop(served.port, requests, 2, seconds=3, pause=0.01)
        return await asyncio.gather(*slow_ones), measured

    ended, measured = load.run(talk())
    bodies = ended[::2]
    # a byte that is no JSON may show before the time is up
    assert {status for status, _ in bodies} <= {400, 408, 422}
    assert max(seconds for _, seconds in bodies) < 8
    assert set(measured.statuses) == {200}
    assert measured.statuses[200] > 50


def test_the_servers_own_openapi_holds(served: Any) -> None:
    """schemathesis: what OpenAPI calls right is answered as OpenAPI says, what it calls wrong is
    refused; no surprise.

    The same examples each time; `test_schemathesis_finds_nothing` is the whole of it.
    """
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis.errors import Unsatisfiable

    url = f"http://127.0.0.1:{served.port}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: dict[tuple[str, str], set[int]] = {}

    def tried(label: str, mode: Any, cases: Any) -> None:
        @settings(
            max_examples=6,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases)
        def run(case: Any) -> None:
            answer = case.call(base_url=url)
            statuses.setdefault((label, mode.value), set()).add(answer.status_code)
            case.validate_response(answer)

        # most routes take nothing that could be wrong
        with contextlib.suppress(
            *[Unsatisfiable] * (mode.value == "negative" and not label.startswith("POST"))
        ):
            run()

    for found in schema.get_all_operations():
        operation = found.ok()
        for mode in schemathesis.GenerationMode:
            tried(operation.label, mode, operation.as_strategy(generation_mode=mode))
    assert {label for label, _ in statuses} >= {
        "POST /predict",
        "POST /explain",
        "GET /labels",
        "GET /version",
    }
    for label in ("POST /predict", "POST /explain"):
        assert statuses[label, "positive"] == {200}
        assert statuses[label, "negative"] <= {
            400,
            415,
            422,
        }


def test_each_fault_of_an_answer_is_found(hostile: ModuleType, load: ModuleType) -> None:
    """Each thing that these tests assert is seen where it is missing."""
    error = dict.fromkeys(hostile.ERROR_KEYS, "x")
    head = b"HTTP/1.1 422 No\r\ncontent-type: application/json\r\n"

    def faults(answer: Any, allowed: set[int] = hostile.WRONG, num_queries: int = 0) -> list[str]:
        return list(hostile.faults(hostile.Hostile(b"data", allowed, num_queries), answer))

    def refused(**changes: Any) -> Any:
        return load.Answer(422, head, json.dumps({"error": error | changes}).encode())

    assert faults(refused()) == []
    wrong = [
        (load.Answer(500, head), "status 500"),
        (load.Answer(load.CLOSED), "status 0"),
        (load.Answer(200), "status 200"),
        (load.Answer(422, b"HTTP/1.1 422 No\r\ncontent-type: text/html\r\n", b"<p>"), "no JSON"),
        (load.Answer(422, head, b'{"detail": []}'), "another shape"),
        (load.Answer(422, head, b"[]"), "another shape"),
        (refused(fix=""), "another shape"),
        (refused(got=3), "another shape"),
        (refused(more="x"), "another shape"),
        (refused(got="x" * 9999), "an error of"),
        (refused(got="Traceback (most"), "shows the inside"),
    ]
    for answer, words in wrong:
        (found,) = faults(answer)
        assert words in found, answer
    assert faults(load.Answer(200, b"", b'{"predictions": [1, 2]}'), {200}, num_queries=2) == []
    for body in (b'{"predictions": [1]}', b"{", b"[]"):
        assert faults(load.Answer(200, b"", body), {200}, num_queries=2), body


@pytest.mark.parametrize(
    ("times", "num_faults"),
    [
        (0, 0),
        (1, 0),
        (99, 1),
    ],
)
def test_who_is_refused_late_time_and_again_is_a_fault(
    hostile: ModuleType,
    load: ModuleType,
    times: int,
    num_faults: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is slow so many times: once may be the machine's fault."""
    monkeypatch.setattr(hostile, "SOON_SECONDS", 0.2)
    body = json.dumps({"error": dict.fromkeys(hostile.ERROR_KEYS, "x")}).encode()
    left = [times]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                left[0] -= 1
                await asyncio.sleep(0.3 * (left[0] >= 0))
                head = b"HTTP/1.1 404 No\r\ncontent-type: application/json\r\n"
                writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async def main() -> list[str]:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            port = listening.sockets[0].getsockname()[1]
            found = await hostile.attack(port, [hostile.Hostile(load.get("/nothing"), {404})])
            await asyncio.sleep(0.1)  # until the server has seen that all are gone
            return list(found)

    faults = asyncio.run(main())
    assert len(faults) == num_faults, faults


def attacking(port: int, count: int, rate: float) -> subprocess.Popen[str]:
    """`hostile_requests` in a process of its own: its last line holds the faults."""
    words = [sys.executable, "-m", "helpers.hostile_requests", str(port), str(count), str(rate)]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "benchmarks")])
    environment = os.environ | {"PYTHONPATH": paths}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ten_thousand_hostile_requests(
    load: ModuleType, hostile: ModuleType, server_of: Any, bundle: Path, tmp_path: Path
) -> None:
    """No fault, memory grows under 5 %, valid requests beside it have at most twice the 99th
    percentile.

    Hostile requests come from a process of their own, 100 a second; valid ones, 40 a second, from
    this one, in turns with and without the others, so that whatever else the machine does falls on
    both alike.
    """
    rounds = 10
    each = 1000
    rate = 100
    with server_of(bundle, folder=tmp_path) as served:
        before = fair_answers(served)
        quiet = served.log
        letters = itertools.product("abcdefghij", "klmnopqrst", "uvwxyz", range(20))
        texts = load.unique_texts([" ".join(map(str, some)) for some in letters])
        requests = (
            load.post("/predict", {"queries": [f"redcar oldboat {text}"]}) for text in texts
        )
        # a full cache grows no more
        load.run(load.closed_loop(served.port, requests, 32, count=Serve().cache_queries))
        hundreds = [[next(texts) for _ in range(100)] for _ in range(20)]
        large = (load.post("/predict", {"queries": queries}) for queries in hundreds)
        statuses = load.run(load.closed_loop(served.port, large, 2)).statuses
        assert set(statuses) == {200}, "what fair use takes at most"
        # made when first asked for
        for path in ("/openapi.json", "/card", "/", "/metrics", "/labels?prefix=red"):
            served.ask(path)
        served.ask("/explain", {"query": "redcar"})
        start = served.memory()["VmRSS"]
        alone: list[float] = []
        beside: list[float] = []
        faults: list[str] = []
        for turn in range(rounds):
            calm = load.run(load.open_loop(served.port, requests, 40, each / rate, seed=turn))
            with attacking(served.port, each, rate) as attack:
                loud = load.run(load.open_loop(served.port, requests, 40, each / rate, seed=turn))
                output, _ = attack.communicate(timeout=120)
            faults += json.loads(output.splitlines()[-1])
            assert set(calm.statuses) == set(loud.statuses) == {200}
            alone += calm.latencies_ms
            beside += loud.latencies_ms
        grown = served.memory()["VmRSS"] / start - 1
        p99 = [load.percentiles(values)["p99"] for values in (alone, beside)]
        print(
            f"memory {start / MIB:.0f} MiB {grown:+.1%}; p99 alone {p99[0]:.1f} ms, beside "
            f"{p99[1]:.1f} ms"
        )
        assert not faults, "\n".join(faults[:10])
        assert grown < GROWTH
        assert p99[1] <= 2 * p99[0]
        assert fair_answers(served) == before
        no_trace(served, quiet)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_schemathesis_finds_nothing(server_of: Any, bundle: Path, tmp_path: Path) -> None:
    """Its own runner: examples, coverage of every keyword, 100 random cases of each operation, and
    sequences.
    """
    program = Path(sys.executable).with_name("st")
    if not program.is_file():
        pytest.skip("schemathesis is not installed")
    with server_of(bundle, folder=tmp_path) as served:
        quiet = served.log
        words = [
            program,
            "run",
            f"http://127.0.0.1:{served.port}/openapi.json",
            "--max-examples",
            "100",
            "--no-color",
        ]
        words += ["--continue-on-failure", "--generation-deterministic"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        no_trace(served, quiet)
