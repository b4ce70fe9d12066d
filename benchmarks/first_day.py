"""How long a new user waits: the first model on small data, the same again, one prediction, the
list of commands.

    python benchmarks/first_day.py --installer uv --output benchmarks/results/first-day.json

Whole processes in a clean clone of this repository (what is not committed is left out) with an
environment of its own, once as it is and once where Python may not write bytecode
(PYTHONDONTWRITEBYTECODE=1, as in many containers, from the installation on). The data: 600 queries
of lf-debian and its 182 most frequent labels, as tables."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUM_QUERIES = 600
NUM_LABELS = 182
MODES = {"bytecode written": {}, "PYTHONDONTWRITEBYTECODE=1": {"PYTHONDONTWRITEBYTECODE": "1"}}
TURNS = 3  # of the short commands; the best counts
TARGET_S = {
    "make train": 60.0,
    "make train, unchanged": 10.0,
    "unidec predict": 3.0,
    "unidec --help": 0.4,
}


def write_data(folder: Path) -> None:
    """queries.csv, labels.csv and pairs.csv."""
    source = ROOT / "data" / "raw" / "lf-debian"
    with gzip.open(source / "trn.json.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    with gzip.open(source / "lbl.json.gz", "rt", encoding="utf-8") as file:
        labels = [json.loads(line) for line in file]
    frequent = dict(
        Counter(label for row in rows for label in row["target_ind"]).most_common(NUM_LABELS)
    )
    chosen = [row for row in rows if frequent.keys() & set(row["target_ind"])][:NUM_QUERIES]
    folder.mkdir(parents=True)
    tables = {
        "queries": [["id", "text"], *([row["uid"], row["title"]] for row in chosen)],
        "labels": [["id", "text"], *([f"l{label}", labels[label]["title"]] for label in frequent)],
        "pairs": [
            ["query_id", "label_id"],
            *(
                [row["uid"], f"l{label}"]
                for row in chosen
                for label in row["target_ind"]
                if label in frequent
            ),
        ],
    }
    for name, lines in tables.items():
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)


def clone(folder: Path) -> None:
    """A committed project on its own data, nothing installed."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    write_data(folder / "data" / "raw" / "mine")
    params = folder / "params.yaml"
    params.write_text(
        re.sub(r"(?m)^  path: .*", "  path: data/raw/mine", params.read_text(encoding="utf-8"))
    )
    identity = ["-c", "user.name=first day", "-c", "user.email=first.day@example.org"]
    subprocess.run(["git", "-C", str(folder), "add", "--all"], check=True)
    subprocess.run(
        ["git", "-C", str(folder), *identity, "commit", "--quiet", "--message", "Own data"],
        check=True,
    )


def timed(words: list[str], folder: Path, env: dict[str, str], turns: int = 1) -> dict[str, float]:
    """Seconds of a command, by the clock and of processors (its children's too); the best of some
    turns.
    """
    found = []
    for _ in range(turns):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        done = subprocess.run(
            words, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        wall = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            raise SystemExit(
                f"{' '.join(words)} ended with {done.returncode}:\n"
                f"{(done.stdout + done.stderr)[-4000:]}"
            )
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found.append({"wall_s": round(wall, 2), "processor_s": round(processor, 2)})
    return min(found, key=lambda one: one["wall_s"])


def measure(folder: Path, extra: dict[str, str], installer: str) -> dict[str, dict[str, float]]:
    """One clone, from nothing installed."""
    own = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PREFECT_", "MLFLOW_", "PYTHON"))
    }
    env = own | extra
    clone(folder)
    unidec = str(folder / ".venv" / "bin" / "unidec")
    return {
        "make setup": timed(["make", "setup", f"INSTALLER={installer}"], folder, env),
        "make train": timed(["make", "train"], folder, env),
        "make train, unchanged": timed(["make", "train"], folder, env),
        "unidec predict": timed([unidec, "predict", "editor for plain text"], folder, env, TURNS),
        "unidec --help": timed([unidec, "--help"], folder, env, TURNS),
    }


def show(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """A table in Markdown: seconds by the clock, of processors in brackets."""
    lines = ["| | " + " | ".join(results) + " | target |", "|---" * (len(results) + 2) + "|"]
    for command in next(iter(results.values())):
        cells = [
            f"{found[command]['wall_s']:.1f} s ({found[command]['processor_s']:.1f})"
            for found in results.values()
        ]
        target = f"{TARGET_S[command]:g} s" if command in TARGET_S else ""
        lines.append(f"| `{command}` | " + " | ".join([*cells, target]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--installer", choices=["pip", "uv"], default="pip")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the figures as JSON")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    for mode, extra in MODES.items():
        with tempfile.TemporaryDirectory(prefix="unidec-first-day-") as folder:
            results[mode] = measure(Path(folder) / "project", extra, options.installer)
        print(f"{mode}: {json.dumps(results[mode])}", file=sys.stderr)
    print(show(results))
    print(
        f"\n{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}"
    )
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
