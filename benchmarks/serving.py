"""What `unidec serve` does over HTTP on this machine: latency, throughput, overload and
start.

    # all of it, some six minutes
    python benchmarks/serving.py --bundle outputs/bundle --name minilm
    python benchmarks/serving.py --bundle bag/bundle --name bag \\
        --modes latency,throughput --seconds 2

Starts servers of its own on loopback and ends them; queries are the test split's titles of
`--dataset`, then those with their words in another order, so that none comes twice: a run in which
the server's cache answered is refused. Each mode's function says what it measures;
`results/serving-<name>.json` has every figure, with the machine's load.

Batches and one query at a time are measured in turns within one run."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from http_load import (
    Connection,
    Measured,
    closed_loop,
    get,
    open_loop,
    percentiles,
    post,
    run,
    split_titles,
    unique_texts,
)
from measure import MIB, machine
from served import Served

from unidec.data.storage import write_json

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
ONE_AT_A_TIME = ("serve.batch_queries=1",)
HITS = "unidec_cache_hits_total"
SIZES = "unidec_batch_queries"


class Queries:
    """Requests of texts that none of the servers has seen."""

    def __init__(self, dataset: Path, k: int) -> None:
        self.k = k
        self._texts = unique_texts(split_titles(dataset, "test"))
        self._warm = itertools.cycle(split_titles(dataset, "validation"))

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        return self.of(1)

    def of(self, number: int) -> bytes:
        """A request of several queries."""
        return post(
            "/predict", {"queries": [next(self._texts) for _ in range(number)], "k": self.k}
        )

    def warm(self, served: Served, clients: int, count: int = 600) -> None:
        """Let a server answer queries of the validation split: none of them is measured."""
        run(
            closed_loop(
                served.port,
                (post("/predict", {"queries": [t]}) for t in self._warm),
                clients,
                count=count,
            )
        )


def answering(served: Served) -> dict[str, Any]:
    """What answers, without what it follows: that names a path of this machine."""
    return {name: value for name, value in served.ask("/version").items() if name != "follow"}


def uncached(served: Served, before: dict[str, float]) -> None:
    """Refuse what the cache answered."""
    hits = served.metrics()[HITS] - before[HITS]
    if hits:
        raise SystemExit(
            f"{hits:.0f} answers came from the cache: these figures would say nothing of the model"
        )


def all_well(measured: Measured, what: str) -> None:
    if set(measured.statuses) != {200}:
        shown = [(answer.status, answer.body[:200]) for answer in measured.answers][:3]
        raise SystemExit(f"{what}: {dict(measured.statuses)} {shown}")


# -- the modes
# --------------------------------------------------------------------------------------------------


def measure_start(options: argparse.Namespace, queries: Queries) -> dict[str, Any]:
    """From the process's start until it listens, and until it is ready: with an empty cache folder,
    then twice with what the first left there; and what the server says of itself.
    """
    found = []
    with tempfile.TemporaryDirectory(prefix="unidec-cache-") as cache:
        for turn in ("first", "again", "again"):
            with Served(
                options.bundle, *options.set, environment={"XDG_CACHE_HOME": cache}
            ) as served:
                found.append(
                    {
                        "turn": turn,
                        "listening_s": round(served.listening_seconds, 2),
                        "ready_s": round(served.ready_seconds, 2),
                        "said_s": served.said_seconds(),
                        "load": os.getloadavg()[0],
                        "memory_mib": {
                            name: round(size / MIB) for name, size in served.memory().items()
                        },
                        "version": answering(served),
                    }
                )
            row = found[-1]
            print(
                f"start {turn:6} listening {row['listening_s']:6.2f} s  ready "
                f"{row['ready_s']:6.2f} s  "
                f"itself says {row['said_s']} s  memory {row['memory_mib']['VmRSS']} MiB",
                flush=True,
            )
    return {"starts": found}


def measure_latency(options: argparse.Namespace, queries: Queries) -> dict[str, Any]:
    """One client, one query at a time, unlike any before: at once after each answer, and with
    pauses of 20 ms; the same queries again, which the cache knows; and /healthz, which is all HTTP
    and no model.
    """
    with Served(options.bundle, *options.set) as served:
        queries.warm(served, 1)
        unique = [next(queries) for _ in range(options.count)]
        paused = [next(queries) for _ in range(options.count // 5)]
        before = served.metrics()
        found = {"unique": run(closed_loop(served.port, iter(unique), 1))}
        found["paused"] = run(closed_loop(served.port, iter(paused), 1, pause=0.02))
        uncached(served, before)
        known = unique[-1000:]
        found["cached"] = run(closed_loop(served.port, iter(known), 1))
        hits = served.metrics()[HITS] - before[HITS]
        found["healthz"] = run(
            closed_loop(served.port, itertools.repeat(get("/healthz")), 1, count=options.count // 2)
        )
        for name, measured in found.items():
            all_well(measured, name)
            show(f"latency {name}", measured)
        facts: dict[str, Any] = {name: measured.facts() for name, measured in found.items()}
        return facts | {"cache_hits_of_cached": hits / len(known), "version": answering(served)}


def measure_throughput(options: argparse.Namespace, queries: Queries) -> dict[str, Any]:
    """`--clients` clients without a pause: a server as it is set against one that answers one query
    at a time, both up the whole time, measured in turns (A B, B A, ...); the ratio of each turn,
    and of all together.
    """
    ways = {"batches": (), "one at a time": ONE_AT_A_TIME}
    if options.naive:
        ways["one at a time, torch"] = (*ONE_AT_A_TIME, "serve.runtime=torch")
    servers = {name: Served(options.bundle, *options.set, *more) for name, more in ways.items()}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    with _all(servers.values()):
        for served in servers.values():
            queries.warm(served, options.clients)
        same_answers(servers, [next(queries) for _ in range(30)])
        for turn in range(options.turns):
            for name in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                served = servers[name]
                before = servers[name].metrics()
                cpu = served.cpu_seconds()
                measured = run(
                    closed_loop(served.port, queries, options.clients, seconds=options.seconds)
                )
                cpu = served.cpu_seconds() - cpu
                all_well(measured, name)
                uncached(served, before)
                after = served.metrics()
                sizes = [
                    after[f"{SIZES}_{part}"] - before[f"{SIZES}_{part}"]
                    for part in ("sum", "count")
                ]
                more = {
                    "cpu_ms_a_query": 1000 * cpu / measured.statuses[200],
                    "batch": sizes[0] / max(sizes[1], 1),
                }
                show(
                    f"throughput {name}",
                    measured,
                    "  {cpu_ms_a_query:.2f} ms CPU, batches of {batch:.1f}".format(**more),
                )
                rows[name].append(
                    measured.facts() | {key: round(value, 3) for key, value in more.items()}
                )
    rates = {name: sum(row["rate"] for row in some) / len(some) for name, some in rows.items()}
    ratios = {
        name: {
            "all": rates["batches"] / rates[name],
            "turns": [a["rate"] / b["rate"] for a, b in zip(rows["batches"], some, strict=True)],
        }
        for name, some in rows.items()
        if name != "batches"
    }
    for name, ratio in ratios.items():
        print(
            f"batches {rates['batches']:.0f}/s : {name} {rates[name]:.0f}/s = {ratio['all']:.2f} "
            f"({min(ratio['turns']):.2f} to {max(ratio['turns']):.2f})",
            flush=True,
        )
    return {"clients": options.clients, "rows": rows, "rates": rates, "ratios": ratios}


def measure_open(options: argparse.Namespace, queries: Queries) -> dict[str, Any]:
    """Requests at times that do not wait for answers, at shares of what a closed loop reached in
    the same run.
    """
    found: dict[str, Any] = {}
    with Served(options.bundle, *options.set) as served:
        queries.warm(served, options.clients)
        most = run(closed_loop(served.port, queries, options.clients, seconds=options.seconds)).rate
        for share in (0.3, 0.5, 0.7, 0.85):
            before = served.metrics()
            seconds = 2 * options.seconds
            measured = run(
                open_loop(
                    served.port, queries, share * most, seconds, connections=4 * options.clients
                )
            )
            uncached(served, before)
            show(f"open {share:.0%} of {most:.0f}/s", measured)
            found[f"{share:g}"] = measured.facts()
    return {"closed_rate": most, "shares": found}


def measure_overload(options: argparse.Namespace, queries: Queries) -> dict[str, Any]:
    """More than it can answer: 256 clients with 16 queries each, four times what may wait, who ask
    again at once. Then one client alone: how soon it is answered, and when its median of 20 is at
    most twice that of before.
    """
    with Served(options.bundle, *options.set, "serve.cache_queries=0") as served:
        queries.warm(served, options.clients)
        calm = percentiles(run(closed_loop(served.port, queries, 1, count=300)).latencies_ms)
        large = [queries.of(16) for _ in range(600)]
        memory = served.memory()["VmRSS"]
        measured = run(
            closed_loop(served.port, itertools.cycle(large), 256, seconds=3 * options.seconds)
        )
        ended = time.perf_counter()
        without = sum(
            answer.status == 503 and answer.header("retry-after") is None
            for answer in measured.answers
        )
        first = 0.0
        recovered = None
        latest = []
        while time.perf_counter() < ended + 60 and recovered is None:
            one = run(closed_loop(served.port, queries, 1, count=1))
            if one.statuses[200]:
                first = first or time.perf_counter() - ended
                latest = [*latest[-19:], one.latencies_ms[0]]
                if len(latest) == 20 and sorted(latest)[10] <= 2 * calm["p50"]:
                    recovered = time.perf_counter() - ended
        show("overload", measured)
        facts = measured.facts() | {
            "refused_share": 1 - measured.statuses[200] / max(sum(measured.statuses.values()), 1),
            "queries_a_second": 16 * measured.rate,
            "without_retry_after": without,
            "calm_ms": calm,
            "answered_again_s": first,
            "recovered_s": recovered,
            "connections_lost": measured.statuses[0],
            "memory_mib": [round(memory / MIB), round(served.memory()["VmRSS"] / MIB)],
        }
        print(
            f"overload: {facts['refused_share']:.1%} refused, answered again after "
            f"{first:.2f} s, as before after "
            f"{recovered or float('nan'):.2f} s; {dict(measured.statuses)}",
            flush=True,
        )
        return facts


MEASURES: dict[str, Callable[[argparse.Namespace, Queries], dict[str, Any]]] = {
    "start": measure_start,
    "latency": measure_latency,
    "throughput": measure_throughput,
    "open": measure_open,
    "overload": measure_overload,
}


# -- small things
# --------------------------------------------------------------------------------------------------


def _all(servers: Any) -> Any:
    stack = contextlib.ExitStack()
    for served in servers:
        stack.enter_context(served)
    return stack


def same_answers(servers: dict[str, Served], requests: list[bytes]) -> None:
    """Servers that are compared must answer alike: the same best label, scores up to rounding."""

    async def of(served: Served) -> list[Any]:
        connection = await Connection.open(served.port)
        answers = [
            (await connection.ask(request)).json()["predictions"][0]["labels"]
            for request in requests
        ]
        connection.close()
        return answers

    (name, first), *others = ((name, run(of(served))) for name, served in servers.items())
    for other, labels in others:
        alike = sum(a[0]["uid"] == b[0]["uid"] for a, b in zip(first, labels, strict=True))
        if alike < 0.9 * len(requests):
            raise SystemExit(
                f"{name} and {other} answer {len(requests) - alike} of {len(requests)} "
                "queries otherwise"
            )


def show(name: str, measured: Measured, more: str = "") -> None:
    facts = measured.facts()
    times = facts["latency_ms"]
    shown = "  ".join(
        f"{part} {times.get(part, float('nan')):8.2f}" for part in ("p50", "p90", "p99", "max")
    )
    busy = f"  client {measured.cpu_share:.0%} of a core" if measured.cpu_share > 0.7 else ""
    print(f"{name:34} {measured.rate:8.0f}/s  {shown} ms{more}{busy}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", default="outputs/bundle", help="folder or models:/name@alias")
    parser.add_argument("--name", default="default", help="of the result file")
    parser.add_argument(
        "--modes", default=",".join(MEASURES), help="some of these, with commas between"
    )
    parser.add_argument(
        "--dataset", type=Path, default=Path("data/dataset"), help="whose titles are asked"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="parameters of the server"
    )
    parser.add_argument("--count", type=int, default=2000, help="latency: queries")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="throughput, open, overload: of one measurement"
    )
    parser.add_argument("--turns", type=int, default=4, help="throughput: of each server")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--naive", action="store_true", help="throughput: also torch, one at a time"
    )
    parser.add_argument("--k", type=int, default=5)
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MEASURES):
        parser.error(f"no such mode: {', '.join(sorted(unknown))}")
    path = RESULTS / f"serving-{options.name}.json"
    results = json.loads(path.read_text()) if path.is_file() else {}
    queries = Queries(options.dataset, options.k)
    for mode in modes:
        begun = time.monotonic()
        load = os.getloadavg()[0]
        found = MEASURES[mode](options, queries)
        about = {
            "load_before": load,
            "seconds": round(time.monotonic() - begun, 1),
            "set": options.set,
        }
        results[mode] = about | {"machine": machine()} | found
        write_json(path, results)


if __name__ == "__main__":
    main()
