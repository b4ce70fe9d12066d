"""GraphSAGE's queries: which are drawn for the labels of a batch."""

import numpy as np
import torch
from helpers.recorded_batches import texts


def test_queries_are_drawn_for_each_label_outside_the_batch(
    make_batches, tiny_dataset, tiny_tokens
):
    """GraphSAGE: training queries that have the label, at most 2, never one of the batch, others in
    the next step.
    """
    options = {"model.heads": "clf", "model.clf_residual": True, "model.clf_queries": 2}
    batches = make_batches(**options)
    has = tiny_dataset.relevance.toarray() > 0
    train = set(batches.rows.tolist())
    rows = batches.rows[:9]
    seen = set()
    expected = has[batches.rows].T
    assert np.array_equal(batches.methods.rows.related.related_LN.toarray() > 0, expected)
    for step in range(3):
        batch = batches.prepare(rows, 0, step, None)
        pool = batch.pool.pool_S
        own = 9 + len(batch.pool.pool_S)
        related = batch.added["rows"].related
        label_E, query_E, weight_E = (
            part.numpy() for part in (related.label_E, related.text_E, related.weight_E)
        )
        assert (weight_E == 1).all()
        assert set(query_E.tolist()) == set(range(len(texts(batch, tiny_tokens)) - own))
        assert batch.counts.texts == own + query_E.max() + 1
        drawn = sorted(
            {row for row in train - set(rows.tolist()) for label in pool if has[row, label]}
        )
        encoded = texts(batch, tiny_tokens)[own:]
        by_text = {}
        for row in drawn:
            by_text.setdefault(
                tuple(tiny_tokens["queries"].ragged(np.array([row]))[0].tolist()), set()
            ).add(row)
        for place, label in enumerate(pool):
            available = [row for row in drawn if has[row, label]]
            mine = query_E[label_E == place]
            assert len(set(mine.tolist())) == len(mine)
            assert len(mine) == min(2, len(available))
            assert all(by_text[tuple(encoded[query])] & set(available) for query in mine)
        seen.add(tuple(zip(label_E.tolist(), query_E.tolist(), strict=True)))
    assert len(seen) == 3
    again = batches.prepare(rows, 0, 2, None)
    other = again.added["rows"].related
    for name in ("label_E", "text_E", "weight_E"):
        assert torch.equal(getattr(other, name), getattr(related, name))
