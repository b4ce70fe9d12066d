"""Gandalf: label texts as training queries with soft targets, against dense matrices."""

import numpy as np
import scipy.sparse as sp
from helpers.label_targets import soft_targets
from helpers.recorded_batches import texts


def test_gandalf_trains_on_label_texts_with_soft_targets(make_batches, tiny_dataset, tiny_tokens):
    """Against a dense matrix of queries and labels."""
    train = tiny_dataset.rows("train")
    graph = soft_targets(tiny_dataset.relevance[train], 0.1)
    batches = make_batches(None, graph, **{"pool.gandalf": True})
    num_queries = tiny_dataset.num_queries
    num_labels = tiny_dataset.num_labels
    assert batches.rows.tolist() == [*train.tolist(), *range(num_queries, num_queries + num_labels)]
    dense = np.concatenate(
        [(tiny_dataset.relevance.toarray() > 0).astype(np.float32), graph.toarray()]
    )
    rng = np.random.default_rng(0)
    for step in range(5):
        rows = rng.choice(batches.rows, 20, replace=False)
        batch = batches.prepare(rows, 0, step, None)
        ordered = batch.pool.rows_B
        assert sorted(ordered) == sorted(rows)
        queries = ordered[ordered < num_queries]
        assert ordered[: len(queries)].tolist() == queries.tolist(), "queries first"
        expected = [tiny_tokens["queries"].ragged([row])[0].tolist() for row in queries]
        expected += [
            tiny_tokens["labels"].ragged([row - num_queries])[0].tolist()
            for row in ordered[len(queries) :]
        ]
        expected += [
            tiny_tokens["labels"].ragged([label])[0].tolist() for label in batch.pool.pool_S
        ]
        assert texts(batch, tiny_tokens) == expected
        target = np.zeros((len(ordered), len(batch.pool.pool_S)), np.float32)
        t = batch.targets
        target[t.row_P.numpy(), t.col_P.numpy()] = t.relevance_P.numpy()
        assert np.array_equal(target, dense[np.ix_(ordered, batch.pool.pool_S)])
        assert 0 < target[target > 0].min() < 1


def test_label_texts_alone_and_a_sample_of_both(make_batches, tiny_dataset):
    """Thesis, table 1.2: Z, and U(G, N)."""
    train = tiny_dataset.rows("train")
    num_queries = tiny_dataset.num_queries
    graph = soft_targets(tiny_dataset.relevance[train], 0.1)
    rows = {
        which: make_batches(None, graph, **{"pool.gandalf": True, "pool.gandalf_rows": which}).rows
        for which in ("all", "labels", "sample")
    }
    labels = num_queries + np.arange(tiny_dataset.num_labels)
    assert rows["labels"].tolist() == labels.tolist()
    sample = rows["sample"]
    assert len(sample) == len(train) == len(set(sample.tolist()))
    assert (np.diff(sample) > 0).all() and set(sample) < set(rows["all"])
    assert 0 < (sample >= num_queries).sum() < len(sample)
    again = make_batches(None, graph, **{"pool.gandalf": True, "pool.gandalf_rows": "sample"})
    assert again.rows.tolist() == sample.tolist()
    batch = make_batches(None, graph, **{"pool.gandalf": True, "pool.gandalf_rows": "labels"})
    prepared = batch.prepare(batch.rows[:9], 0, 0, None)
    assert set(prepared.targets.row_P.tolist()) == set(range(9)), "each has a target"


def test_a_share_of_the_labels_are_queries(make_batches, tiny_dataset, tiny_tokens):
    """Labels whose row of the graph is empty stay labels only."""
    graph = soft_targets(tiny_dataset.relevance[tiny_dataset.rows("train")], 0.1).tolil()
    chosen = [2, 3, 11, 30]
    for label in set(range(tiny_dataset.num_labels)) - set(chosen):
        graph[label] = 0
    graph = sp.csr_matrix(graph)
    graph.eliminate_zeros()
    batches = make_batches(None, graph, **{"pool.gandalf": True})
    num_queries = tiny_dataset.num_queries
    extra = batches.rows[batches.rows >= num_queries] - num_queries
    assert extra.tolist() == chosen
    batch = batches.prepare(batches.rows, 0, 0, None)
    assert set(range(batch.counts.own_queries)) == set(batch.targets.row_P.tolist()), (
        "each has a positive"
    )
