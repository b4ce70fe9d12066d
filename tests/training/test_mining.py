"""Hard-negative mining against a loop over queries."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from unidec.errors import DataError
from unidec.model import search
from unidec.model.row_table import zeros_on_disk
from unidec.training import mining
from unidec.training.mining import mine_hard_negatives


class MiningCase:
    """A data set of 30 rows and 20 labels, of which some rows are mined."""

    def __init__(self, rng, mined=22):
        self.rows = rng.choice(30, size=mined, replace=False)
        self.query = rng.normal(size=(mined, 5)).astype(np.float32)
        self.label = rng.normal(size=(20, 5)).astype(np.float32)
        self.positive = rng.random((30, 20)) < 0.15
        self.filtered = rng.random((30, 20)) < 0.15
        self.positive[self.rows[0]] = False
        self.positive[self.rows[1]] = True  # nothing left to mine
        # three at most are left
        self.positive[self.rows[2], 3:] = True
        self.filtered[self.rows[2], 3:] = False

    def mine(self, num_negatives, **options):
        return mine_hard_negatives(
            self.query,
            self.rows,
            self.label,
            (sp.csr_matrix(self.positive.astype(np.float32)), sp.csr_matrix(self.filtered)),
            num_negatives,
            **options,
        )

    def ranked(self, n):
        """Labels of mined query n, best first."""
        return sorted(
            range(20), key=lambda j: -float(self.query[n].astype(np.float64) @ self.label[j])
        )


@pytest.mark.parametrize("block", [1, 5, 512])
@pytest.mark.parametrize("num_negatives", [1, 4, 20, 33])
def test_equals_a_loop(num_negatives, block, rng, monkeypatch):
    monkeypatch.setattr(mining, "BLOCK", block)
    case = MiningCase(rng)
    shortlist, report = case.mine(num_negatives)
    assert shortlist.dtype == np.int32
    assert shortlist.shape == (30, num_negatives)
    expected = np.full((30, num_negatives), -1)
    scores = []
    for n, row in enumerate(case.rows):
        best = [
            j for j in case.ranked(n) if not case.positive[row, j] and not case.filtered[row, j]
        ][:num_negatives]
        expected[row, : len(best)] = best
        scores += [float(case.query[n] @ case.label[j]) for j in best]
    assert np.array_equal(shortlist, expected)
    assert report["queries"] == 22
    negative_score = report["negative_score"]
    assert negative_score == pytest.approx(np.mean(scores), rel=1e-5)
    assert report["seconds"] > 0


@pytest.mark.parametrize("tile", [1, 3, 7, 19, 20])
def test_tiles_of_labels_change_nothing(tile, rng, monkeypatch):
    """Also where scores are equal, within a tile and across."""
    case = MiningCase(rng)
    case.label[:, :] = rng.integers(-1, 2, case.label.shape)
    case.query[:, :] = rng.integers(-1, 2, case.query.shape)
    case.label[[5, 14, 19]] = case.label[2]
    whole = case.mine(6)
    monkeypatch.setattr(search, "LABELS_AT_ONCE", tile)
    tiled = case.mine(6)
    np.testing.assert_array_equal(tiled[0], whole[0])
    del whole[1]["seconds"], tiled[1]["seconds"]
    assert tiled[1] == whole[1]


def test_in_bfloat16_nearly_the_same_labels_are_found(rng):
    case = MiningCase(rng, mined=30)
    case.rows = rng.choice(60, size=30, replace=False)
    case.query, case.label = (rng.normal(size=(n, 32)).astype(np.float32) for n in (30, 3000))
    case.positive, case.filtered = (rng.random((60, 3000)) < 0.01 for _ in range(2))
    whole, _ = case.mine(20)
    with torch.autocast("cpu", torch.bfloat16):
        half, _ = case.mine(20)
    same = [
        len(set(ours) & set(theirs)) / 20
        for ours, theirs in zip(half[case.rows], whole[case.rows], strict=True)
    ]
    assert np.mean(same) > 0.9
    assert not np.array_equal(half, whole)
    assert not (case.positive | case.filtered)[case.rows[:, None], half[case.rows]].any()


def test_no_queries(rng):
    case = MiningCase(rng)
    case.rows = case.rows[:0]
    case.query = case.query[:0]
    shortlist, report = case.mine(3)
    assert (shortlist == -1).all()
    assert report["queries"] == 0


def test_vectors_that_are_not_finite_are_refused(rng):
    case = MiningCase(rng)
    case.query[5, 1] = np.nan
    with pytest.raises(DataError, match="not finite"):
        case.mine(2)


def test_all_lists_searched_equal_the_exact_search(rng, monkeypatch):
    """Twenty labels make one list; with several lists all are searched here."""
    case = MiningCase(rng)
    exact, report = case.mine(6)
    for rows_a_list in (40, 5):
        monkeypatch.setattr(mining, "_ROWS_A_LIST", rows_a_list)
        monkeypatch.setattr(mining, "_LISTS_A_PROBE", 1)
        found, approximate = case.mine(6, mining="faiss")
        np.testing.assert_array_equal(found, exact)
        assert approximate.pop("recall") == 1.0 and "recall" not in report
        assert {**approximate, "seconds": 0} == pytest.approx({**report, "seconds": 0})


@pytest.mark.parametrize("most_exact", [19, 20])
def test_auto_is_exact_up_to_a_number_of_labels(most_exact, rng, monkeypatch, capsys):
    """The run's figures and its progress say which search was chosen."""
    monkeypatch.setattr("unidec.progress.QUIET_SECONDS", 0.0)
    monkeypatch.setattr(mining, "MOST_EXACT", most_exact)
    case = MiningCase(rng)
    expected, _ = case.mine(6)
    found, report = case.mine(6, mining="auto")
    is_exact = most_exact == 20
    np.testing.assert_array_equal(found, expected)
    assert report["exact"] == is_exact
    assert ("recall" in report) == (not is_exact)
    assert f"mine hard negatives ({'exact' if is_exact else 'faiss'})" in capsys.readouterr().err


