"""Batches: which texts a step encodes, on one rank and on several; label texts as queries (Gandalf, SimCSE)."""

from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from label_targets import soft_targets

from unidec.errors import DataError
from unidec.training.batches import Batches
from unidec.training.distributed import Ranks
from unidec.training.gradient_cache import TextChunks
from unidec.training.sampler import encoded_labels

CPU = torch.device("cpu")


class Recorded:
    """Stands for the input builder: keeps what it was asked for."""

    num_texts, unique_U, encoder = 0, None, SimpleNamespace(bag=None)

    def __call__(self, parts):
        self.parts = parts
        return self


@pytest.fixture
def make(tiny_dataset, tiny_tokens, tiny_params):
    def make(ranks=None, graph=None, **overrides):
        params = tiny_params(**overrides)
        return Batches(params.training, tiny_dataset, tiny_tokens, Recorded(), CPU, ranks or Ranks(), graph)

    return make


def texts(batch, tokens):
    """Token ids of what is encoded, text after text."""
    return [tokens[name].ragged(np.array([row]))[0].tolist() for name, _, rows in batch.texts.parts for row in rows]


def test_a_batch_encodes_its_queries_then_its_pool(make, tiny_tokens):
    batches = make()
    batch = batches.prepare(batches.rows[:9], 0, 0, None)
    expected = [tiny_tokens["queries"].ragged([row])[0].tolist() for row in batches.rows[:9]]
    expected += [tiny_tokens["labels"].ragged([label])[0].tolist() for label in batch.pool.pool_S]
    assert texts(batch, tiny_tokens) == expected
    assert batch.num_own_queries == 9
    assert batch.num_tokens == sum(map(len, expected))
    assert (batch.targets.relevance_P == 1).all()


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("world", [2, 3, 7])
def test_ranks_share_the_texts_of_one_batch(make, tiny_tokens, world, fill):
    """All draw the same pool; together they encode each text once."""
    values = {"pool.eta": 0, "pool.beta": 1, "pool.fill": fill}
    alone = make(**values)
    rows = alone.rows[:10]
    whole = alone.prepare(rows, 1, 2, None)
    parts = [make(Ranks(rank, world), **values).prepare(rows, 1, 2, None) for rank in range(world)]
    assert all(np.array_equal(part.pool.pool_S, whole.pool.pool_S) for part in parts)
    assert (len(whole.pool.positive_row_P) == whole.pool.num_positives_B.sum()) == fill, "all of them are in the pool"
    queries = [text for part in parts for text in texts(part, tiny_tokens)[: part.num_own_queries]]
    labels = [text for part in parts for text in texts(part, tiny_tokens)[part.num_own_queries :]]
    assert queries + labels == texts(whole, tiny_tokens)
    assert {part.num_tokens for part in parts} == {whole.num_tokens}  # all say the speed of the whole


def test_gandalf_trains_on_label_texts_with_soft_targets(make, tiny_dataset, tiny_tokens):
    """Against a dense matrix of queries and labels."""
    train = tiny_dataset.rows("train")
    graph = soft_targets(tiny_dataset.relevance[train], 0.1)
    batches = make(None, graph, **{"pool.gandalf": True})
    num_queries, num_labels = tiny_dataset.num_queries, tiny_dataset.num_labels
    assert batches.rows.tolist() == [*train.tolist(), *range(num_queries, num_queries + num_labels)]
    dense = np.concatenate([(tiny_dataset.relevance.toarray() > 0).astype(np.float32), graph.toarray()])
    rng = np.random.default_rng(0)
    for step in range(5):
        rows = rng.choice(batches.rows, 20, replace=False)
        batch = batches.prepare(rows, 0, step, None)
        ordered = batch.pool.rows_B
        assert sorted(ordered) == sorted(rows)
        queries = ordered[ordered < num_queries]
        assert ordered[: len(queries)].tolist() == queries.tolist(), "queries first"
        expected = [tiny_tokens["queries"].ragged([row])[0].tolist() for row in queries]
        expected += [tiny_tokens["labels"].ragged([row - num_queries])[0].tolist() for row in ordered[len(queries) :]]
        expected += [tiny_tokens["labels"].ragged([label])[0].tolist() for label in batch.pool.pool_S]
        assert texts(batch, tiny_tokens) == expected
        target = np.zeros((len(ordered), len(batch.pool.pool_S)), np.float32)
        t = batch.targets
        target[t.row_P.numpy(), t.col_P.numpy()] = t.relevance_P.numpy()
        assert np.array_equal(target, dense[np.ix_(ordered, batch.pool.pool_S)])
        assert 0 < target[target > 0].min() < 1


