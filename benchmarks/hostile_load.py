"""Latency of valid traffic beside each cheap attack on a server (fault 36).

    python benchmarks/hostile_load.py  # a small bundle, made in a second; prints a table
    python benchmarks/hostile_load.py --bundle outputs/bundle --seconds 10 --out results.json
    python benchmarks/hostile_load.py --only 'query parameters' 'one-byte chunks'
    python benchmarks/hostile_load.py --caddy caddy  # through the proxy of mlflow/compose.yaml

An attack runs in a process of its own and is bounded: so many bytes a second, or so many
connections. Valid queries come at times drawn before (`http_load.open_loop`), first alone, then
beside the attack. Goal: p99 at most twice that alone (`GOAL`). All of it is on loopback.

With `--caddy`, valid queries and attacks pass through Caddy with the settings of
`mlflow/Caddyfile`, without TLS."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from http_load import Connection, Measured, get, open_loop, percentiles, post, run
from served import Served, free_port, wait_for_port

GOAL = 2.0
BYTES_A_SECOND = 400_000
PIECE = 4096  # bytes that an attacker sends at once
HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@dataclass(frozen=True)
class Attack:
    """What is sent, again and again, each time on a new connection.

    Attributes:
        data: the bytes of one connection. slowly: one byte at a time, on all connections.
        connections: at once.
        a_second: new connections a second at most; None: as `BYTES_A_SECOND` allows.
        reads: whether answers are read.
    """

    data: bytes
    connections: int = 4
    slowly: bool = False
    a_second: float | None = None
    reads: bool = True


def _posted(body: bytes, *more: bytes) -> bytes:
    return (
        HEAD
        + b"".join(line + b"\r\n" for line in more)
        + b"content-length: %d\r\n\r\n" % len(body)
        + body
    )


def attacks() -> dict[str, Attack]:
    """All attacks, by name."""
    parameters = "&".join(f"p{i}=" for i in range(9000))
    headers = "".join(f"h{i}: x\r\n" for i in range(5500))
    chunks = b"1\r\nx\r\n" * 60_000
    keys = json.dumps({f"key{i}": i for i in range(60_000)}).encode()
    cookies = "cookie: " + "a=b; " * 12_000 + "\r\n"
    begin = get("/healthz")[:-2].decode()
    return {
        "query parameters": Attack(get(f"/labels?{parameters}")),
        "long parameter": Attack(get("/labels?prefix=" + "%41" * 20_000)),
        "long path": Attack(get("/labels/" + "%2e%2f" * 10_000)),
        "one-byte chunks": Attack(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunks),
        "many headers": Attack(f"{begin}{headers}\r\n".encode()),
        "cookies": Attack(f"{begin}{cookies}\r\n".encode()),
        "endless head": Attack(f"{begin}x: ".encode() + b"y" * 10_000_000),
        "trailers": Attack(
            HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"t: x\r\n" * 100_000
        ),
        "pipelined": Attack(get("/healthz") * 5000, reads=False),
        "metrics": Attack(get("/metrics") * 5000, reads=False),
        "many keys": Attack(_posted(keys)),
        "deep JSON": Attack(_posted(b'{"queries": ' + b"[" * 900_000)),
        "long number": Attack(_posted(b'{"queries": ["x"], "k": ' + b"7" * 900_000 + b"}")),
        "many values": Attack(_posted(b'{"queries": [' + b"[]," * 300_000 + b"1]}")),
        "form": Attack(
            post("/predict", {}).replace(b"application/json", b"multipart/form-data; boundary=x")
            * 200
        ),
        "compressed": Attack(_posted(b"\x1f\x8b" + b"\0" * 900_000, b"content-encoding: gzip")),
        "ranges": Attack(
            f"{begin}range: bytes={'0-1,' * 10_000}1-2\r\n\r\n".replace("/healthz", "/").encode()
        ),
        "upgrades": Attack(
            f"{begin}connection: upgrade\r\nupgrade: websocket\r\n\r\n".encode() + b"x" * 2000
        ),
        "connects": Attack(b"", a_second=200),
        "idle connections": Attack(b"", connections=1200, slowly=True),
        "slow heads": Attack(begin.encode() + b"x" * 1000, connections=400, slowly=True),
        "slow bodies": Attack(_posted(b" " * 10_000), connections=400, slowly=True),
        "slow readers": Attack(get("/openapi.json") * 50, connections=50, reads=False, a_second=10),
    }


async def _send(port: int, attack: Attack, number: int, end: float) -> None:
    """One attacker: a connection after the other, until the time is over."""
    seconds = PIECE * attack.connections / BYTES_A_SECOND
    if attack.a_second:
        await asyncio.sleep(number / attack.a_second)
    while time.perf_counter() < end:
        begun = time.perf_counter()
        connection = await Connection.open(port)
        if not attack.reads:
            connection.stop_reading()
        if attack.slowly:
            await _send_slowly(connection, attack.data, end)
        else:
            for at in range(0, len(attack.data), PIECE):
                if connection.closed or time.perf_counter() > end:
                    break
                connection.send(attack.data[at : at + PIECE])
                await asyncio.sleep(seconds)
        if attack.a_second:
            await asyncio.sleep(
                max(0.0, begun + attack.connections / attack.a_second - time.perf_counter())
            )
        connection.close(reset=True)


async def _send_slowly(connection: Connection, data: bytes, end: float) -> None:
    head, _, body = data.partition(b"\r\n\r\n")
    begin = head + b"\r\n\r\n" if body else data[:20]
    connection.send(begin)
    at = len(begin)
    while time.perf_counter() < end and not connection.closed:
        await asyncio.sleep(0.5)
        connection.send(data[at : at + 1])
        at += 1


async def attack_until(port: int, name: str, seconds: float) -> None:
    """Attack for so long."""
    attack = attacks()[name]
    end = time.perf_counter() + seconds
    print("begun", flush=True)
    await asyncio.gather(
        *(_send(port, attack, number, end) for number in range(attack.connections)),
        return_exceptions=True,
    )


def _valid() -> Iterator[bytes]:
    number = 0
    while True:
        number += 1
        yield post("/predict", {"queries": [f"redcar oldboat {number}"], "k": 5})


def measure_valid(port: int, rate: float, seconds: float) -> Measured:
    """Valid queries, each another one; each latency counts from when the query was due."""
    found: Measured = run(open_loop(port, _valid(), rate, seconds, connections=16))
    return found


def beside(port: int, name: str, rate: float, seconds: float) -> Measured:
    """The same while an attack runs; it begins a second before."""
    words = [
        sys.executable,
        __file__,
        "--attack",
        name,
        "--port",
        str(port),
        "--seconds",
        str(seconds + 2),
    ]
    attacker = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    with attacker:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        time.sleep(1.0)
        found = measure_valid(port, rate, seconds)
        attacker.kill()
    return found


def facts(name: str, found: Measured, alone: dict[str, float]) -> dict[str, Any]:
    """p50 and p99 in milliseconds alone and beside the attack, and their ratios."""
    latency = percentiles(found.latencies_ms)
    refused = {
        str(status): count for status, count in sorted(found.statuses.items()) if status != 200
    }
    row: dict[str, Any] = {"attack": name, "not_200": refused}
    for share in ("p50", "p99"):
        row[f"{share}_alone"] = alone[share]
        row[share] = latency.get(share)
        row[f"{share}_ratio"] = (
            round(latency[share] / alone[share], 2) if share in latency else None
        )
    row["within_goal"] = not refused and row["p99_ratio"] <= GOAL
    return row


@contextlib.contextmanager
def caddy_before(served: Served, program: str, folder: Path) -> Iterator[int]:
    """The port of Caddy, which passes requests on to the server as `mlflow/Caddyfile` says."""
    port = free_port()
    shipped = (Path(__file__).parents[1] / "mlflow/Caddyfile").read_text()
    options, _, sites = shipped.partition("(team)")
    site = sites[sites.index("serve.{") :]
    site = site.replace("serve.{$DOMAIN:localhost}", f"http://:{port}")
    site = site.replace("serve:8080", f"127.0.0.1:{served.port}")
    config = folder / "Caddyfile"
    config.write_text(options + site)
    words = [program, "run", "--config", str(config), "--adapter", "caddyfile"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as caddy:
        try:
            wait_for_port(port, caddy)
            yield port
        finally:
            caddy.terminate()


def measure(
    served: Served, port: int, names: list[str], rate: float, seconds: float
) -> list[dict[str, Any]]:
    """A row for each attack on a port, which is the server's or a proxy's; before each, the same
    traffic is measured alone.
    """
    measure_valid(port, rate, 5.0)  # what is made at the first requests
    rows = []
    for name in names:
        alone = percentiles(measure_valid(port, rate, seconds).latencies_ms)
        used = served.cpu_seconds()
        row = facts(name, beside(port, name, rate, seconds), alone)
        row["server_cpu"] = round((served.cpu_seconds() - used) / seconds, 2)
        row["resident_mb"] = round(served.memory()["VmRSS"] / 1e6)
        print(_line(row), flush=True)
        rows.append(row)
    return rows


def _line(row: dict[str, Any]) -> str:
    cells = [f"{row['attack']:<18}"]
    names = ("p50_alone", "p50", "p50_ratio", "p99_alone", "p99", "p99_ratio", "server_cpu")
    cells += [f"{name} {row[name]}" for name in names]
    cells += [f"MB {row['resident_mb']}", f"other answers {row['not_200'] or 'none'}"]
    return "  ".join(cells)


def small_bundle(folder: Path) -> Path:
    """The bundle of the tests: 400 labels, a bag of tokens."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.served_bundle import make_served_bundle

    return make_served_bundle(folder)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, help="default: a small one")
    parser.add_argument(
        "--only", nargs="*", default=list(attacks()), choices=list(attacks()), metavar="ATTACK"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="valid queries a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="beside each attack")
    parser.add_argument("--caddy", help="a program: measure through this proxy")
    parser.add_argument("--out", type=Path, help="JSON")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attack:
        run(attack_until(options.port, options.attack, options.seconds))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        bundle = options.bundle or small_bundle(Path(scratch))
        with Served(bundle.resolve(), "serve.threads=1", folder=scratch) as served:
            front: contextlib.AbstractContextManager[int] = contextlib.nullcontext(served.port)
            if options.caddy:
                front = caddy_before(served, options.caddy, Path(scratch))
            with front as port:
                rows = measure(served, port, options.only, options.rate, options.seconds)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    missed = [row["attack"] for row in rows if not row["within_goal"]]
    print(
        f"p99 above {GOAL:g} times that without an attack, or other answers than 200:",
        ", ".join(missed) or "none",
    )
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
