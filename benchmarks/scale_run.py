"""The whole pipeline at 10^6 or 10^7 labels, and a file of queries predicted: time and memory of
each stage, in one resumable run.

    # everything; the same command resumes
    python benchmarks/scale_run.py runs/scale
    python benchmarks/scale_run.py runs/scale-small --scale 0.01    # a rehearsal at a hundredth
    python benchmarks/scale_run.py runs/scale-7 --scale 10 --predicted 100000 --ranking heads
    python benchmarks/scale_run.py runs/scale --stages train,index         # some stages (again)
    python benchmarks/scale_run.py runs/scale --show                       # the table

Synthetic text (synthetic.py), the program's own commands: raw files -> ingest -> Great Expectations
-> tokens -> propensities -> one epoch -> index -> evaluation of 5,000 test queries -> MLflow's
registry, gate, promotion -> queries to a server -> predictions for a file of queries. A stage that
is in FOLDER/scale_run.json is not run again; one that was stopped in training or predicting resumes
where it was.

Legend: N training queries, L labels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from measure import MIB, machine, status, table
from synthetic import Synthetic, Words, texts

from unidec.data.storage import write_json
from unidec.progress import progress

HERE = Path(__file__).resolve().parent
LABELS = QUERIES = 1_000_000
PREDICTED = 10_000_000
TEST = 5_000
VALIDATION = 2_000
ASKED = 200  # requests to the server
BLOCK = 65_536
PARAMS = """\
recipe: unidec
seed: 0
data: {{path: raw, format: xmc-text, validation_share: {validation_share}}}
validation:  # short random texts
  label_texts_given_twice: warn
  test_texts_in_train: warn
tokens: {{max_length: 16}}
encoder: {{kind: bag}}
model: {{dim: 64, clf_dtype: bf16}}
pool: {{clf_labels: pool, refresh: 1}}
optim:
  {{epochs: 1, warmup_epochs: 0.1, lr_bag: 3.0e-3, lr_heads: 3.0e-3, lr_clf: 3.0e-2,
    clf_state: adagrad}}
index: {{factory: "IVF,PQx4", search: nprobe={nprobe}{index}}}
"""
# what ranks beside both heads, as settings of the index
RANKINGS = {"default": "", "heads": ", knn_weight: 0, fusion: false"}
Facts = dict[str, Any]


def stages(size: Facts) -> dict[str, list[str]]:
    """The command of each stage, run in the work folder; in order."""
    unidec = [sys.executable, "-m", "unidec.cli"]
    own = [sys.executable, str(HERE / "scale_run.py"), ".", "--do"]
    raw = [
        sys.executable,
        str(HERE / "synthetic.py"),
        "raw",
        "raw",
        "--train",
        str(size["queries"]),
    ]
    return {
        "raw": [*raw, "--test", str(size["test"]), "--labels", str(size["labels"])],
        "ingest": [*unidec, "data", "ingest"],
        "validate": [*unidec, "data", "validate"],
        "tokens": [*unidec, "data", "tokens"],
        "propensity": [*unidec, "data", "propensity"],
        "train": [*unidec, "train"],
        "index": [*unidec, "index", "build"],
        "evaluate": [*unidec, "evaluate"],
        "register": [*unidec, "models", "register"],
        "gate": [*unidec, "models", "gate"],
        "promote": [*unidec, "models", "promote"],
        "serve": [*own, "serve"],
        "queries": [*own, "queries"],
        "predict": [*unidec, "predict", "--input", "live.parquet", "--output", "predicted.parquet"],
    }


def size_of(
    scale: float, predicted: int = PREDICTED, ranking: str = "default", nprobe: int = 325
) -> Facts:
    """Counts at a share of the full size; small splits stay large enough to measure on."""
    labels = int(LABELS * scale)
    queries = int(QUERIES * scale)
    return {
        "labels": labels,
        "queries": queries,
        "test": min(TEST, queries // 5),
        "predicted": int(predicted * scale),
        "validation_share": min(0.05, VALIDATION / queries),
        "ranking": ranking,
        "nprobe": nprobe,
    }


def params_of(size: Facts) -> str:
    """The content of params.yaml."""
    return PARAMS.format(**size, index=RANKINGS[size["ranking"]])


def run(work: Path, size: Facts, wanted: list[str] | None) -> None:
    """Run what is not in the results yet, or the stages that are named."""
    results = work / "scale_run.json"
    done: Facts = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else {}
    if done and done["size"] != size:
        raise SystemExit(f"{work} has results of another size: {done['size']}; name another folder")
    # so that `measured` ends the stage's process too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    work.mkdir(parents=True, exist_ok=True)
    (work / "params.yaml").write_text(params_of(size), encoding="utf-8")
    write_json(work / "size.json", size)
    cells: Facts = done.get("cells", {})
    commands = stages(size)
    names = [name for name in commands if (name in wanted if wanted else name not in cells)]
    with progress(total=len(names), desc="scale", unit="stage") as bar:
        for name in names:
            bar.note(name)
            cells[name] = measured(work, name, commands[name])
            write_json(
                results,
                {
                    "machine": machine(),
                    "size": size,
                    "cells": {n: cells[n] for n in commands if n in cells},
                },
            )
            bar.update(1)


def measured(work: Path, name: str, command: list[str]) -> Facts:
    """Run a command; its seconds, the peaks of it and its children together, and what lies on the
    disk after it.
    """
    begin = time.perf_counter()
    before = os.times()
    peaks = {"anonymous": 0, "resident": 0}
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    with open(work / f"{name}.log", "ab") as log:
        process = subprocess.Popen(
            command, cwd=work, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                for kind, now in memory_of(process.pid).items():
                    peaks[kind] = max(peaks[kind], now)
                time.sleep(0.1)
        except BaseException:
            process.terminate()  # saves a checkpoint, and resumes
            process.wait()
            raise
    if process.returncode:
        tail = (work / f"{name}.log").read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(
            f"{name} ended with {process.returncode}; the end of {work / name}.log:\n{tail}"
        )
    after = os.times()
    user = after.children_user - before.children_user
    system = after.children_system - before.children_system
    said = work / f"{name}.json"
    on_disk = sum(
        file.stat().st_size for file in work.rglob("*") if file.is_file() and not file.is_symlink()
    )
    return {
        "seconds": round(time.perf_counter() - begin, 1),
        "processor_seconds": round(user + system, 1),
        "peak_mib": round(peaks["resident"] / MIB),
        "anonymous_mib": round(peaks["anonymous"] / MIB),
        "disk_mib": round(on_disk / MIB),
        **(json.loads(said.read_text(encoding="utf-8")) if said.is_file() else {}),
    }


def memory_of(process: int) -> dict[str, int]:
    """Bytes of a process and all that it started: anonymous, and all that is resident (shared pages
    count twice).
    """
    total = {"anonymous": 0, "resident": 0}
    try:
        family = [
            process,
            *(child.pid for child in psutil.Process(process).children(recursive=True)),
        ]
    except psutil.NoSuchProcess:
        return total
    for one in family:
        try:
            facts = status(one)
        except OSError:  # it has ended
            continue
        total["anonymous"] += facts.get("RssAnon", 0)
        total["resident"] += facts.get("VmRSS", 0)
    return total


# -- stages of this program
# -------------------------------------------------------------------------------------------


def make_queries(size: Facts) -> None:
    """live.parquet: queries that follow the test split's, written block by block."""
    first = size["queries"] + size["test"]
    data = Synthetic(Words(), first + size["predicted"], 0, size["labels"])
    schema = pa.schema({"query": pa.large_string()})
    with pq.ParquetWriter("live.parquet.part", schema, compression="zstd") as writer:
        for start in progress(
            range(first, first + size["predicted"], BLOCK), desc="live queries", unit="block"
        ):
            rows = np.arange(start, min(start + BLOCK, first + size["predicted"]))
            writer.write_table(
                pa.table({"query": texts(data.words, data.query_words(rows))}, schema)
            )
    os.replace("live.parquet.part", "live.parquet")


