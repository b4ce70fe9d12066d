"""What one request costs the server beside the model: HTTP, limits, checks, queue, batches, figures, JSON.

    python benchmarks/serving_overhead.py                # half a minute; results/serving-overhead.json

The model answers at once with five labels made before. Counted is the processor's time of the server's process, so that
the client beside it (and whatever else runs) changes little. `bare`: the same uvicorn with an application
that answers fixed bytes: what HTTP alone costs. `kept`: the same query again and again, from the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MODES = ("bare", "new", "kept")
CLIENTS = (1, 8, 32)


def queries(mode: str) -> Iterator[bytes]:
    """Requests of one query each."""
    from http_load import post

    for i in itertools.count():
        yield post("/predict", {"queries": [f"an editor for plain text {i if mode != 'kept' else ''}"], "k": 5})


def processor_seconds(process: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(mode: str, clients: int, seconds: float) -> dict[str, Any]:
    """Start a server, ask it for so long, end it."""
    from http_load import closed_loop, get, percentiles, run

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    child = subprocess.Popen([sys.executable, __file__, "--serve", mode, "--port", str(port)])
    try:
        for _ in range(600):
            time.sleep(0.1)
            with socket.socket() as look:
                if look.connect_ex(("127.0.0.1", port)) == 0:
                    break
        run(closed_loop(port, itertools.repeat(get("/healthz")), 1, count=1))
        asked = queries(mode)
        run(closed_loop(port, asked, clients, count=500))
        before = processor_seconds(child.pid)
        measured = run(closed_loop(port, asked, clients, seconds=seconds))
        spent = processor_seconds(child.pid) - before
    finally:
        child.terminate()
        child.wait(20)
    if set(measured.statuses) != {200}:
        raise SystemExit(f"{mode}: {dict(measured.statuses)}")
    num = len(measured.latencies_ms)
    figures = percentiles(measured.latencies_ms)
    return {
        "mode": mode, "clients": clients, "requests": num, "cpu_us": round(1e6 * spent / num, 1),
        "requests_per_cpu_second": round(num / spent), "p50_ms": figures["p50"], "p99_ms": figures["p99"],
    }  # fmt: skip


def serve(mode: str, port: int) -> None:
    """The child: a server whose model answers at once."""
    import uvicorn

    from unidec.config import Serve
    from unidec.serving.app import create_app
    from unidec.serving.engine import Service
    from unidec.serving.run import SWITCH_SECONDS, server_options

    settings = Serve(cache_queries=10_000 if mode == "kept" else 0)
    service = Service(settings)
    service.current = _Instant()  # type: ignore[assignment]
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.run(
        _bare if mode == "bare" else create_app(service, settings), port=port,
        **server_options(settings) | {"lifespan": "off" if mode == "bare" else "on"},
    )  # fmt: skip


async def _bare(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    head = [(b"content-type", b"application/json"), (b"content-length", b"600")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"x" * 600})


class _Instant:
    """In place of an engine."""

    runtime, model_json = "none", b'{"sha256":"none","version":null}'

    def __init__(self) -> None:
        from unidec.retrieval.bundle import Prediction
        from unidec.serving.engine import Identity

        scores = [1.4538171291351318 / (i + 1) for i in range(5)]
        self.identity = Identity("none")
        self.answer_of = Prediction([f"L{i}" for i in range(5)], ["the title of a label"] * 5, scores, scores, scores)

    def check(self, request: Any) -> None:
        """Nothing to say."""

    def answer(self, requests: Any) -> list[Any]:
        """The same for each."""
        return [self.answer_of] * len(requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--serve", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.port)
        return
    from measure import machine

    from unidec.data.storage import write_json

    rows = []
    for mode, clients in itertools.product(MODES, CLIENTS):
        row = measure(mode, clients, options.seconds)
        rows.append(row)
        print("  ".join(f"{key} {value:>8}" for key, value in row.items()), flush=True)
    facts = {"machine": machine(), "load": os.getloadavg(), "rows": rows}
    write_json(RESULTS / "serving-overhead.json", facts)
    print(json.dumps({"results": str(RESULTS / "serving-overhead.json")}))


if __name__ == "__main__":
    main()