@pytest.mark.parametrize("world", [1, 3])
def test_simcse_encodes_each_text_twice_and_it_is_its_own_positive(make, tiny_dataset, tiny_tokens, world):
    overrides = {"model.heads": "de", "pool.simcse": True, "pool.beta": 1, "pool.eta": 0}
    parts = [make(Ranks(rank, world), **overrides) for rank in range(world)]
    train, num_queries = tiny_dataset.rows("train"), tiny_dataset.num_queries
    assert parts[0].rows.tolist() == [*train, *range(num_queries, num_queries + tiny_dataset.num_labels)]
    filtered, rng = tiny_dataset.filter_pairs.toarray(), np.random.default_rng(0)
    seen = 0
    for step in range(5):
        rows = rng.choice(parts[0].rows, 40, replace=False)
        batches = [part.prepare(rows, 0, step, None) for part in parts]
        batch, expected = batches[0], []
        for some in (batch.pool.rows_B, batch.pool.pool_S):
            assert sorted(some) == sorted(rows)
            assert (np.diff(some >= num_queries) >= 0).all(), "queries first"
            ids = [("queries", row) if row < num_queries else ("labels", row - num_queries) for row in some]
            expected.append([tiny_tokens[name].ragged([row])[0].tolist() for name, row in ids])
        found = [(texts(one, tiny_tokens), one.num_own_queries) for one in batches]
        assert [text for all_, own in found for text in all_[:own]] == expected[0]
        assert [text for all_, own in found for text in all_[own:]] == expected[1]
        assert {one.num_texts for one in batches} == {80}
        target = np.zeros((40, 40), bool)
        target[batch.targets.row_P, batch.targets.col_P] = True
        assert np.array_equal(target, batch.pool.rows_B[:, None] == batch.pool.pool_S[None])
        ignored = {(batch.pool.rows_B[row], batch.pool.pool_S[col])
                   for row, col in zip(batch.pool.ignored_row_F, batch.pool.ignored_col_F, strict=True)}  # fmt: skip
        both = [(q, label) for q in rows[rows < num_queries] for label in rows[rows >= num_queries] - num_queries]
        pairs = {(q, num_queries + label) for q, label in both if filtered[q, label]}
        assert ignored == pairs | {(label, q) for q, label in pairs}
        seen += len(ignored)
    assert seen


def test_clusters_take_the_place_of_labels(make, tiny_dataset):
    """Astec's surrogate task, against dense matrices: a cluster is relevant where one of its labels is."""
    batches = make(**{"model.heads": "clf", "pool.eta": 0, "pool.beta": 99})
    cluster_L = np.random.default_rng(0).integers(0, 16, tiny_dataset.num_labels)
    relevant, filtered = (pairs.toarray() > 0 for pairs in (tiny_dataset.relevance, tiny_dataset.filter_pairs))
    expected, ignored = (
        np.stack([pairs[:, cluster_L == c].any(1) for c in range(17)], axis=1) for pairs in (relevant, filtered)
    )
    batches.label_by_cluster(cluster_L, 17)
    assert batches.sampler.num_labels == 17, "one of them empty"
    batch = batches.prepare(batches.rows, 0, 0, None)
    rows, pool = batch.pool.rows_B, batch.pool.pool_S
    found = np.zeros((2, len(rows), len(pool)), bool)
    found[0, batch.clf_targets.row_P, batch.clf_targets.col_P] = True
    found[1, batch.pool.ignored_row_F, batch.pool.ignored_col_F] = True
    assert np.array_equal(found[0], expected[np.ix_(rows, pool)]) and found[0].any(1).any()
    assert np.array_equal(found[1], (ignored & ~expected)[np.ix_(rows, pool)]) and found[1].any()
    assert (batch.pool.relevance_P == 1).all() and 16 not in pool


