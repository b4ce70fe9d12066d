"""An HTTP/1.1 client with little overhead, and the loads that it makes: closed loop and open loop.

*Closed loop*: so many clients, each asks again when it was answered. It measures throughput. Its
latencies leave out what a stalled server would have done to those who had come meanwhile
(coordinated omission).
*Open loop*: requests come at times drawn before (a Poisson process), answered or not, and each
latency counts from the time at which the request was due, not from when it could be sent: whoever
had to wait for a connection waited too.

Only loopback is ever asked. Latencies are milliseconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"
CLOSED = 0  # the status of a request whose connection ended without an answer


def post(path: str, what: Any) -> bytes:
    """A POST of JSON, ready to be sent."""
    body = json.dumps(what, ensure_ascii=False).encode()
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body


def get(path: str) -> bytes:
    """A GET, ready to be sent."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: status, head and body as they were; `status` 0 where the connection ended
    without an answer.
    """

    status: int
    head: bytes = b""
    body: bytes = b""

    def header(self, name: str) -> str | None:
        """A header's value; None where it is not there."""
        found = re.search(rb"^%s: *(.*?) *\r$" % name.encode(), self.head, re.I | re.M)
        return found[1].decode("latin-1") if found else None

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """A connection that is kept open; one request at a time, unless `send` and `answer` are used
    apart.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._is_last = False  # the answer to the latest request says that no other follows

    @classmethod
    async def open(cls, port: int) -> Connection:
        """A new connection to this machine."""
        return cls(*await asyncio.open_connection(HOST, port))

    @property
    def closed(self) -> bool:
        """Whether no further request would be answered."""
        return self._is_last or self._writer.is_closing() or self._reader.at_eof()

    async def usable(self, port: int) -> Connection:
        """Itself, or a new one where no further request would be answered."""
        if not self.closed:
            return self
        self.close()
        return await Connection.open(port)

    async def ask(self, data: bytes) -> Answer:
        """Send a request and wait for its answer; status 0 where the connection ends first."""
        self.send(data)
        return await self.answer()

    def send(self, data: bytes) -> None:
        if not self.closed:
            self._writer.write(data)

    async def answer(self) -> Answer:
        """The next answer, whose head says its length, as each of `unidec serve` does."""
        if self._is_last:
            return Answer(CLOSED)
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            answer = Answer(int(head[9:12]), head)
            if answer.status < 200:  # 100 Continue
                return await self.answer()
            body = await self._reader.readexactly(int(answer.header("content-length") or 0))
        except (asyncio.IncompleteReadError, ConnectionError):
            return Answer(CLOSED)
        if answer.header("connection") == "close":
            self._is_last = True
            self.close()
        return replace(answer, body=body)

    def stop_reading(self) -> None:
        """Read no answer from now on."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def close(self, reset: bool = False) -> None:
        """Close; `reset`: at once, what was not sent is lost."""
        transport = self._writer.transport
        (transport.abort if reset else transport.close)()


