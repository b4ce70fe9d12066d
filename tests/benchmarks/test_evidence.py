"""Every figure of README, and one of each result page, is in benchmarks/evidence.yaml with a
command that exists, and is printed as it was measured.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
NEWEST = "outputs/metrics.json"  # of the newest run of the pipeline, not of the printed one

# A figure is a number in README's text, outside of blocks, `code` and the addresses of links; not
# the k of a metric, and none of these: versions, a setting, exit codes.
NOT_FIGURES = (
    r"Python 3\.11 to 3\.14",
    r"until 2\.0\.0",
    r"Apache-2\.0",
    r"hold out 5%",
    r"Exit codes: [^.]*\.",
)
NUMBER = re.compile(r"(?<![\w.@-])\d[\d,]*(?:\.\d+)?")


@pytest.fixture(scope="module")
def evidence(benchmark_module):
    return benchmark_module("evidence")


@pytest.fixture(scope="module")
def entries(evidence):
    return evidence.read_table()


def numbers_by_line(text: str) -> Counter[tuple[int, str]]:
    """(Number of the line, figure) of each figure of README."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    for pattern in (r"(?s)```.*?```", r"`[^`\n]*`", r"\]\([^)]*\)", *NOT_FIGURES):
        text = re.sub(pattern, blank, text)
    found: Counter[tuple[int, str]] = Counter()
    for number, line in enumerate(text.split("\n")):
        for figure in NUMBER.findall(line):
            found[number, figure] += 1
    return found


def lines_of(page: str) -> list[str]:
    return (ROOT / page).read_text(encoding="utf-8").split("\n")


def line_of(entry) -> int:
    """Number of the only line of its page that an entry's figures are in."""
    has_it = [entry.line in line for line in lines_of(entry.page)]
    assert sum(has_it) == 1, entry.line
    return has_it.index(True)


def test_every_figure_of_readme_is_in_the_table(entries):
    found = numbers_by_line(README)
    listed: Counter[tuple[int, str]] = Counter()
    for entry in entries.values():
        if entry.page == "README.md":
            for name in entry.expected:
                numbers = NUMBER.findall(entry.shown(name))
                listed.update((line_of(entry), number) for number in numbers)
    assert found.total() > 40
    assert found - listed == Counter()
    assert listed - found == Counter()


def test_every_result_page_has_a_figure_and_prints_it(entries):
    found = (ROOT / "benchmarks/results").glob("*.md")
    pages = {path.relative_to(ROOT).as_posix() for path in found}
    listed = {entry.page for entry in entries.values()}
    assert pages | {"README.md"} == listed
    for name, entry in entries.items():
        line = lines_of(entry.page)[line_of(entry)]
        for figure in entry.expected:
            shown = re.escape(entry.shown(figure))
            as_printed = rf"(?<![\d.]){shown}(?![\d]|\.\d)"
            assert re.search(as_printed, line), f"{name}: {figure}"


def test_printed_figures_are_the_kept_ones(evidence, entries):
    compared = 0
    for name, entry in entries.items():
        if not entry.kept:
            continue
        file = entry.kept[0]
        if file.endswith(".md"):
            page = (ROOT / file).read_text(encoding="utf-8")
            for figure in entry.expected:
                assert entry.shown(figure) in page, name
            continue
        figures = evidence.figures_at(entry.kept)
        for figure, value in entry.expected.items():
            kept = evidence.figure(figures, figure)
            digits = len(str(value).partition(".")[2])
            off = 0.51 * 10**-digits  # half of the last digit that is printed
            if file == NEWEST or figure in entry.printed:
                off = entry.tolerance
            assert abs(kept - value) <= off, f"{name}: {figure}"
            compared += 1
    assert compared > 60


def test_each_command_exists(entries):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, entry in entries.items():
        words = shlex.split(entry.command)
        if not words:
            assert entry.needs, name
        elif entry.commit:
            file = "Makefile" if words[0] == "make" else words[1]
            assert is_in_commit(entry.commit, file), name
        elif words[0] == "python":
            source = (ROOT / words[1]).read_text(encoding="utf-8")
            for word in words[2:]:
                assert not word.startswith("--") or f'"{word}"' in source, name
        elif words[0] == "make":
            assert f"\n{words[1]}: " in makefile, name


def is_in_commit(commit: str, file: str) -> bool:
    """Whether a commit has a file; True where the commit is not there: a shallow clone, no git."""
    for name in (commit, f"{commit}:{file}"):
        asked = subprocess.run(["git", "cat-file", "-e", name], cwd=ROOT, check=False)
        if asked.returncode:
            return name == commit
    return True


def test_comparisons_have_the_cells_that_are_read(entries):
    """tests/comparison/test_plan.py reads the files themselves."""
    read = 0
    for name, entry in entries.items():
        words = shlex.split(entry.command)
        if words[:1] != ["unidec"]:
            continue
        _, command, file, option, only = words
        assert command == "compare", name
        assert option == "--only", name
        comparison = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
        folder = comparison["name"]
        assert entry.reads[0] == f"runs/compare/{folder}/results.json"
        data, _, cell = only.rpartition("/")
        assert cell in comparison["cells"], name
        assert data in ("", *comparison["data"]), name
        part, wanted = entry.reads[1:3]
        if part == "cells":
            assert wanted["cell"] == cell, name
            assert wanted.get("data", "") == data, name
        else:
            assert wanted == data, name
        read += 1
    assert read > 10


def test_an_hour_has_the_shortest_and_each_command_once(evidence, entries):
    commands = evidence.chosen(entries.values(), 60)
    assert len(set(commands)) == len(commands)
    minutes = {}
    for entry in entries.values():
        if entry.runs_here:
            minutes[entry.command] = entry.minutes
    taken = sum(minutes[command] for command in commands)
    left_out = minutes.keys() - set(commands)
    shortest = min(minutes[command] for command in left_out)
    assert taken <= 60 < taken + shortest
    assert entries["baselines-titles"].command in commands
    assert not entries["gpu"].runs_here
    assert not entries["time-to-quality"].runs_here
    assert evidence.chosen(entries.values(), 0.5) == []


def test_what_is_run_is_compared_and_what_is_not_is_kept(evidence, tmp_path, monkeypatch, capsys):
    """A command that writes its figures: one within, one not."""
    monkeypatch.setattr(evidence, "ROOT", tmp_path)
    new = '{"m": [{"k": 1, "x": [51.0, null]}]}'
    code = f"import pathlib; pathlib.Path('new.json').write_text({new!r})"
    (tmp_path / "made.py").write_text(code)
    (tmp_path / "old.json").write_text('{"x": {"mean": 49.9}}')
    head = "page: p.md\n  line: l\n  minutes: 1\n"
    command = "  command: python made.py\n  reads: [new.json, m, {k: 1}]\n  kept: [old.json]\n"
    near = f"near:\n  {head}{command}  expected: {{x: 50.5}}\n  tolerance: 0.6\n"
    far = f"far:\n  {head}{command}  expected: {{x: 50.5}}\n  tolerance: 0.4\n"
    card = f"card:\n  {head}{command}  expected: {{x: 50}}\n  tolerance: 1\n  needs: gpu\n"
    (tmp_path / "evidence.yaml").write_text(near + far + card)
    table = evidence.read_table(tmp_path / "evidence.yaml")
    monkeypatch.setattr(evidence, "read_table", lambda: table)
    assert evidence.main([]) == 1
    said = capsys.readouterr().out
    verdicts = {}
    for line in said.splitlines():
        name, *rest = line.strip("| ").split(" | ")
        verdicts[name] = rest[2:3]
    assert verdicts["near x"] == ["within"]
    assert verdicts["far x"] == ["NOT WITHIN"]
    assert verdicts["card x"] == ["kept: within"]
    assert evidence.main(["--only", "near"]) == 0
    (tmp_path / "new.json").unlink()
    assert evidence.main(["--list", "--only", "card"]) == 0
    assert not (tmp_path / "new.json").exists()
    (tmp_path / "made.py").write_text("raise SystemExit(5)")
    assert evidence.main(["--only", "near"]) == 1
    assert "failed: python made.py" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        evidence.main(["--only", "nothing"])
