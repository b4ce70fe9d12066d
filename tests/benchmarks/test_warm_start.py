"""The two versions of data that a warm start is measured on, and the recall of new labels."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.sparse import csr_matrix


@pytest.fixture(scope="session")
def warm_start(benchmark_module):
    return benchmark_module("warm_start")


@pytest.fixture(scope="module")
def whole(helper):
    return helper("conftest").make_raw(num_train=600, num_labels=400, seed=2)


@pytest.fixture(scope="module")
def versions(warm_start, whole):
    return warm_start.two_versions(whole, seed=1)


def test_the_versions_share_what_they_should(warm_start, versions):
    old, new = versions
    for kind, share, tolerance in (("queries", warm_start.QUERIES, 0.01), ("labels", warm_start.LABELS, 0.01)):
        ours, theirs = (
            {*(v.labels if kind == "labels" else v.queries["train"])["uid"].to_pylist()} for v in (new, old)
        )
        for one, other in ((ours, theirs), (theirs, ours)):
            assert abs(len(one - other) / len(one) - share) < tolerance, kind
    validation = [{*v.queries["validation"]["uid"].to_pylist()} for v in versions]
    assert len(validation[0] & validation[1]) >= 0.9 * len(validation[0]), "but for queries whose labels are all gone"
    for version, held in zip(versions, validation, strict=True):
        assert not held & {*version.queries["train"]["uid"].to_pylist()}
        assert (np.diff(version.relevance["train"].indptr) > 0).all()
    held = validation[0] | validation[1]
    assert not held & {*old.queries["train"]["uid"].to_pylist(), *new.queries["train"]["uid"].to_pylist()}


def test_pairs_follow_their_labels(versions, whole):
    new = versions[1]
    column = {uid: place for place, uid in enumerate(whole.labels["uid"].to_pylist())}
    row = {uid: place for place, uid in enumerate(whole.queries["train"]["uid"].to_pylist())}
    columns = [column[uid] for uid in new.labels["uid"].to_pylist()]
    rows = [row[uid] for uid in new.queries["train"]["uid"].to_pylist()]
    for ours, theirs in ((new.relevance, whole.relevance), (new.filter_pairs, whole.filter_pairs)):
        assert (ours["train"] != theirs["train"][rows][:, columns]).nnz == 0


@pytest.mark.parametrize("seed", range(3))
def test_recall_of_some_labels(warm_start, seed):
    rng = np.random.default_rng(seed)
    truth = csr_matrix((rng.random((7, 300)) < 0.05).astype(np.float32))
    some = rng.random(300) < 0.3
    top = np.array([rng.permutation(300)[:100] for _ in range(7)])
    expected = {10: [], 100: []}
    for query in range(7):
        wanted = {label for label in range(300) if truth[query, label] and some[label]}
        for k in expected:
            if wanted:
                expected[k].append(len(wanted & {*top[query, :k].tolist()}) / len(wanted))
    found = warm_start.recall_of(top, truth, some)
    for k, shares in expected.items():
        assert found[f"new/R@{k}"] == pytest.approx(100 * np.mean(shares))
    nothing = warm_start.recall_of(top, truth, np.zeros(300, dtype=bool))
    assert nothing == {"new/R@10": 0.0, "new/R@100": 0.0, "new/queries": 0}
