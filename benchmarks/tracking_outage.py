"""What a tracking server that is away costs a training: steps of some milliseconds, the server up, killed, or frozen.

    python -m benchmarks.tracking_outage [--steps 2000] [--json FILE]

A step computes (a product of matrices), then logs 12 figures, as the trainer does; a round ends as a stage does, with a
tracker of its own and two flushes. The server is away from a quarter to three quarters of the steps. Told for
each: seconds in calls of the tracker, what the outage added to them as a share of the training's own seconds, and
whether every figure had arrived, once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.storage import write_json
from unidec.tracking import run as tracking
from unidec.tracking.run import Tracker
from unidec.tracking.store import open_client, prepare_store

FIGURES = 12


class Server:
    """`mlflow server` on SQLite, in a folder."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.uri = folder, port, f"http://127.0.0.1:{port}"
        self.store = prepare_store(f"sqlite:///{folder / 'store' / 'mlflow.db'}")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["server", "--backend-store-uri", self.store, "--artifacts-destination", str(self.folder / "artifacts")]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise SystemExit((self.folder / "server.log").read_text())

    def send(self, number: int) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(20)
        self.process = None


def train(server: Server, run_dir: Path, steps: int, a_round: int, how: str, size: int) -> dict[str, Any]:
    """A training-like loop; `how`: "up", "killed" or "frozen" from a quarter to three quarters of its steps."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(2, size, size)).astype(np.float32)
    told = longest = ours = 0.0
    begin = time.perf_counter()
    os.environ["MLFLOW_TRACKING_URI"] = server.uri
    tracker = Tracker("outage")
    tracker.start(run_dir, {"how": how})
    for first in range(0, steps, a_round):
        for step in range(first, min(first + a_round, steps)):
            at = time.perf_counter()
            if step == steps // 4 and how != "up":
                server.kill() if how == "killed" else server.send(signal.SIGSTOP)
            if step == 3 * steps // 4 and how != "up":
                server.start() if how == "killed" else server.send(signal.SIGCONT)
            ours += time.perf_counter() - at
            left @ right
            at = time.perf_counter()
            tracker.log(step, {f"training/f{i}": float(step + i) for i in range(FIGURES)})
            spent = time.perf_counter() - at
            told, longest = told + spent, max(longest, spent)
        at = time.perf_counter()
        tracker.flush()
        tracker = Tracker.resume(run_dir)
        tracker.log(first, {"memory/gib": 1.0})
        tracker.flush()
        spent = time.perf_counter() - at
        told, longest = told + spent, max(longest, spent)
    seconds = time.perf_counter() - begin - ours
    at = time.perf_counter()
    tracker.finish()
    told_last = time.perf_counter() - at
    return {
        "seconds": seconds,
        "told_seconds": told,
        "longest_call": longest,
        "finish_seconds": told_last,
        "run_id": tracker.run_id,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="a multiple of 4 rounds")
    parser.add_argument("--size", type=int, default=700, help="of the matrices: how long a step takes")
    parser.add_argument("--round", type=int, default=500, help="steps of one")
    parser.add_argument("--port", type=int, default=5077)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/tracking-outage.json"))
    options = parser.parse_args()
    result: dict[str, Any] = {"steps": options.steps, "figures_a_step": FIGURES, "steps_a_round": options.round}
    with tempfile.TemporaryDirectory() as folder:
        server = Server(Path(folder), options.port)
        server.start()
        try:
            for how in ("up", "killed", "frozen"):
                tracking._ask_again.clear()
                measured = train(server, Path(folder) / how, options.steps, options.round, how, options.size)
                client, run_id = open_client(server.uri), measured.pop("run_id")
                arrived = [
                    sorted((p.step, p.value) for p in client.get_metric_history(run_id, f"training/f{i}"))
                    for i in range(FIGURES)
                ]
                whole = [[(s, float(s + i)) for s in range(options.steps)] for i in range(FIGURES)]
                own = measured["seconds"] - measured["told_seconds"]
                more = measured["told_seconds"] - result.get("up", measured)["told_seconds"]
                measured |= {"slower_percent": 100 * more / own, "all_arrived_once": arrived == whole}
                result[how] = measured
                print(how, json.dumps(measured), flush=True)
        finally:
            server.kill()
    write_json(options.json, result)


if __name__ == "__main__":
    main()
