"""Baselines of every report: bounded, on the same queries as the model, and put into
one sentence.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers.html_page import Page
from scipy.sparse import csr_matrix

from unidec.data.dataset import write_dataset
from unidec.data.propensity import frequency_group, inverse_propensity, label_counts
from unidec.data.raw import text_table
from unidec.evaluation import baselines as module
from unidec.evaluation.baselines import (
    compare_with_baselines,
    measure_baselines,
    verdict,
    warnings,
)
from unidec.evaluation.metrics import evaluate, filtered_truth
from unidec.evaluation.report import ReportInput, render
from unidec.metric_names import BASELINES, shown

COMPARED = [name for name in shown("compared") if "/" not in name]


@pytest.fixture(scope="module")
def case(slice_dataset):
    """A data set with the weights of its labels, and the truth of its test split."""
    counts = label_counts(slice_dataset.relevance, slice_dataset.rows("train"))
    rows = slice_dataset.rows("test")
    truth = filtered_truth(slice_dataset.relevance[rows], slice_dataset.filter_pairs[rows])
    inverse = inverse_propensity(counts, len(slice_dataset.rows("train")), 0.55, 1.5)
    return slice_dataset, truth, inverse, frequency_group(counts), counts


def perfect_answers(truth) -> np.ndarray:
    found = np.full((truth.shape[0], 100), -1, dtype=np.int64)
    for i in range(len(found)):
        true = truth.indices[truth.indptr[i] : truth.indptr[i + 1]][:100]
        found[i, : len(true)] = true
    return found


def test_they_are_measured_by_the_metric_code_of_the_model(case):
    dataset, truth, inverse, groups, _ = case
    measured = measure_baselines(dataset, "title", inverse, groups)
    assert (
        set(measured.labels) == set(BASELINES)
        and "measured on 500 of 500 test queries." in measured.about
    )
    np.testing.assert_array_equal(measured.places, np.arange(500))
    filters = dataset.filter_pairs[dataset.rows("test")].toarray().astype(bool)
    for name, labels in measured.labels.items():
        assert labels.shape == (500, 100)
        assert measured.metrics[name] == evaluate(labels, truth, inverse, groups)
        hit = labels >= 0
        assert not filters[np.nonzero(hit)[0], labels[hit]].any(), "filtered pairs are removed"
    assert measured.metrics["mix"]["R@100"] > measured.metrics["knn"]["R@100"] > 10


def test_large_data_is_sampled_and_says_so(case, monkeypatch):
    dataset, truth, inverse, groups, _ = case
    monkeypatch.setattr(module, "MAX_TRAIN", 300)
    monkeypatch.setattr(module, "MAX_SCORES", 1)
    monkeypatch.setattr(module, "MIN_TEST", 40)
    measured = measure_baselines(dataset, "title", inverse, groups)
    assert len(measured.places) == 40
    assert len(measured.labels["knn"]) == 40
    assert (np.diff(measured.places) > 0).all()
    assert "300 of 2,000 queries of the train and validation splits" in measured.about
    assert "40 of 500 test queries" in measured.about
    found = compare_with_baselines(perfect_answers(truth), truth, measured, inverse, groups)
    assert {one.num_queries for one in found} == {40}
    whole = evaluate(
        perfect_answers(truth)[measured.places], truth[measured.places], inverse, groups
    )
    assert found[0].value == pytest.approx(whole["P@1"])


def test_the_sentence_names_gains_losses_and_what_is_open(case):
    dataset, truth, inverse, groups, _ = case
    measured = measure_baselines(dataset, "title", inverse, groups)

    def judged(labels):
        found = compare_with_baselines(labels, truth, measured, inverse, groups)
        metrics = [one.metric for one in found[: len(COMPARED)]]
        assert metrics == list(COMPARED)
        return found, verdict(found)

    found, words = judged(perfect_answers(truth))
    assert all(one.better for one in found)
    assert {one.metric for one in found} >= {
        "tail/R@10",
        "torso/R@10",
    }
    assert (
        "on 500 test queries, the model gains P@1 +" in words
        and "loses nothing significant" in words
    )
    for one in found[: len(COMPARED)]:
        expected = max(m[one.metric] for m in measured.metrics.values())
        assert one.against_value == pytest.approx(expected)
    found, words = judged(np.full((500, 100), -1, dtype=np.int64))
    assert "gains nothing" in words and "loses P@1 -" in words and "R@10 of tail labels -" in words
    _, words = judged(measured.labels["mix"])
    assert (
        "gains nothing" in words
        and "loses nothing" in words
        and "no significant difference: P@1 +0.0" in words
    )
    assert verdict([]) == ""


def test_recall_at_all_labels_is_not_compared(raw_factory, tmp_path):
    few = write_dataset(tmp_path / "few", raw_factory(num_labels=10), validation_share=0)
    counts = label_counts(few.relevance, few.rows("train"))
    rows = few.rows("test")
    truth = filtered_truth(few.relevance[rows], few.filter_pairs[rows])
    ones = np.ones(10)
    measured = measure_baselines(few, "title", ones, frequency_group(counts))
    found = compare_with_baselines(
        perfect_answers(truth), truth, measured, ones, frequency_group(counts)
    )
    assert [one.metric for one in found] == ["P@1", "P@5", "nDCG@5", "PSP@5"]


def test_a_split_without_queries_or_words_has_no_baselines(case, raw_factory, tmp_path):
    _, _, inverse, groups, _ = case
    for raw in (raw_factory(num_test=0), _wordless(raw_factory())):
        dataset = write_dataset(tmp_path / "none", raw, validation_share=0)
        measured = measure_baselines(dataset, "title", inverse, groups)
        assert measured.about.startswith("No TF-IDF baselines: ") and not measured.labels
        assert (
            compare_with_baselines(np.zeros((0, 100), dtype=int), None, measured, inverse, groups)
            == []
        )


def _wordless(raw):
    for name, table in raw.queries.items():
        raw.queries[name] = text_table(table["uid"].to_pylist(), ["!"] * table.num_rows)
    return raw


def test_warnings_name_what_makes_figures_worthless(case, raw_factory, tmp_path):
    dataset = case[0]
    assert warnings({"P@1": 50.0, "R@100": 99.9}, dataset, "title") == []
    one = raw_factory(num_test=0, num_labels=40)
    one.relevance["train"] = csr_matrix(
        (np.ones(5), (range(5), [7] * 5)), one.relevance["train"].shape, np.float32
    )
    only = write_dataset(tmp_path / "only", one, validation_share=0)
    assert "Only one label has training queries" in warnings({}, only, "title")[0]
    (warning,) = warnings({"P@1": 100.0, "R@100": 70.0, "MRR": 100.0}, dataset, "title")
    assert warning.startswith("P@1: 100.0.")
    raw = raw_factory(num_test=12, num_labels=40)
    raw.queries["test"] = raw.queries["train"].slice(0, 12)
    small = write_dataset(tmp_path / "leak", raw, validation_share=0)
    leak, few = warnings({"P@1": 50.0, "R@100": 100.0, "R@10": 100.0}, small, "title")
    assert leak.startswith("12 of 12 test queries (100.0%) have the same text as a training query")
    assert few == "R@100, R@10: 100.0 because the data set has only 40 labels."
    _, few, surprising = warnings({"R@10": 100.0, "R@5": 100.0}, small, "title")
    assert few.startswith("R@10: 100.0 because") and surprising.startswith("R@5: 100.0. Real data")


def test_sentence_and_warnings_are_on_top_of_the_page():
    page = render(
        ReportInput(
            title="data", metrics={"both": {"P@1": 50.0}}, verdict="better <b>", warnings=["leak &"]
        )
    )
    words = Page(page).words
    assert words.index("better <b>") < words.index("Warning. leak &") < words.index("Metrics")
    assert "Against the TF-IDF baselines" not in words
