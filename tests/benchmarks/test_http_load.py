"""The load program's client: it reads HTTP as it may come, and its figures tell a stalled server
from a quick one.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def load(benchmark_module):
    return benchmark_module("http_load")


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def beside(
    answer: Callable[[int, asyncio.StreamWriter], Awaitable[None]],
    talk: Callable[[int], Awaitable[Any]],
) -> Any:
    """What `talk(port)` returns beside a server that calls `answer(number of the request, writer)`
    for each request.
    """
    numbers = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lower = head.lower()
                if b"content-length:" in lower:
                    await reader.readexactly(
                        int(lower.split(b"content-length:")[1].split(b"\r\n")[0])
                    )
                await answer(next(numbers), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> Any:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
            return await asyncio.wait_for(talk(listening.sockets[0].getsockname()[1]), 20)

    return asyncio.run(main())


async def quick(number: int, writer: asyncio.StreamWriter) -> None:
    writer.write(OK)


def stalling(once: int, seconds: float) -> Callable[[int, asyncio.StreamWriter], Awaitable[None]]:
    """A server that stands still for all, once."""
    open_again = asyncio.Event()
    open_again.set()

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == once:
            open_again.clear()
            asyncio.get_running_loop().call_later(seconds, open_again.set)
        await open_again.wait()
        writer.write(OK)

    return answer


def requests(load):
    return itertools.repeat(load.post("/predict", {"queries": ["größer 🚗"]}))


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_answers_come_whole_however_they_are_cut(load, pieces):
    wire = (
        b"HTTP/1.1 100 Continue\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ncontent-type: a\r\nCONTENT-LENGTH: 5\r\n\r\nhello"
        b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 2\r\ncontent-length: 0\r\n\r\n"
        b"HTTP/1.1 204 No Content\r\n\r\n"
    )
    size = max(1, len(wire) // pieces)

    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        for begin in range(0, len(wire), size):
            writer.write(wire[begin : begin + size])
            await asyncio.sleep(0)

    async def talk(port: int) -> list[Any]:
        connection = await load.Connection.open(port)
        connection.send(load.get("/"))
        answers = [await connection.answer() for _ in range(3)]
        connection.close()
        return answers

    found = beside(answer, talk)
    assert [(answer.status, answer.body) for answer in found] == [
        (200, b"hello"),
        (503, b""),
        (204, b""),
    ]
    assert found[1].header("retry-after") == "2"
    assert found[1].header("none") is None


def test_what_is_sent_is_what_was_meant(load):
    head, _, body = load.post("/predict", {"queries": ["größer 🚗"]}).partition(b"\r\n\r\n")
    assert json.loads(body) == {"queries": ["größer 🚗"]}
    assert head.startswith(b"POST /predict HTTP/1.1\r\n")
    assert f"content-length: {len(body)}".encode() in head


def test_answers_to_several_requests_at_once_come_in_turn_and_a_last_one_is_the_last(load):
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        last = b"connection: close\r\n" * (number == 2)
        writer.write(b"HTTP/1.1 20%d OK\r\n%scontent-length: 1\r\n\r\nx" % (number, last))

    async def talk(port: int) -> list[tuple[int, bool]]:
        connection = await load.Connection.open(port)
        connection.send(load.get("/") * 3)
        await asyncio.sleep(0.1)
        return [((await connection.answer()).status, connection.closed) for _ in range(4)]

    assert beside(answer, talk) == [(200, False), (201, False), (202, True), (load.CLOSED, True)]


def test_a_closed_loop_sends_each_request_once_and_counts_what_failed(load):
    async def answer(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 3:
            writer.close()
        elif number % 10 == 5:
            writer.write(b"HTTP/1.1 503 No\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n")
        else:
            writer.write(OK)

    sent = itertools.count()
    numbered = (load.post("/predict", {"queries": [str(next(sent))]}) for _ in itertools.count())
    measured = beside(answer, lambda port: load.closed_loop(port, numbered, 4, count=50))
    assert next(sent) == 50
    assert measured.statuses == {200: 44, 503: 5, 0: 1}
    assert len(measured.latencies_ms) == 44, "no latency of a refusal among answers"
    assert len(measured.refused_ms) == 6, "no latency of a refusal among answers"
    assert {answer.status for answer in measured.answers} == {503, 0}
    facts = json.loads(json.dumps(measured.facts()))
    assert facts["statuses"] == {"0": 1, "200": 44, "503": 5}
    assert facts["latency_ms"]["count"] == 44


def test_a_closed_loop_ends_in_time(load):
    measured = beside(quick, lambda port: load.closed_loop(port, requests(load), 3, seconds=0.3))
    assert 0.3 <= measured.seconds < 1
    assert measured.statuses[200] > 100
    expected = measured.statuses[200] / measured.seconds
    assert measured.rate == pytest.approx(expected)


def test_an_open_loop_counts_those_who_came_while_nothing_was_answered(load):
    """One stall of 0.4 s in 2 s: a fifth of all who came waited; a closed loop sees it once a
    client.
    """
    # the event of a server that stalls is made within its loop
    closed = beside(
        stalling(20, 0.4), lambda port: load.closed_loop(port, requests(load), 2, count=1000)
    )
    slow = [ms for ms in closed.latencies_ms if ms > 100]
    assert 1 <= len(slow) <= 2
    assert closed.facts()["latency_ms"]["p99"] < 100
    for connections in (2, 64):
        opened = beside(
            stalling(20, 0.4),
            lambda port, many=connections: load.open_loop(
                port, requests(load), 100, 2, connections=many
            ),
        )
        slow = [ms for ms in opened.latencies_ms if ms > 100]
        assert 15 <= len(slow) <= 50, connections
        assert opened.facts()["latency_ms"]["p90"] > 100, connections
        assert 160 <= opened.statuses[200] <= 240, "all that were due are asked and answered"
        few = [ms for ms in opened.service_ms if ms > 100]
        assert len(few) <= 2 if connections == 2 else len(few) >= 15, (
            "time in a queue of the client is no service"
        )


def test_an_open_loop_says_when_the_client_itself_was_late(load):
    import time

    async def busy(number: int, writer: asyncio.StreamWriter) -> None:
        if number == 10:
            time.sleep(0.3)  # the whole process, the client with it
        writer.write(OK)

    measured = beside(busy, lambda port: load.open_loop(port, requests(load), 100, 1))
    assert measured.facts()["late_ms"]["max"] > 150
    measured = beside(quick, lambda port: load.open_loop(port, requests(load), 100, 0.5))
    assert measured.facts()["late_ms"]["p50"] < 50


def test_percentiles_are_values_that_occurred(load):
    found = load.percentiles([*range(1, 100), 1000.0])
    assert found == {
        "count": 100,
        "mean": 59.5,
        "p50": 51,
        "p90": 91,
        "p99": 1000,
        "p999": 1000,
        "max": 1000,
    }
    assert load.percentiles([3.0])["p99"] == 3
    assert load.percentiles([]) == {"count": 0}


def test_texts_are_never_the_same_twice(load):
    texts = ["Red  car here", "red car HERE", "one", "a b c", "new boat of wood"]
    made = list(itertools.islice(load.unique_texts(texts, 1), 30))
    keys = {" ".join(text.lower().split()) for text in made}
    assert len(keys) == 30
    assert {"one", "a b c", "new boat of wood"} <= set(made[:4]), "first the texts as they are"
    originals = {tuple(sorted(text.lower().split())) for text in texts}
    assert {tuple(sorted(key.split())) for key in keys} == originals, "words stay"
    assert (
        made
        == list(itertools.islice(load.unique_texts(texts, 1), 30))
        != list(itertools.islice(load.unique_texts(texts, 2), 30))
    )
    with pytest.raises(ValueError, match="only 2 different"):
        list(load.unique_texts(["one", "two"]))
