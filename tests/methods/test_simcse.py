"""SimCSE: each text is encoded twice and is its own only positive, on one rank and on several."""

import numpy as np
import pytest
from helpers.recorded_batches import texts

from unidec.training.distributed import Ranks


@pytest.mark.parametrize("world", [1, 3])
def test_simcse_encodes_each_text_twice_and_it_is_its_own_positive(
    make_batches, tiny_dataset, tiny_tokens, world
):
    overrides = {"model.heads": "de", "pool.simcse": True, "pool.beta": 1, "pool.eta": 0}
    parts = [make_batches(Ranks(rank, world), **overrides) for rank in range(world)]
    train = tiny_dataset.rows("train")
    num_queries = tiny_dataset.num_queries
    assert parts[0].rows.tolist() == [
        *train,
        *range(num_queries, num_queries + tiny_dataset.num_labels),
    ]
    filtered = tiny_dataset.filter_pairs.toarray()
    rng = np.random.default_rng(0)
    seen = 0
    for step in range(5):
        rows = rng.choice(parts[0].rows, 40, replace=False)
        batches = [part.prepare(rows, 0, step, None) for part in parts]
        batch = batches[0]
        expected = []
        for some in (batch.pool.rows_B, batch.pool.pool_S):
            assert sorted(some) == sorted(rows)
            assert (np.diff(some >= num_queries) >= 0).all(), "queries first"
            ids = [
                ("queries", row) if row < num_queries else ("labels", row - num_queries)
                for row in some
            ]
            expected.append([tiny_tokens[name].ragged([row])[0].tolist() for name, row in ids])
        found = [(texts(one, tiny_tokens), one.counts.own_queries) for one in batches]
        assert [text for all_, own in found for text in all_[:own]] == expected[0]
        assert [text for all_, own in found for text in all_[own:]] == expected[1]
        assert {one.counts.texts for one in batches} == {80}
        target = np.zeros((40, 40), bool)
        target[batch.targets.row_P, batch.targets.col_P] = True
        assert np.array_equal(target, batch.pool.rows_B[:, None] == batch.pool.pool_S[None])
        ignored = {
            (batch.pool.rows_B[row], batch.pool.pool_S[col])
            for row, col in zip(batch.pool.ignored_row_F, batch.pool.ignored_col_F, strict=True)
        }
        both = [
            (q, label)
            for q in rows[rows < num_queries]
            for label in rows[rows >= num_queries] - num_queries
        ]
        pairs = {(q, num_queries + label) for q, label in both if filtered[q, label]}
        assert ignored == pairs | {(label, q) for q, label in pairs}
        seen += len(ignored)
    assert seen