def test_auto_is_exact_where_a_gpu_holds_the_labels():
    assert mining.uses_faiss("auto", 10**6, fits_gpu=False)
    assert not mining.uses_faiss("auto", 10**6, fits_gpu=True)
    assert not mining.uses_faiss("auto", 50_000, fits_gpu=False)
    assert mining.uses_faiss("faiss", 10, fits_gpu=True)
    assert not mining.uses_faiss("exact", 10**9, fits_gpu=False)


def test_the_recall_of_an_approximate_search_is_reported(rng):
    num_rows = 60
    num_labels = 3000
    wanted = 10
    case = MiningCase(rng, mined=30)
    case.rows = rng.choice(num_rows, size=30, replace=False)
    case.query, case.label = (rng.normal(size=(n, 8)).astype(np.float32) for n in (30, num_labels))
    case.positive, case.filtered = (rng.random((num_rows, num_labels)) < 0.01 for _ in range(2))
    exact, _ = case.mine(wanted)
    found, report = case.mine(wanted, mining="faiss")
    hits = [len(set(found[row]) & set(exact[row])) for row in case.rows]
    expected = sum(hits) / (30 * wanted)
    assert report["recall"] == pytest.approx(expected)
    assert 0.2 < report["recall"] <= 1
    for row in case.rows:
        assert not (case.positive | case.filtered)[row, found[row]].any()
        assert len(set(found[row])) == wanted


@pytest.mark.parametrize("kind", ["exact", "faiss"])
def test_vectors_in_half_precision_on_disk_are_mined_as_their_values(
    kind, rng, monkeypatch, tmp_path
):
    monkeypatch.setattr(mining, "_LISTS_A_PROBE", 1)
    monkeypatch.setattr(mining, "_ADDED", 7)
    case = MiningCase(rng)
    query = zeros_on_disk(tmp_path, case.query.shape, torch.float16).numpy()
    label = zeros_on_disk(tmp_path, case.label.shape, torch.float16).numpy()
    query[:] = case.query
    label[:] = case.label
    case.query = query.astype(np.float32)
    case.label = label.astype(np.float32)
    expected, report = case.mine(6)
    case.query = query
    case.label = label
    found, of_halves = case.mine(6, mining=kind)
    np.testing.assert_array_equal(found, expected)
    assert of_halves.pop("recall", 1.0) == 1.0
    assert {**of_halves, "seconds": 0} == pytest.approx({**report, "seconds": 0}, rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("labels", ["one", "same", "zero", "fewer than lists"])
def test_degenerate_labels_are_mined_by_lists(labels, dtype, rng, monkeypatch):
    monkeypatch.setattr(mining, "_ROWS_A_LIST", 10)
    num_labels = {"one": 1, "fewer than lists": 3}.get(labels, 200)
    case = MiningCase(rng)
    case.label = rng.normal(size=(num_labels, 5))
    if labels != "fewer than lists":
        case.label[:] = 0 if labels == "zero" else case.label[0]
    case.label = case.label.astype(dtype)
    case.query = case.query.astype(dtype)
    case.positive = case.filtered = np.zeros((30, num_labels), bool)
    found, report = case.mine(4, mining="faiss")
    # identical labels share one list, so the lists searched may be empty: the recall shows it
    num_found = 0
    for row in case.rows:
        labels = found[row][found[row] >= 0].tolist()
        assert len(labels) == len(set(labels))
        num_found += len(labels)
    most = len(case.rows) * min(4, num_labels)
    assert report["recall"] == pytest.approx(num_found / most)
