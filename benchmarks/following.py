"""A server that follows an alias while it is asked without a pause: how long a version takes, what requests notice.

    python benchmarks/following.py --bundle outputs/bundle --swaps 4       some two minutes

Two versions in a registry of its own (SQLite, in a temporary folder): the bundle, and the same under another hash, so
that answers stay what they are and only the swap is seen. Prints a table, writes benchmarks/results/following.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from measure import machine
from served import HOST, Served

from unidec.bundle.bundle_folder import KIND, VERSION
from unidec.data.storage import folder_sha256, read_manifest, write_manifest
from unidec.tracking.store import open_client

NAME, FOLLOW = "following", 0.5
PATIENCE = 300.0
RESULTS = Path(__file__).parent / "results" / "following.json"


class Load:
    """One client after the other's answer: (when it was sent, milliseconds, status) of every request."""

    def __init__(self, port: int, texts: list[str], clients: int) -> None:
        self._port, self._texts, self.seen = port, texts, list[tuple[float, float, int]]()
        self.stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join(PATIENCE)

    def _run(self, number: int) -> None:
        connection, count = http.client.HTTPConnection(HOST, self._port, timeout=60), 0
        while not self.stop.is_set():
            count += 1
            text = f"{self._texts[(count * 31 + number * 7) % len(self._texts)]} {number} {count}"  # no cache knows it
            begun = time.monotonic()
            try:
                body = json.dumps({"queries": [text]})
                connection.request("POST", "/predict", body, {"content-type": "application/json"})
                answer = connection.getresponse()
                status = answer.status
                answer.read()
            except (OSError, http.client.HTTPException):
                status = 0
                connection.close()
            self.seen.append((begun, 1000 * (time.monotonic() - begun), status))

    def between(self, spans: list[tuple[float, float]], inside: bool) -> list[float]:
        """Milliseconds of the requests sent within (or outside) some spans of time, in order of size."""
        return sorted(ms for at, ms, _ in self.seen if any(a <= at <= b for a, b in spans) == inside)


def two_versions(bundle: Path, root: Path) -> str:
    """A registry of the bundle and of its copy under another hash; its address."""
    uri = f"sqlite:///{root / 'store' / 'mlflow.db'}"
    client = open_client(uri)
    client.create_registered_model(NAME)
    for number in (1, 2):
        stored = root / f"stored-{number}" / "artifacts" / "bundle"
        shutil.copytree(bundle, stored)
        if number == 2:
            manifest = read_manifest(stored, KIND, VERSION)
            info = json.loads((stored / "bundle.json").read_text())
            (stored / "bundle.json").write_text(json.dumps(info | {"card": info["card"] | {"copy": "2"}}))
            write_manifest(stored, manifest["kind"], manifest["version"], manifest["meta"])
        tags = {"bundle.sha256": folder_sha256(stored)}
        client.create_model_version(NAME, source=stored.parents[1].as_uri(), tags=tags)
    client.set_registered_model_alias(NAME, "champion", "1")
    return uri


def measure(bundle: Path, swaps: int, clients: int) -> dict[str, Any]:
    """Loads (`keep_previous` off) and ways back (on), under load."""
    texts = ["an editor for plain text", "a library of numerical routines", "fonts for a terminal", "mail server"]
    facts: dict[str, Any] = {"bundle": bundle.name, "clients": clients, "machine": machine()}
    with tempfile.TemporaryDirectory(prefix="unidec-following-") as folder:
        root = Path(folder)
        uri = two_versions(bundle.resolve(), root)
        client = open_client(uri)
        for kept in (False, True):
            (root / f"project-{kept}").mkdir()
            client.set_registered_model_alias(NAME, "champion", "1")
            settings = (f"serve.follow_seconds={FOLLOW}", f"serve.keep_previous={str(kept).lower()}")
            with Served(
                f"models:/{NAME}@champion", *settings, environment={"MLFLOW_TRACKING_URI": uri},
                folder=root / f"project-{kept}",
            ) as server:  # fmt: skip
                load = Load(server.port, texts, clients)
                time.sleep(5)
                spans, memory = [], [server.memory()]
                if kept:  # the first is a load, and not what is measured here
                    move(client, server, "2")
                for turn in range(swaps):
                    spans.append(move(client, server, "12"[turn % 2] if kept else "21"[turn % 2]))
                    time.sleep(5)
                    memory.append(server.memory())
                load.end()
                facts["back" if kept else "load"] = summary(server, load, spans, memory)
    return facts


def move(client: Any, server: Served, version: str) -> tuple[float, float]:
    """When the alias was moved, and when the version that it names answered."""
    begun = time.monotonic()
    client.set_registered_model_alias(NAME, "champion", version)
    while server.ask("/version")["model"]["version"] != version:
        if time.monotonic() > begun + PATIENCE:
            raise RuntimeError(f"no swap:\n{server.log[-2000:]}")
        time.sleep(0.02)
    return begun, time.monotonic()


def summary(server: Served, load: Load, spans: list[tuple[float, float]], memory: list[dict[str, int]]) -> dict:
    """Of one server's swaps."""

    def of(values: list[float]) -> dict[str, float]:
        at = (0.5, 0.99, 1.0)
        return {f"p{100 * q:g}_ms": round(values[int(q * (len(values) - 1))], 2) for q in at} if values else {}

    return {
        "ready_seconds": round(server.ready_seconds, 2),
        "swap_seconds": [round(b - a, 2) for a, b in spans],
        "requests": len(load.seen),
        "failed": sum(status != 200 for _, _, status in load.seen),
        "at_rest": of(load.between(spans, inside=False)),
        "in_swaps": of(load.between(spans, inside=True)),
        "anonymous_megabytes": [round(one["RssAnon"] / 1e6) for one in memory],
        "peak_megabytes": round(memory[-1]["VmHWM"] / 1e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, default=Path("outputs/bundle"))
    parser.add_argument("--swaps", type=int, default=4, help="of each kind")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    facts = measure(given.bundle, given.swaps, given.clients)
    for kind, words in (("load", "a new version"), ("back", "back to the one before")):
        one = facts[kind]
        print(f"{words}: {one['swap_seconds']} s from the alias to the answer; {one['requests']} requests, "
              f"{one['failed']} failed")  # fmt: skip
        print(f"  at rest {one['at_rest']}; while it swaps {one['in_swaps']}")
        print(f"  memory {one['anonymous_megabytes']} MB of its own, peak {one['peak_megabytes']} MB resident")
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
