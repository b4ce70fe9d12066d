"""Figures of comparisons that are kept in git are those of the pages that cite them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "comparison" / "results"
COLUMNS = ("P@1", "nDCG@5", "PSP@5", "R@100")
DATA = ("lf-debian titles", "lf-debian long", "lf-wordnet long")


def test_the_table_of_fair_is_that_of_the_kept_figures() -> None:
    found = json.loads((KEPT / "fair.json").read_text())
    figures = {(cell["data"], cell["cell"]): cell["metrics"] for cell in found["cells"]}
    page = (ROOT / "benchmarks/results/compare-fair.md").read_text()
    table = page[page.index("| system |") :].partition("\n\n")[0].splitlines()[1:]
    checked = 0
    for line in table:
        name, *shown = [entry.strip(" *") for entry in line.strip("|").split("|")]
        for place, data in enumerate(DATA):
            for metric, text in zip(COLUMNS, shown[4 * place : 4 * place + 4], strict=True):
                if text:
                    mean, _ = figures[data, name.replace("-style", "")][metric]
                    assert float(text.split(" ± ")[0]) == pytest.approx(mean, abs=0.051), (
                        name,
                        data,
                        metric,
                    )
                    checked += 1
    assert checked == 4 * len(found["cells"])


def test_kept_figures_are_small_and_say_what_made_them() -> None:
    files = sorted(KEPT.glob("*.json"))
    assert files
    assert sum(file.stat().st_size for file in files) < 2e6
    for file in files:
        found = json.loads(file.read_text())
        assert (ROOT / found["lineage"]["command"].split()[-1]).is_file()
        assert found["lineage"]["commit"] and found["tests"]
        assert any(cell["curve"] for cell in found["cells"])
