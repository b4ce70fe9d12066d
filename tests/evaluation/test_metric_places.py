"""A metric is added in two files, `Scope` and `PLACES`, and is then shown everywhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.html_page import Page
from scipy.sparse import csr_matrix

from unidec import metric_names as names
from unidec.comparison import results
from unidec.config import Gate
from unidec.evaluation.comparison_page import Cell, ComparisonInput, Run, render_comparison
from unidec.evaluation.metrics import Scope, evaluate
from unidec.evaluation.page import render
from unidec.evaluation.report import ReportInput
from unidec.evaluation.report import render as render_report
from unidec.pipeline.evaluation import figures_table, split_figures
from unidec.tracking import lineage, promotion, store

MADE = "Made@5"


def measured() -> dict[str, float]:
    """All metrics of thirty queries; each has one label, of each group."""
    truth = csr_matrix(np.eye(30, dtype=np.float32))
    predicted = np.tile(np.arange(20), (30, 1))
    return evaluate(predicted, truth, np.ones(30), np.arange(30) % 3)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """All metrics, when a made-up one is added as a real one would be: in `Scope` and in
    `PLACES`.
    """
    parts = Scope.parts
    places = " ".join(names.PLACES.values()).split()
    monkeypatch.setitem(names.PLACES, MADE, " ".join(dict.fromkeys(places)))
    monkeypatch.setattr(
        Scope, "parts", lambda scope, kind, k: parts(scope, "P" if kind == "Made" else kind, k)
    )
    return measured()


def test_a_new_metric_is_measured_and_may_be_asked_for(made: dict[str, float]) -> None:
    assert made[MADE] == made["P@5"] > 0
    assert made[f"tail/{MADE}"] == made["tail/P@5"] > 0
    assert names.headline(made)[MADE] == made[MADE]  # metrics.json, validation, bundles
    assert Gate(metric=MADE, guarded=[f"tail/{MADE}"]).metric == MADE


def test_a_new_metric_is_shown_on_the_pages(made: dict[str, float], undrawn: None) -> None:
    history = [{"round": 1, "train_seconds": 60.0, "work_seconds": 60.0, "validation": made}]
    report = ReportInput(metrics={"both": made}, rounds=history)
    page = Page(render_report(report))
    assert MADE in page.words
    assert f"{MADE} within each group" in page.words
    assert MADE in page.row("system")
    assert f"{MADE} within" in page.row("system, group")
    validation = next(row for row in page.rows if row[0] == "minutes of training and refreshes")
    assert MADE in validation

    cell = Cell("data", "one", runs=[Run(0, made, validation=made, curve=history)])
    words = render_comparison(ComparisonInput(cells=[cell]))
    found = Page(words)
    assert MADE in found.row("system", "seeds")
    assert f"{MADE} tail" in found.words
    captions = re.findall(r"<figcaption>([^<]*)", words)
    wanted = [
        f"{MADE}, test split",
        f"tail/{MADE}, test split",
        f"{MADE}, validation split",
    ]
    assert set(wanted) <= set(captions)

    compared = {
        "metric": "nDCG@5",
        "difference": 0.0,
        "confidence": 1.0,
        "num_queries": 30,
        "better": 0,
        "worse": 0,
        "intervals": {},
    }
    gate = {
        "model": "m",
        "passed": True,
        "at": "now",
        "reasons": [],
        "challenger": {"version": "2"},
        "champion": {"version": "1"},
        "data": {"name": "data", "sha256": "ab"},
        "settings": {"metric": "nDCG@5", "guarded": []},
        "metrics": {"challenger": made, "champion": made},
        "comparison": compared,
    }
    assert Page(render("gate", verdict=gate)).row(MADE)[1] == f"{made[MADE]:.2f}"


def test_a_new_metric_is_in_mlflow(made: dict[str, float]) -> None:
    figures = split_figures({"test": made, "de": made, "index": {}})
    assert {
        f"test/{MADE}",
        f"test/head/{MADE}",
        f"de/{MADE}",
    } <= figures.keys()
    assert MADE in figures_table(made)
    assert "metrics.`test/Made_at_5`" in store._view_state()["selectedColumns"]
    listed = SimpleNamespace(
        version="1",
        aliases=[],
        metrics=made,
        dataset={"name": "d", "sha256": None},
        start={"kind": "cold"},
        code={"commit": None, "dirty": False},
        gate={},
        rolled_back={},
        registered="",
    )
    assert lineage.rows_of([listed])[0][MADE] == f"{made[MADE]:.2f}"
    tags: dict[str, str] = {}
    client = SimpleNamespace(set_model_version_tag=lambda *given: tags.update([given[2:]]))
    version = SimpleNamespace(name="m", version=2, tags={})
    verdict: dict[str, Any] = {
        "reasons": [],
        "champion": None,
        "at": "now",
        "data": {"sha256": "ab"},
        "passed": True,
        "metrics": {"challenger": made},
    }
    promotion.record_verdict(client, version, verdict, "settings")  # type: ignore[arg-type]
    assert json.loads(tags["gate.metrics"])[MADE] == pytest.approx(made[MADE], abs=1e-4)


def test_a_new_metric_is_in_the_terminal_and_in_dvcs_figures(
    made: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.decide import summary

    assert MADE in summary({"metrics": made, "steps": []}).splitlines()[0]
    cells = [Cell("data", "one", runs=[Run(0, made)])]
    monkeypatch.setattr(results, "_cells", lambda *given: cells)
    monkeypatch.setattr(results, "gather", lambda comparison: {})
    text = results.table(SimpleNamespace(jobs={}))  # type: ignore[arg-type]
    heads, row = (line.split("\t") for line in text.splitlines())
    assert row[heads.index(MADE)] == f"{made[MADE]:.1f}"
    result = {"metrics": made, "costs": {}}
    step = SimpleNamespace(name="data/one/0", result=lambda: result)
    results.write_metrics(tmp_path / "figures.json", step)  # type: ignore[arg-type]
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["Made_at_5"] == pytest.approx(made[MADE], abs=1e-3)
