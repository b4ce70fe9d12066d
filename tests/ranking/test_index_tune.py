"""`unidec index tune`: what is measured, and what is chosen."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.tiny_bundle import write_tiny_bundle

from unidec import cli
from unidec.bundle.bundle import Bundle
from unidec.config.index_spec import KINDS, IndexSpec
from unidec.model.search import recall
from unidec.ranking import index_tune
from unidec.ranking.exact_index import ExactIndex
from unidec.ranking.heads import as_heads
from unidec.ranking.index import LabelIndex
from unidec.ranking.index_tune import FACTORIES, default_kinds, search_settings, tune

pytest.importorskip("faiss")


def test_what_is_measured(rng, monkeypatch):
    """Times are made up: a search costs what it looks at."""
    monkeypatch.setattr(index_tune, "_WARM_UP", 0)
    clock = [0.0]
    cost = {"flat": 1.0, "pq": 0.01}

    def search(self: LabelIndex, queries: np.ndarray, k: int):
        clock[0] += cost[self.spec.kind] * (self.spec.rescore if self.spec.kind == "pq" else 1)
        return real(self, queries, k)

    real = LabelIndex.search
    monkeypatch.setattr(LabelIndex, "search", search)
    monkeypatch.setattr(index_tune.time, "perf_counter", lambda: clock[0])
    vectors, queries = (rng.normal(size=(n, 32)).astype(np.float32) for n in (2500, 12))
    measured = tune(as_heads(vectors), queries, 100, ["flat", "pq"])
    chosen = min((one for one in measured if one.recall >= 0.97), key=lambda one: one.p50_ms)
    spec = IndexSpec.parse(chosen.factory, chosen.search)
    assert spec.kind == "pq"
    assert chosen.p50_ms == pytest.approx(10 * spec.rescore)
    best = LabelIndex.build(vectors, spec)
    exact = ExactIndex(as_heads(vectors)).search(queries, 100)[1]
    assert recall(real(best, queries, 100)[1], exact) == chosen.recall
    assert measured[0].factory == "Flat"
    assert measured[0].search == ""
    assert measured[0].recall == 1.0
    assert len(measured) == 1 + 3 * 6


def test_what_suits_the_number_of_labels():
    assert "hnsw" in default_kinds(10_000) and "ivf-pq" in default_kinds(10_000)
    assert "hnsw" not in default_kinds(1_000_000) and "ivf-pq" not in default_kinds(1000)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_go_from_quick_to_thorough(rng, kind):
    spec = IndexSpec(kind=kind, lists=64, links=4)
    index = LabelIndex.build(rng.normal(size=(900, 8)).astype(np.float32), spec)
    found = search_settings(index, 20)
    assert all(found) or kind == "flat"
    specs = [IndexSpec.parse(FACTORIES[kind][0], setting) for setting in found]
    values = [(one.rescore, one.probes, one.search) for one in specs]
    assert values == sorted(set(values))
    assert search_settings(index, 10_000)


@pytest.mark.usefixtures("stub_model")
def test_the_command(rng, tmp_path, monkeypatch, capsys):
    write_tiny_bundle(tmp_path / "bundle", rng)
    before = Bundle.load(tmp_path / "bundle").sha256
    monkeypatch.chdir(tmp_path)
    bundle = Bundle.load("bundle")
    query_BD = bundle.ranker.queries(bundle.encode(["red car", "old house", "a boat"]))
    monkeypatch.setattr(
        "unidec.pipeline.indexing._queries", lambda bundle, num: (query_BD, "3 queries")
    )

    def run(*words: str) -> int:
        monkeypatch.setattr("sys.argv", ["unidec", "index", "tune", "--bundle", "bundle", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    assert run("--kinds", "pq,flat", "--json", "--queries", "9") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chosen"]["recall"] == 1.0
    assert found["queries"] == "3 queries"
    spec = IndexSpec.parse(found["chosen"]["factory"], found["chosen"]["search"])
    assert spec.kind in ("pq", "flat")
    assert (
        min(found["measured"], key=lambda one: one["p50_ms"] if one["recall"] >= 0.98 else 1e9)
        == found["chosen"]
    )
    assert Bundle.load("bundle").sha256 == before
    assert run("--kinds", "flat", "--queries", "5") == 0
    assert 'for params.yaml: index: {factory: "Flat", search: ""}' in capsys.readouterr().out
    assert run("--kinds", "tree") == 2
    assert "unknown kinds of index" in capsys.readouterr().err
    monkeypatch.setattr(index_tune, "recall", lambda *_: 0.5)
    assert run("--kinds", "flat", "--queries", "5") == 1
    assert "no measured kind reaches a recall of 98.00%" in capsys.readouterr().out
