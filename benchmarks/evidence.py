"""Makes figures of README and of the result pages again, and compares them with what is printed.

`make evidence` takes an hour at most, the shortest commands of `evidence.yaml` first. What does not
fit, needs what is not here or measured another commit is not run: what it once wrote is compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from measure import table

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "evidence.yaml"
BAD = "NOT WITHIN"
HEAD = ("figure", "printed", "found", "verdict", "minutes", "of")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Figures of one line of a page; evidence.yaml explains the fields."""

    page: str
    line: str
    expected: dict[str, float]
    tolerance: float
    minutes: float
    command: str = ""
    commit: str = ""
    needs: str = ""
    reads: Sequence[Any] = ()
    kept: Sequence[Any] = ()
    printed: dict[str, str] = field(default_factory=dict)

    @property
    def runs_here(self) -> bool:
        """Whether its command needs nothing but this repository."""
        return not self.commit and not self.needs

    def shown(self, name: str) -> str:
        """A figure as its page prints it."""
        value = self.expected[name]
        return self.printed.get(name) or (f"{value:,}" if isinstance(value, int) else str(value))


def read_table(path: Path = TABLE) -> dict[str, Evidence]:
    """All entries of the table by name."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: Evidence(**entry) for name, entry in entries.items()}


def figures_at(place: Sequence[Any]) -> dict[str, Any]:
    """The JSON object at a place: a file, then keys or, in lists, what the entry has."""
    found = json.loads((ROOT / place[0]).read_text(encoding="utf-8"))
    for step in place[1:]:
        if isinstance(step, dict):
            found = next(each for each in found if step.items() <= each.items())
        else:
            found = found[step]
    return found


def figure(figures: dict[str, Any], name: str) -> float:
    """One of them; of a mean with its spread, the mean."""
    value = figures[name]
    if isinstance(value, dict):
        value = value["mean"]
    return float(value[0] if isinstance(value, list) else value)


def chosen(entries: Iterable[Evidence], minutes: float) -> list[str]:
    """The commands that can be run here and fit into some minutes, the shortest first."""
    needed = {entry.command: entry.minutes for entry in entries if entry.runs_here}
    commands = []
    for command in sorted(needed, key=lambda each: needed[each]):
        minutes -= needed[command]
        if minutes >= 0:
            commands.append(command)
    return commands


def run(command: str) -> float | None:
    """Run a command with this environment's programs; the minutes it took, None if it failed."""
    begin = time.monotonic()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    print(f"$ {command}", flush=True)
    code = subprocess.call(shlex.split(command), cwd=ROOT, env=os.environ | {"PATH": programs})
    return None if code else (time.monotonic() - begin) / 60


def rows_of(name: str, entry: Evidence, took: float | None) -> list[tuple[Any, ...]]:
    """A row a figure: of the command that was run, or without `took` of the kept file."""
    place = entry.kept if took is None else entry.reads
    figures = figures_at(place) if place and place[0].endswith(".json") else None
    minutes = f"{entry.minutes:g} needed" if took is None else f"{took:.1f}"
    needed = entry.needs or (entry.commit and f"a work tree of {entry.commit}")
    source = f"{entry.command} (needs {needed})" if needed else entry.command
    rows = []
    for key, value in entry.expected.items():
        found = math.nan if figures is None else figure(figures, key)
        verdict = "within" if abs(found - value) <= entry.tolerance else BAD
        if figures is None:
            verdict = f"only in {place[0]}" if place else "not run"
        elif took is None:
            verdict = f"kept: {verdict}"
        got = "" if figures is None else f"{found:.5g}"
        rows.append((f"{name} {key}", entry.shown(key), got, verdict, minutes, source))
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Run what was asked for; 1 if a figure is not within its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--only", action="append", metavar="NAME", help="of the table, repeatable")
    parser.add_argument("--minutes", type=float, default=60.0, help="of all commands together (60)")
    options = parser.parse_args(words)
    entries = read_table()
    if options.only:
        if unknown := set(options.only) - entries.keys():
            parser.error(f"no {', '.join(sorted(unknown))}; known: {', '.join(entries)}")
        entries = {name: entries[name] for name in options.only}
    minutes = math.inf if options.only else options.minutes
    commands = [] if options.list else chosen(entries.values(), minutes)
    took = {command: run(command) for command in commands}
    rows = []
    for name, entry in entries.items():
        rows += rows_of(name, entry, took.get(entry.command) if entry.runs_here else None)
    print(table(HEAD, rows))
    failed = [command for command, minutes in took.items() if minutes is None]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    return int(bool(failed) or any(BAD in row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