def serve(size: Facts) -> None:
    """Start a server of the champion, ask it one query after another; serve.json: milliseconds,
    seconds to be ready.
    """
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "unidec.cli",
        "serve",
        "models:/unidec@champion",
        "--port",
        str(port),
    ]
    begin = time.perf_counter()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command)
    try:
        while not _answers(f"{address}/readyz"):
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            time.sleep(0.2)
        ready = time.perf_counter() - begin
        data = Synthetic(Words(), size["queries"], size["test"], size["labels"])
        rows = np.arange(size["queries"], size["queries"] + min(ASKED, size["test"]))
        asked = texts(data.words, data.query_words(rows)).to_pylist()
        milliseconds = [_ask(address, text) for text in asked]
    finally:
        process.terminate()
        process.wait()
    write_json(
        Path("serve.json"),
        {
            "ready_seconds": round(ready, 1),
            "p50_ms": round(statistics.median(milliseconds), 1),
            "p95_ms": round(float(np.quantile(milliseconds, 0.95)), 1),
        },
    )


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _ask(address: str, text: str) -> float:
    body = json.dumps({"queries": [text], "k": 5}).encode()
    request = urllib.request.Request(
        f"{address}/predict", body, {"Content-Type": "application/json"}
    )
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    assert len(found["predictions"][0]["labels"]) == 5, found
    return 1000 * (time.perf_counter() - begin)


OWN: dict[str, Callable[[Facts], None]] = {"queries": make_queries, "serve": serve}


def shown(results: Facts) -> str:
    """The table, as people read it."""
    head = ("stage", "s", "anonymous MiB", "resident MiB", "disk MiB after", "remarks")
    plain = ("seconds", "anonymous_mib", "peak_mib", "disk_mib")
    rows = []
    for name, cell in results["cells"].items():
        remarks = ", ".join(f"{key} {value}" for key, value in cell.items() if key not in plain)
        figures = (f"{cell[key]:,.0f}" for key in plain)
        rows.append((name, *figures, remarks))
    total = sum(cell["seconds"] for cell in results["cells"].values())
    size = ", ".join(f"{key} {value}" for key, value in results["size"].items())
    return f"{size}; {total / 3600:.2f} h in all\n\n{table(head, rows)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="share of 10^6 labels and queries")
    parser.add_argument(
        "--predicted", type=int, default=PREDICTED, help="queries to predict for, at scale 1"
    )
    parser.add_argument(
        "--ranking",
        choices=sorted(RANKINGS),
        default="default",
        help="default: votes, words and the fusion too; heads: both heads alone",
    )
    parser.add_argument("--nprobe", type=int, default=325, help="inverted lists that are searched")
    parser.add_argument(
        "--stages", help="names with commas: only these, also where they are measured already"
    )
    parser.add_argument("--show", action="store_true", help="only the table of what is measured")
    parser.add_argument("--do", choices=sorted(OWN), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.do:
        OWN[options.do](json.loads(Path("size.json").read_text(encoding="utf-8")))
        return
    if not options.show:
        run(
            options.folder,
            size_of(options.scale, options.predicted, options.ranking, options.nprobe),
            options.stages.split(",") if options.stages else None,
        )
    print(shown(json.loads((options.folder / "scale_run.json").read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