def test_levels_of_a_label_tree_have_targets_of_their_own(make, tiny_dataset):
    """Against dense matrices; labels and their pool stay as they are."""
    values = {"model.heads": "clf", "pool.eta": 0, "pool.beta": 2}
    batches, plain = make(**values), make(**values)
    cluster_L = np.random.default_rng(0).integers(0, 16, tiny_dataset.num_labels)
    relevant, filtered = (pairs.toarray() > 0 for pairs in (tiny_dataset.relevance, tiny_dataset.filter_pairs))
    batches.add_levels(cluster_L, [2, 4, 16])
    batch, other = (each.prepare(each.rows[:20], 1, 2, None) for each in (batches, plain))
    assert np.array_equal(batch.pool.pool_S, other.pool.pool_S) and other.levels == []
    for count, level in zip([2, 4, 16], batch.levels, strict=True):
        member_LC = (cluster_L * count // 16)[:, None] == np.arange(count)
        positive, ignored = (pairs[batches.rows[:20]] @ member_LC for pairs in (relevant, filtered))
        found = np.zeros((2, 20, count), bool)
        found[0, level.row_P, level.col_P] = True
        found[1, level.ignored_row_F, level.ignored_col_F] = True
        assert np.array_equal(found[0], positive) and np.array_equal(found[1], ignored & ~positive)
        assert (level.relevance_P == 1).all() and level.num_positives_B.tolist() == positive.sum(1).tolist()
    assert ignored.any() and level.sampled_P.any() and not level.sampled_P.all(), "beta of the positives are drawn"


def test_batches_of_an_epoch_from_any_step_on(make):
    """A resumed epoch leaves out what is done; the rest is drawn as it would have been."""
    batches = make()
    cut = np.array_split(batches.rows, 4)
    whole = list(batches.ahead(cut, 3, 0, None))
    rest = list(batches.ahead(cut, 3, 2, None))
    assert len(whole) == 4 and len(rest) == 2
    for one, other in zip(whole[2:], rest, strict=True):
        assert np.array_equal(one.pool.pool_S, other.pool.pool_S)
        assert np.array_equal(one.pool.sampled_P, other.pool.sampled_P)
    assert list(batches.ahead(cut, 3, 4, None)) == []


def test_a_share_of_the_labels_are_queries(make, tiny_dataset, tiny_tokens):
    """Labels whose row of the graph is empty stay labels only."""
    graph = soft_targets(tiny_dataset.relevance[tiny_dataset.rows("train")], 0.1).tolil()
    chosen = [2, 3, 11, 30]
    for label in set(range(tiny_dataset.num_labels)) - set(chosen):
        graph[label] = 0
    graph = sp.csr_matrix(graph)
    graph.eliminate_zeros()
    batches = make(None, graph, **{"pool.gandalf": True})
    num_queries = tiny_dataset.num_queries
    extra = batches.rows[batches.rows >= num_queries] - num_queries
    assert extra.tolist() == chosen
    batch = batches.prepare(batches.rows, 0, 0, None)
    assert set(range(batch.num_own_queries)) == set(batch.targets.row_P.tolist()), "each has a positive"


def test_a_table_on_the_host_is_never_fetched_whole(make, tiny_dataset):
    number = {"pool.clf_labels": 20}  # of twice as many, all
    assert make(**number).clf_labels == "all"
    batches = make(**number, **{"run.table_place": "host"})
    seen = batches.prepare(batches.rows[:2], 1, 2, None).clf_labels
    assert batches.clf_labels == "some" and len(seen) < tiny_dataset.num_labels


ALL, POOL = {"pool.de_labels": "all"}, {"pool.de_labels": "pool"}


@pytest.mark.parametrize(("overrides", "encoded", "clf"), [
    (POOL, "pool", "pool"), (ALL, "all", "pool"), (POOL | {"pool.clf_labels": "all"}, "pool", "all"),
    (ALL | {"pool.clf_labels": "all"}, "all", "all"), (POOL | {"pool.clf_labels": 20}, "pool", "all"),
    (ALL | {"model.heads": "de"}, "all", None),
    (ALL | {"model.heads": "clf"}, None, "pool"), (ALL | {"model.heads": "clf", "pool.clf_labels": "all"}, None, "all"),
    (ALL | {"model.clf_residual": True}, "all", "pool"), (POOL | {"model.clf_residual": True}, "pool", "pool"),
    ({"model.heads": "clf", "model.clf_residual": True}, "pool", "pool"),
], ids=str)  # fmt: skip
def test_which_labels_are_encoded_and_which_classified(make, tiny_dataset, tiny_tokens, overrides, encoded, clf):
    batches = make(**overrides)
    drawn = make().prepare(batches.rows[:9], 1, 2, None).pool.pool_S.tolist()
    labels = {"all": list(range(tiny_dataset.num_labels)), "pool": drawn, None: []}
    assert len(drawn) < tiny_dataset.num_labels
    batch = batches.prepare(batches.rows[:9], 1, 2, None)
    expected = [tiny_tokens["labels"].ragged([label])[0].tolist() for label in labels[encoded]]
    assert texts(batch, tiny_tokens)[9:] == expected
    assert encoded_labels(batches.settings.model, batches.settings.pool) == (encoded or "none")
    seen = [None if clf is None else labels[clf], None if batch.clf_labels is None else batch.clf_labels.tolist()]
    assert seen[1] == (seen[0] if clf == "pool" else None)
    if encoded and batches.settings.model.heads != "clf":
        assert batch.pool.pool_S.tolist() == labels[encoded]
    if overrides.get("model.clf_residual"):
        places = range(len(drawn)) if batch.clf_places is None else batch.clf_places.tolist()
        assert [labels[encoded][place] for place in places] == drawn
    # pairs of either head, against a dense matrix
    relevance = tiny_dataset.relevance[batches.rows[:9]].toarray() > 0
    for which, targets in ((encoded, batch.targets), (clf, batch.clf_targets)):
        if which is not None and not (which == encoded and batches.settings.model.heads == "clf"):
            dense = np.zeros((9, len(labels[which])), dtype=bool)
            dense[targets.row_P.numpy(), targets.col_P.numpy()] = True
            assert np.array_equal(dense, relevance[:, labels[which]])


def test_queries_are_drawn_for_each_label_outside_the_batch(make, tiny_dataset, tiny_tokens):
    """GraphSAGE: training queries that have the label, at most 2, never one of the batch, others in the next step."""
    options = {"model.heads": "clf", "model.clf_residual": True, "model.clf_queries": 2}
    batches, has = make(**options), tiny_dataset.relevance.toarray() > 0
    train, rows, seen = set(batches.rows.tolist()), batches.rows[:9], set()
    assert np.array_equal(batches.related_LN.toarray() > 0, has[batches.rows].T)
    for step in range(3):
        batch = batches.prepare(rows, 0, step, None)
        pool, own = batch.pool.pool_S, 9 + len(batch.pool.pool_S)
        label_E, query_E, weight_E = (part.numpy() for part in batch.related)
        assert (weight_E == 1).all() and set(query_E.tolist()) == set(range(len(texts(batch, tiny_tokens)) - own))
        assert batch.num_texts == own + query_E.max() + 1
        drawn = sorted({row for row in train - set(rows.tolist()) for label in pool if has[row, label]})
        encoded = texts(batch, tiny_tokens)[own:]
        by_text = {}
        for row in drawn:
            by_text.setdefault(tuple(tiny_tokens["queries"].ragged(np.array([row]))[0].tolist()), set()).add(row)
        for place, label in enumerate(pool):
            available = [row for row in drawn if has[row, label]]
            mine = query_E[label_E == place]
            assert len(set(mine.tolist())) == len(mine) == min(2, len(available))
            assert all(by_text[tuple(encoded[query])] & set(available) for query in mine)
        seen.add(tuple(zip(label_E.tolist(), query_E.tolist(), strict=True)))
    assert len(seen) == 3
    again = batches.prepare(rows, 0, 2, None)
    assert all(torch.equal(one, other) for one, other in zip(again.related, batch.related, strict=True))


def test_texts_come_in_chunks_where_gradients_are_cached(make, tiny_tokens):
    batches = make(**{"optim.encode_chunk": 4})
    batch = batches.prepare(batches.rows[:9], 0, 0, None)
    assert isinstance(batch.texts, TextChunks)
    assert batch.texts.num_texts == batch.num_texts == 9 + len(batch.pool.pool_S)
    assert max(len(places) for places, _ in batch.texts.chunks) == 4


def test_importance_is_the_inverse_propensity_of_the_label(make, tiny_dataset):
    """From training queries alone, Gandalf's label texts not counted."""
    train = tiny_dataset.rows("train")
    graph = soft_targets(tiny_dataset.relevance[train], 0.1)
    count = (tiny_dataset.relevance[train].toarray() > 0).sum(0)
    c = (np.log(len(train)) - 1) * (2.0 + 1) ** 0.7
    expected = 1 + c * (count + 2.0) ** -0.7
    assert make().inverse_L is None
    for overrides in ({}, {"pool.gandalf": True}, {"pool.positives": "tail"}):
        given = {"loss.weights": "propensity", "data.propensity_a": 0.7, "data.propensity_b": 2.0} | overrides
        batches = make(None, graph, **given)
        assert np.allclose(batches.inverse_L, expected)
        targets = (batch := batches.prepare(batches.rows[:9], 0, 0, None)).targets
        assert np.allclose(targets.importance_P.numpy(), expected[batch.pool.pool_S[targets.col_P.numpy()]])
    tail = make(**{"pool.positives": "tail"})
    assert tail.inverse_L is not None and tail.prepare(tail.rows[:9], 0, 0, None).targets.importance_P is None


def test_nothing_to_train_on(raw_factory, tiny_tokens, tiny_params, tmp_path):
    from unidec.data.dataset import write_dataset

    raw = raw_factory(4, 2, 3)
    raw.relevance["train"] = sp.csr_matrix(raw.relevance["train"].shape, dtype=np.float32)
    dataset = write_dataset(tmp_path / "dataset", raw, validation_share=0.0)
    with pytest.raises(DataError, match="nothing to train on"):
        Batches(tiny_params(), dataset, tiny_tokens, Recorded(), CPU)