@dataclass
class Measured:
    """What a load measured.

    Attributes:
        latencies_ms: of the answers with status 200, in the order in which they came.
        service_ms: open loop: the same from when each request was sent; what a closed loop would
        have called latency.
        statuses: how many answers by status; 0: none, the connection ended.
        seconds: how long it took. answers: the last answers with another status than 200, 20 at
        most.
        refused_ms: latencies of the answers with another status.
        late_ms: open loop: how late requests were sent for which a connection was free: the
        client's own fault.
        cpu_share: share of a core that this process used meanwhile; near 1 the client is what is
        measured.
    """

    latencies_ms: list[float] = field(default_factory=list)
    service_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    late_ms: list[float] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    answers: deque[Answer] = field(default_factory=lambda: deque(maxlen=20))
    seconds: float = 0.0
    cpu_share: float = 0.0

    @property
    def rate(self) -> float:
        """Answers with status 200 a second."""
        return len(self.latencies_ms) / self.seconds if self.seconds else 0.0

    def take(self, answer: Answer, milliseconds: float, service_ms: float | None = None) -> None:
        self.statuses[answer.status] += 1
        if answer.status == 200:
            self.latencies_ms.append(milliseconds)
            if service_ms is not None:
                self.service_ms.append(service_ms)
        else:
            self.refused_ms.append(milliseconds)
            self.answers.append(answer)

    def facts(self) -> dict[str, Any]:
        """For JSON: rate, statuses, percentiles."""
        found: dict[str, Any] = {
            "seconds": round(self.seconds, 3),
            "rate": round(self.rate, 1),
            "client_cpu_share": round(self.cpu_share, 2),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "latency_ms": percentiles(self.latencies_ms),
        }
        if self.service_ms:
            found |= {
                "service_ms": percentiles(self.service_ms),
                "late_ms": percentiles(self.late_ms),
            }
        if self.refused_ms:
            found["refused_ms"] = percentiles(self.refused_ms)
        return found


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99, p999 and the largest, each a value that occurred (never one between); with
    their number.
    """
    ordered = np.sort(np.fromiter(values, dtype=np.float64))
    if not ordered.size:
        return {"count": 0}
    shares = {"p50": 50, "p90": 90, "p99": 99, "p999": 99.9, "max": 100}
    found = {
        name: float(np.percentile(ordered, share, method="higher"))
        for name, share in shares.items()
    }
    return {"count": int(ordered.size), "mean": round(float(ordered.mean()), 3)} | {
        name: round(value, 3) for name, value in found.items()
    }


@contextlib.contextmanager
def _timed(measured: Measured) -> Iterator[float]:
    begun = time.perf_counter()
    cpu = time.process_time()
    yield begun
    measured.seconds = time.perf_counter() - begun
    measured.cpu_share = (time.process_time() - cpu) / measured.seconds


async def closed_loop(
    port: int,
    requests: Iterator[bytes],
    clients: int,
    *,
    seconds: float = 1e9,
    count: int | None = None,
    pause: float = 0.0,
) -> Measured:
    """`clients` connections, each asks again when it was answered.

    Args:
        requests: taken in turn by all; each is sent once.
        seconds: no request is sent later. count: nor more than so many.
        pause: seconds that a client waits after each answer.
    """
    measured = Measured()
    some = requests if count is None else itertools.islice(requests, count)

    async def client() -> None:
        connection = await Connection.open(port)
        while time.perf_counter() < end and (data := next(some, None)) is not None:
            sent = time.perf_counter()
            answer = await connection.ask(data)
            measured.take(answer, 1000 * (time.perf_counter() - sent))
            connection = await connection.usable(port)
            if pause:
                await asyncio.sleep(pause)
        connection.close()

    with _timed(measured) as begun:
        end = begun + seconds
        await asyncio.gather(*(client() for _ in range(clients)))
    return measured


async def open_loop(
    port: int,
    requests: Iterator[bytes],
    rate: float,
    seconds: float,
    *,
    connections: int = 64,
    seed: int = 0,
) -> Measured:
    """Requests at times of a Poisson process; all that were due within `seconds` are waited for.

    Args:
        rate: requests a second. connections: at most; who finds none free waits, and its latency
        counts.
        seed: of the times.
    """
    measured = Measured()
    gaps = np.random.default_rng(seed).exponential(1 / rate, int(rate * seconds * 1.2) + 50)
    due_S = [float(at) for at in np.cumsum(gaps) if at < seconds]
    free = [await Connection.open(port) for _ in range(connections)]
    backlog: deque[float] = deque()
    running: set[asyncio.Task[None]] = set()

    async def exchange(connection: Connection, due: float) -> None:
        connection = await connection.usable(port)  # it may not have been used for long
        while True:
            sent = time.perf_counter()
            answer = await connection.ask(next(requests))
            done = time.perf_counter()
            measured.take(answer, 1000 * (done - begun - due), 1000 * (done - sent))
            connection = await connection.usable(port)
            if not backlog:
                free.append(connection)
                return
            due = backlog.popleft()

    with _timed(measured) as begun:
        for due in due_S:
            if (wait := begun + due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if free:
                measured.late_ms.append(1000 * (time.perf_counter() - begun - due))
                task = asyncio.create_task(exchange(free.pop(), due))
                running.add(task)
                task.add_done_callback(running.discard)
            else:
                backlog.append(due)
        while running:
            await asyncio.gather(*running)
    for connection in free:
        connection.close()
    return measured


def run(coroutine: Any) -> Any:
    """`asyncio.run`, on uvloop where it is there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


# -- queries
# --------------------------------------------------------------------------------------------------


def split_titles(dataset: Path, split: str) -> list[str]:
    """The titles of a split's queries, each once."""
    import pyarrow as pa

    from unidec.data.dataset import XMCDataset

    opened = XMCDataset.open(dataset)
    return list(
        dict.fromkeys(opened.queries["title"].take(pa.array(opened.rows(split))).to_pylist())
    )


def unique_texts(texts: list[str], seed: int = 0) -> Iterator[str]:
    """The texts in an order drawn once, then the same with their words in other orders, for ever;
    none comes twice.

    Two that differ in case or white space only count as the same, so that no cache can know one
    from the other. Other orders keep lengths and words as real queries have them.

    Raises:
        ValueError: no more orders are found.
    """
    rng = np.random.default_rng(seed)
    seen: set[str] = set()
    without = 0  # turns in a row that gave nothing new: one may by chance
    for turn in itertools.count():
        without += 1
        for row in rng.permutation(len(texts)):
            words = texts[row].split()
            text = (
                texts[row] if turn == 0 else " ".join(words[i] for i in rng.permutation(len(words)))
            )
            key = " ".join(text.lower().split())
            if key not in seen:
                seen.add(key)
                without = 0
                yield text
        if without == 20:
            raise ValueError(f"only {len(seen)} different texts can be made of {len(texts)}")
