"""Sends requests that mean harm to a server, and judges its answers (fault 21).

    # against a server of ours on this machine; JSON
    python benchmarks/hostile.py --port 8080 --count 1000

Beside the status, which each case of `hostile_cases.py` names: an error is JSON in the house's
shape, short, comes within a second, and shows nothing of the inside. Only loopback is ever asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hostile_cases import Case, make_cases
from http_load import Answer, Connection, run

ERROR_KEYS = ["expected", "fix", "got", "what", "where"]
INSIDE = (b"Traceback", b"site-packages", b"/unidec/", b'File \\"')
MAX_ERROR_BYTES = 4096
SOON_SECONDS = 1.0
TRIALS = 3
WAIT_SECONDS = 15.0  # for those that send slowly: until the server ends it


@dataclass
class Judge:
    """Checks every answer; `faults` says what was wrong, with the case's kind and the beginning of
    what was sent.

    What was refused late is in `late`: it may have stood behind others, or the machine is busy.
    `attack` asks it again alone, and it is a fault where it is late again and again.
    """

    faults: list[str] = field(default_factory=list)
    late: list[Case] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)

    def take(self, case: Case, answers: list[Answer], seconds: float) -> None:
        self.kinds[case.kind] += 1
        self.statuses.update(answer.status for answer in answers)
        if not case.slow:
            self.slowest[case.kind] = max(self.slowest.get(case.kind, 0.0), seconds)
        refused = any(400 <= answer.status < 500 for answer in answers)
        if refused and seconds > SOON_SECONDS and not case.slow:
            self.late.append(case)
        for fault in self._faults(case, answers):
            self.faults.append(f"{case.kind}: {fault}; sent {case.data[:300]!r}")

    def _faults(self, case: Case, answers: list[Answer]) -> Iterable[str]:
        for answer in answers:
            if answer.status not in case.allowed:
                yield (
                    f"status {answer.status}, right were {sorted(case.allowed)}; got "
                    f"{answer.body[:300]!r}"
                )
            elif answer.status == 200 and case.labels:
                yield from self._answered(case, answer)
            elif answer.status >= 400 and not case.head and not case.plain:
                yield from self._refused(answer)

    def _answered(self, case: Case, answer: Answer) -> Iterable[str]:
        try:
            found = answer.json()
            queries = len(found["predictions"])
        except (ValueError, KeyError, TypeError) as error:
            yield f"200 with a body that is none: {error!r}, {answer.body[:200]!r}"
            return
        if queries != case.labels:
            yield f"{queries} predictions for {case.labels} queries"

    def _refused(self, answer: Answer) -> Iterable[str]:
        if not (answer.header("content-type") or "").startswith("application/json"):
            yield f"{answer.status} that is no JSON: {answer.head[:200]!r} {answer.body[:200]!r}"
            return
        if len(answer.body) > MAX_ERROR_BYTES:
            yield f"an error of {len(answer.body)} bytes"
        for mark in INSIDE:
            if mark in answer.body:
                yield f"an error that shows the inside ({mark!r}): {answer.body[:400]!r}"
        try:
            error = answer.json()["error"]
            if sorted(error) != ERROR_KEYS or not all(
                isinstance(value, str) for value in error.values()
            ):
                raise ValueError(sorted(error))
            if not (error["what"] and error["fix"]):
                raise ValueError("nothing said")
        except (ValueError, KeyError, TypeError, AttributeError) as wrong:
            yield f"an error of another shape: {wrong!r} {answer.body[:300]!r}"

    def facts(self) -> dict[str, Any]:
        return {
            "requests": sum(self.kinds.values()),
            "faults": self.faults[:20],
            "num_faults": len(self.faults),
            "late": Counter(case.kind for case in self.late),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "kinds": dict(sorted(self.kinds.items())),
            "slowest_ms": {kind: round(1000 * s, 1) for kind, s in sorted(self.slowest.items())},
        }


async def attack(
    port: int, cases: list[Case], *, clients: int = 4, rate: float | None = None
) -> Judge:
    """Send all cases, `clients` at a time (unfinished ones beside them), at most `rate`
    a second.
    """
    judge = Judge()
    left = iter(cases)
    waiting: set[asyncio.Task[None]] = set()
    begun = time.perf_counter()
    sent = 0

    async def one(case: Case, connection: Connection) -> None:
        connection.bodyless = case.head
        at = time.perf_counter()
        connection.send(case.data)
        answers: list[Answer] = []
        try:
            for _ in range(case.answers):
                answers.append(await asyncio.wait_for(connection.answer(), WAIT_SECONDS))  # noqa: PERF401
        except TimeoutError:
            judge.faults.append(
                f"{case.kind}: nothing within {WAIT_SECONDS:.0f} s; sent {case.data[:300]!r}"
            )
            connection.close()
            return
        judge.take(case, answers, time.perf_counter() - at)
        if case.alone:
            connection.close(reset=not case.answers)

    async def client() -> None:
        nonlocal sent
        connection = await Connection.open(port)
        for case in left:
            sent += 1
            if rate and (wait := begun + sent / rate - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            if case.alone:
                task = asyncio.create_task(one(case, await Connection.open(port)))
                if not case.slow:
                    await task
                    continue
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                continue
            await one(case, connection)
            if connection.closed:
                connection = await Connection.open(port)
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    while waiting:
        await asyncio.gather(*waiting)
    for case in judge.late:
        if (seconds := await _soonest(port, case)) > SOON_SECONDS:
            judge.faults.append(
                f"{case.kind}: refused after {seconds:.2f} s, time and again; sent "
                f"{case.data[:300]!r}"
            )
    return judge


def started(port: int, *, count: int, rate: float, seed: int) -> subprocess.Popen[str]:
    """An attack in a process of its own, from now on; its last line on stdout are the facts as
    JSON.

    What making the requests costs this machine is over by then: it is no part of what they cost a
    server. Fair requests of very many queries are not among them.
    """
    words = [
        sys.executable,
        __file__,
        "--port",
        str(port),
        "--seed",
        str(seed),
        "--count",
        str(count),
    ]
    words += ["--rate", str(rate), "--small", "--wait"]
    attack = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert attack.stdin is not None and attack.stdout is not None
    if attack.stdout.readline() != "made\n":
        raise RuntimeError("the hostile requests cannot be made")
    attack.stdin.write("begin\n")
    attack.stdin.flush()
    return attack


async def _soonest(port: int, case: Case) -> float:
    """Seconds until a refusal, the least of some trials, each alone on a connection of its own."""
    found = []
    for _ in range(TRIALS):
        connection = await Connection.open(port)
        connection.bodyless = case.head
        begun = time.perf_counter()
        await asyncio.wait_for(connection.ask(case.data), WAIT_SECONDS)
        found.append(time.perf_counter() - begun)
        connection.close()
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=None, help="requests a second at most")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--small", action="store_true", help="without fair requests of very many queries"
    )
    parser.add_argument(
        "--wait", action="store_true", help="say that all are made, and begin with a line of stdin"
    )
    options = parser.parse_args()
    cases = make_cases(options.count, options.seed, large=not options.small)
    if options.wait:
        print("made", flush=True)
        sys.stdin.readline()
    judge = run(attack(options.port, cases, clients=options.clients, rate=options.rate))
    print(json.dumps(judge.facts()))
    return bool(judge.faults)


if __name__ == "__main__":
    sys.exit(main())
