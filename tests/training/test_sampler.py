"""The pool of a batch against sets built by loops; batches of queries."""

import itertools
from collections import Counter

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from unidec.model.pool import PoolSampler, num_clusters
from unidec.training.sampler import (
    clustered_batches,
    draws_pools,
    encoded_labels,
    head_labels,
    random_batches,
    weighs_by_propensity,
)


class SamplerCase:
    """A small random data set; some filter pairs are positives, and the shortlist breaks every
    rule.
    """

    def __init__(self, rng, num_queries=40, num_labels=30, density=0.12, shortlist=8):
        positive = rng.random((num_queries, num_labels)) < density
        positive[rng.integers(num_queries)] = False
        filtered = rng.random((num_queries, num_labels)) < 0.1
        self.positive = positive
        self.filtered = filtered
        self.relevance = sp.csr_matrix(
            positive * (rng.random(positive.shape) + 0.1).astype(np.float32)
        )
        self.filter_pairs = sp.csr_matrix(filtered)
        columns = rng.permuted(np.tile(np.arange(num_labels), (num_queries, 1)), axis=1)[
            :, :shortlist
        ]
        self.shortlist = np.where(rng.random(columns.shape) < 0.2, -1, columns).astype(np.int32)

    def sampler(self, **options):
        given = {"beta": 2, "eta": 3, "size": 0, "seed": 7} | options
        return PoolSampler(self.relevance, self.filter_pairs, **given)

    def allowed(self, row):
        """Labels of a row's shortlist that may be its negatives."""
        return {
            label
            for label in self.shortlist[row].tolist()
            if label >= 0 and not self.positive[row, label] and not self.filtered[row, label]
        }


def check_pairs(case, batch):
    """Everything in a batch that follows from its rows and its pool alone."""
    pool = batch.pool_S.tolist()
    assert pool == sorted(set(pool))
    assert all(
        array.dtype == np.int64 for array in (batch.rows_B, batch.pool_S, batch.num_positives_B)
    )
    pairs = list(zip(batch.positive_row_P.tolist(), batch.positive_col_P.tolist(), strict=True))
    expected = [
        (i, s)
        for i, row in enumerate(batch.rows_B)
        for s, label in enumerate(pool)
        if case.positive[row, label]
    ]
    assert pairs == expected
    ignored = list(zip(batch.ignored_row_F.tolist(), batch.ignored_col_F.tolist(), strict=True))
    assert sorted(ignored) == [
        (i, s)
        for i, row in enumerate(batch.rows_B)
        for s, label in enumerate(pool)
        if case.filtered[row, label] and not case.positive[row, label]
    ]
    assert batch.num_positives_B.tolist() == [int(case.positive[row].sum()) for row in batch.rows_B]
    dense = case.relevance.toarray()
    assert batch.relevance_P.dtype == np.float32
    assert batch.sampled_P.dtype == bool
    assert batch.relevance_P.tolist() == [dense[batch.rows_B[i], pool[s]] for i, s in pairs]


def sampled_labels(batch):
    """Sampled positives by batch position."""
    sampled = {i: set() for i in range(len(batch.rows_B))}
    for i, s, chosen in zip(
        batch.positive_row_P, batch.positive_col_P, batch.sampled_P, strict=True
    ):
        if chosen:
            sampled[int(i)].add(int(batch.pool_S[s]))
    return sampled


def test_pairs_of_the_pool_equal_set_intersections(rng):
    case = SamplerCase(rng)
    samplers = [
        case.sampler(),
        case.sampler(size=9),
        case.sampler(size=3),
        case.sampler(eta=0),
        case.sampler(fill=True),
        case.sampler(size=20, fill=True),
    ]
    for step in range(6):
        rows = rng.choice(40, size=rng.integers(1, 15), replace=False)
        for sampler in samplers:
            for up_to in (0, 20, 30):
                drawn = sampler.batch(
                    rows, epoch=0, step=step, shortlist_NH=case.shortlist, up_to=up_to
                )
                check_pairs(case, drawn)


def test_without_a_limit_the_pool_is_sampled_positives_and_hard_negatives(rng):
    case = SamplerCase(rng)
    rows = rng.choice(40, size=12, replace=False)
    batch = case.sampler().batch(rows, epoch=1, step=2, shortlist_NH=case.shortlist)
    sampled = sampled_labels(batch)
    for i, row in enumerate(rows):
        positives = set(np.flatnonzero(case.positive[row]).tolist())
        assert sampled[i] <= positives
        assert len(sampled[i]) == min(2, len(positives))
    from_positives = set().union(*sampled.values())
    hard = set(batch.pool_S.tolist()) - from_positives
    assert hard <= set().union(*(case.allowed(row) for row in rows))
    assert len(batch.pool_S) <= sum(len(s) for s in sampled.values()) + sum(
        min(3, len(case.allowed(r))) for r in rows
    )


def test_hard_negatives_of_one_query(rng):
    """With one query in the batch the pool shows which negatives it drew."""
    case = SamplerCase(rng)
    for row in range(40):
        for eta in (1, 3, 8, 50):
            sampler = case.sampler(eta=eta)
            batch = sampler.batch(
                np.array([row]),
                epoch=0,
                step=0,
                shortlist_NH=case.shortlist,
            )
            hard = set(batch.pool_S.tolist()) - sampled_labels(batch)[0]
            assert hard <= case.allowed(row)
            assert len(hard) == min(eta, len(case.allowed(row)))


def test_no_shortlist_and_an_empty_one(rng):
    case = SamplerCase(rng)
    rows = np.arange(10)
    nothing = np.full((40, 4), -1, dtype=np.int32)
    without = case.sampler().batch(rows, epoch=0, step=0, shortlist_NH=None)
    assert set(without.pool_S.tolist()) == set().union(*sampled_labels(without).values())
    for empty in (nothing, nothing[:, :0]):
        batch = case.sampler().batch(rows, epoch=0, step=0, shortlist_NH=empty)
        assert batch.pool_S.tolist() == without.pool_S.tolist()


def frequency_cut(counts, room):
    """Labels certain to be in, and those that may be, when the `room` most frequent are taken."""
    if len(counts) <= room:
        return set(counts), set(counts)
    if room <= 0:
        return set(), set()
    border = sorted(counts.values(), reverse=True)[room - 1]
    return {k for k, n in counts.items() if n > border}, {
        k for k, n in counts.items() if n >= border
    }


@pytest.mark.parametrize("fill", [False, True])
@pytest.mark.parametrize("size", [1, 4, 8, 12, 16, 20, 24, 28, 100])
def test_size_limit_takes_groups_in_order_and_the_most_frequent_first(size, fill, rng):
    case = SamplerCase(rng)
    rows = rng.choice(40, size=10, replace=False)
    # eta beyond the shortlist: every allowed entry is drawn, so frequencies are known.
    unlimited = case.sampler(eta=8).batch(
        rows,
        epoch=3,
        step=4,
        shortlist_NH=case.shortlist,
    )
    sampled = sampled_labels(unlimited)
    groups = [Counter(label for labels in sampled.values() for label in labels)]
    groups.append(Counter(label for row in rows for label in case.allowed(row)))
    if fill:
        groups.append(Counter(further_positives(case, rows, sampled)))
    limited = case.sampler(eta=8, size=size, fill=fill).batch(
        rows, epoch=3, step=4, shortlist_NH=case.shortlist
    )
    check_pairs(case, limited)
    pool = set(limited.pool_S.tolist())
    earlier = set()
    room = size
    for group in groups:
        new = {label: n for label, n in group.items() if label not in earlier}
        certain, possible = frequency_cut(new, room)
        taken = pool & set(new)
        assert certain <= taken <= possible
        assert len(taken) == min(room, len(new))
        earlier |= set(new)
        room -= len(taken)
    assert pool <= earlier and len(pool) <= size
    # the draws are those of the unlimited batch, as far as they fit
    for i, labels in sampled_labels(limited).items():
        assert labels == sampled[i] & pool


def further_positives(case, rows, sampled):
    """Each query's positives that were not drawn, query after query."""
    left = [
        set(np.flatnonzero(case.positive[row]).tolist()) - sampled[i] for i, row in enumerate(rows)
    ]
    return [label for labels in left for label in labels]


@pytest.mark.parametrize("eta", [0, 3])
@pytest.mark.parametrize("size", [0, 2, 15, 25, 100])
def test_a_filled_pool_is_the_one_without_and_further_positives(size, eta, rng):
    """Nothing else of the batch is drawn differently, and the room is used as far as there are
    positives.
    """
    case = SamplerCase(rng)
    for step in range(5):
        rows = rng.choice(40, size=10, replace=False)
        plain, filled = (
            case.sampler(eta=eta, size=size, fill=fill).batch(
                rows, epoch=1, step=step, shortlist_NH=case.shortlist
            )
            for fill in (False, True)
        )
        check_pairs(case, filled)
        assert sampled_labels(filled) == sampled_labels(plain), (
            "further positives are not marked as sampled"
        )
        before = set(plain.pool_S.tolist())
        after = set(filled.pool_S.tolist())
        unlimited = case.sampler(eta=0).batch(rows, epoch=1, step=step, shortlist_NH=None)
        left = set(further_positives(case, rows, sampled_labels(unlimited))) - before
        assert before <= after and after - before <= left
        assert len(after - before) == (
            len(left) if size == 0 else min(len(left), size - len(before))
        )
        if size == 0:
            assert (
                np.bincount(filled.positive_row_P, minlength=10).tolist()
                == filled.num_positives_B.tolist()
            )


@pytest.mark.parametrize("size", [0, 15])
def test_further_positives_of_each_query_join_a_pool(size, rng):
    """beta_C of the preprint's POS-CLF: nothing else is drawn differently, whatever the limit."""
    case = SamplerCase(rng)
    added = 0
    for step in range(5):
        rows = rng.choice(40, size=10, replace=False)
        sampler = case.sampler(eta=3, size=size)
        drawn = {"epoch": 1, "step": step, "shortlist_NH": case.shortlist}
        plain = sampler.batch(rows, **drawn)
        wider = sampler.batch(rows, **drawn, further=2)
        check_pairs(case, wider)
        if size == 0:
            assert sampled_labels(wider) == sampled_labels(plain)
        before = set(plain.pool_S.tolist())
        after = set(wider.pool_S.tolist())
        unlimited = case.sampler(eta=0).batch(rows, epoch=1, step=step, shortlist_NH=None)
        sampled = sampled_labels(unlimited)
        positives = [set(np.flatnonzero(case.positive[row]).tolist()) for row in rows]
        left = [own - sampled[i] for i, own in enumerate(positives)]
        assert before <= after and after - before <= set().union(*left)
        assert all(len(own & after) >= min(2, len(own)) for own in left)
        every = sampler.batch(rows, **drawn, further=100)
        assert set(every.pool_S.tolist()) == before | set().union(*left)
        added += len(after - before)
    assert added > 0


def test_a_fill_that_finds_nothing_changes_nothing(rng):
    """Every positive is sampled, the limit cuts sampled positives already, or no query has a
    positive.
    """
    case = SamplerCase(rng)
    none = sp.csr_matrix(case.relevance.shape, dtype=np.float32)
    for relevance, options in (
        (case.relevance, {"beta": 30, "size": 25}),
        (case.relevance, {"beta": 2, "size": 1}),
        (none, {"beta": 2, "size": 5}),
        (none, {"beta": 2, "size": 0}),
    ):
        one, other = (
            PoolSampler(relevance, case.filter_pairs, eta=0, seed=1, fill=fill, **options).batch(
                np.arange(40), epoch=0, step=0, shortlist_NH=None
            )
            for fill in (False, True)
        )
        assert as_bytes(one) == as_bytes(other)


def test_full_pool_is_all_labels_and_still_marks_sampled_positives(rng):
    case = SamplerCase(rng)
    batch = case.sampler(beta=1).batch(
        np.arange(12),
        epoch=0,
        step=0,
        up_to=30,
    )
    assert batch.pool_S.tolist() == list(range(30))
    assert (
        np.bincount(batch.positive_row_P, minlength=12).tolist() == batch.num_positives_B.tolist()
    )
    assert all(
        len(labels) == min(1, n)
        for labels, n in zip(sampled_labels(batch).values(), batch.num_positives_B)
    )


@pytest.mark.parametrize("size", [0, 6])
def test_a_pool_is_filled_up_by_labels_drawn_alike(rng, size):
    """Those of the pool are in it, the others as often as their number says, none more often than
    another.
    """
    case = SamplerCase(rng)
    sampler = case.sampler(size=size)
    rows = np.arange(5)
    count = np.zeros(30)
    for step in range(4000):
        given = {"epoch": 0, "step": step, "shortlist_NH": case.shortlist}
        pool = sampler.batch(rows, **given)
        more = sampler.batch(rows, **given, up_to=24)
        assert set(pool.pool_S) <= set(more.pool_S)
        assert (np.diff(more.pool_S) > 0).all()
        assert sampled_labels(pool) == {
            row: own & set(pool.pool_S) for row, own in sampled_labels(more).items()
        }
        if len(pool.pool_S) >= 24:  # full already: nothing is drawn
            assert more.pool_S.tolist() == pool.pool_S.tolist()
            continue
        assert len(pool.pool_S) <= len(more.pool_S) <= 24
        drawn = np.full(30, np.nan)
        drawn[np.setdiff1d(np.arange(30), pool.pool_S)] = 0
        drawn[np.setdiff1d(more.pool_S, pool.pool_S)] = 1
        chance = (24 - len(pool.pool_S)) / 30  # of each label; those of the pool may be drawn too
        count += np.nan_to_num((drawn - chance) / np.sqrt(chance * (1 - chance)))
    assert np.abs(count / np.sqrt(4000)).max() < 4.5


def as_bytes(batch):
    return [array.tobytes() for array in vars(batch).values()]


def test_a_batch_depends_on_seed_epoch_and_step_only(rng):
    case = SamplerCase(rng)
    rows = np.arange(25)

    def draw(sampler, epoch, step):
        return as_bytes(sampler.batch(rows, epoch=epoch, step=step, shortlist_NH=case.shortlist))

    limits = {"size": 25, "fill": True}
    one = case.sampler(**limits)
    other = case.sampler(**limits)
    first = draw(one, 2, 5)
    for epoch, step in (
        (0, 0),
        (2, 6),
        (3, 5),
    ):
        draw(other, epoch, step)
    assert draw(other, 2, 5) == first
    different = [
        draw(one, 2, 6),
        draw(one, 3, 5),
        draw(one, 5, 2),
        draw(case.sampler(**limits, seed=8), 2, 5),
    ]
    assert all(another != first for another in different)
    assert draw(case.sampler(seed=-1), 0, 0) == draw(case.sampler(seed=-1), 0, 0)


def test_sampling_is_uniform():
    """Each of 5 positives is sampled in 2 of 5 draws, each of 4 allowed shortlist entries in 3 of
    4.
    """
    relevance = sp.csr_matrix(np.array([[1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0]], dtype=np.float32))
    filter_pairs = sp.csr_matrix(np.eye(1, 12, 9, dtype=bool))
    shortlist = np.array([[5, 6, 7, 8, 9, 0, -1]], dtype=np.int32)  # 9 is filtered, 0 positive
    sampler = PoolSampler(relevance, filter_pairs, beta=2, eta=3, size=0, seed=3)
    draws = 4000
    seen = Counter()
    for step in range(draws):
        seen.update(
            sampler.batch(np.array([0]), epoch=0, step=step, shortlist_NH=shortlist).pool_S.tolist()
        )
    for labels, share in (
        (range(5), 2 / 5),
        (range(5, 9), 3 / 4),
    ):
        for label in labels:
            assert abs(seen[label] / draws - share) < 5 * np.sqrt(share * (1 - share) / draws)
    assert set(seen) == set(range(9))


def test_ties_at_the_limit_are_broken_at_random():
    """Ten labels, each drawn by one query: with room for three, none of them is always in or always
    out.
    """
    relevance = sp.csr_matrix(np.eye(10, dtype=np.float32))
    sampler = PoolSampler(
        relevance, sp.csr_matrix((10, 10), dtype=bool), beta=1, eta=0, size=3, seed=0
    )
    seen = Counter()
    for step in range(200):
        pool = sampler.batch(np.arange(10), epoch=0, step=step, shortlist_NH=None).pool_S
        assert len(pool) == 3
        seen.update(pool.tolist())
    assert len(seen) == 10
    assert max(seen.values()) < 200


@settings(max_examples=150, deadline=None, database=None)
@given(data=st.data())
def test_a_filtered_pair_is_never_a_negative(data):
    """Property: in no pool is a filter pair of a row drawn as its negative, or left among its
    negatives.
    """
    num_queries = data.draw(st.integers(1, 6))
    num_labels = data.draw(st.integers(1, 8))
    cells = st.lists(
        st.tuples(st.integers(0, num_queries - 1), st.integers(0, num_labels - 1)), max_size=20
    )
    positive, filtered = np.zeros((2, num_queries, num_labels), dtype=bool)
    for cell in data.draw(cells):
        positive[cell] = True
    for cell in data.draw(cells):
        filtered[cell] = True
    width = data.draw(st.integers(0, 5))
    entries = data.draw(
        st.lists(
            st.integers(-1, num_labels - 1),
            min_size=num_queries * width,
            max_size=num_queries * width,
        )
    )
    shortlist = np.array(entries, dtype=np.int32).reshape(num_queries, width)
    sampler = PoolSampler(
        sp.csr_matrix(positive.astype(np.float32)),
        sp.csr_matrix(filtered),
        beta=data.draw(st.integers(1, 3)),
        eta=data.draw(st.integers(0, 4)),
        size=data.draw(st.integers(0, 6)),
        seed=data.draw(st.integers(0, 5)),
        fill=data.draw(st.booleans()),
    )
    rows = np.array(data.draw(st.lists(st.integers(0, num_queries - 1), min_size=1, max_size=6)))
    up_to = data.draw(st.integers(0, 12))
    batch = sampler.batch(rows, epoch=0, step=0, shortlist_NH=shortlist, up_to=up_to)
    negative = np.ones((len(rows), len(batch.pool_S)), dtype=bool)
    negative[batch.positive_row_P, batch.positive_col_P] = False
    negative[batch.ignored_row_F, batch.ignored_col_F] = False
    pool = batch.pool_S
    assert not (negative & filtered[rows][:, pool]).any()
    assert (negative == ~(filtered | positive)[rows][:, pool]).all()
    # whatever a lone query brought in is its positive or a true negative
    if len(rows) == 1 and not up_to:
        assert not (filtered & ~positive)[rows[0], pool].any()
    assert sampler.size == 0 or up_to or len(pool) <= sampler.size


def test_a_batch_with_nothing_to_learn():
    empty = sp.csr_matrix((3, 4), dtype=np.float32)
    batch = PoolSampler(empty, empty, beta=1, eta=2, size=0, seed=0).batch(
        np.arange(3), epoch=0, step=0, shortlist_NH=None
    )
    assert (
        len(batch.pool_S) == 0
        and len(batch.positive_row_P) == 0
        and batch.num_positives_B.tolist() == [0, 0, 0]
    )


@pytest.mark.parametrize(
    ("n", "size"),
    [
        (1, 4),
        (4, 4),
        (5, 4),
        (103, 10),
        (100, 10),
        (7, 1),
        (3, 1000),
    ],
)
def test_random_batches_cover_rows_once_in_even_sizes(n, size):
    rows = np.arange(n) * 3 + 5
    batches = random_batches(rows, size, seed=0, epoch=1)
    sizes = [len(batch) for batch in batches]
    assert sorted(np.concatenate([*batches, []]).tolist()) == rows.tolist()
    assert len(batches) == -(-n // size)
    if sizes:
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= size
        assert min(sizes) > 0


def test_random_batches_change_by_epoch_and_repeat_for_the_same():
    def flat(epoch, seed=0):
        return np.concatenate(
            random_batches(
                np.arange(50),
                8,
                seed=seed,
                epoch=epoch,
            )
        ).tolist()

    assert flat(1) == flat(1)
    assert flat(1) != flat(2) != list(range(50))
    assert flat(1) != flat(1, seed=1)


def test_clustered_batches_are_the_clusters_in_another_order_each_epoch():
    # the second is empty
    order = np.array([5, 3, 9, 1, 7, 2, 8])
    offsets = np.array([0, 2, 2, 5, 6, 7])
    expected = [[5, 3], [9, 1, 7], [2], [8]]
    orders = set()
    for epoch in range(30):
        batches = [batch.tolist() for batch in clustered_batches(order, offsets, 0, epoch, 5)]
        assert sorted(batches) == sorted(expected)
        again = clustered_batches(order, offsets, 0, epoch, 5)
        assert [batch.tolist() for batch in again] == batches
        assert again[0].dtype == np.int64
        orders.add(str(batches))
    assert len(orders) > 10  # of 24


@pytest.mark.parametrize(
    ("num_rows", "size"),
    [
        (0, 3),
        (1, 1),
        (2, 1),
        (43, 12),
        (48, 12),
        (49, 12),
        (1000, 7),
    ],
)
def test_number_of_clusters_is_the_smallest_power_of_two_that_fits(num_rows, size):
    depth = 0
    while -(-num_rows // 2**depth) > size:
        depth += 1
    assert num_clusters(num_rows, size) == 2**depth


@pytest.mark.parametrize(
    ("num_rows", "cluster", "batch"),
    [
        (43, 2, 12),
        (43, 1, 12),
        (97, 5, 20),
        (64, 4, 16),
        (5, 1, 8),
    ],
)
def test_small_clusters_are_dealt_whole_to_batches_of_even_size(num_rows, cluster, batch):
    # sizes differ by one
    offsets = np.linspace(0, num_rows, num_clusters(num_rows, cluster) + 1).astype(np.int64)
    if cluster == 1:
        offsets = np.arange(num_rows + 1)
    order = np.random.default_rng(1).permutation(num_rows)
    of_row = {
        int(row): c for c in range(len(offsets) - 1) for row in order[offsets[c] : offsets[c + 1]]
    }
    count = num_clusters(num_rows, batch)
    together = Counter()
    for epoch in range(12):
        batches = clustered_batches(order, offsets, seed=0, epoch=epoch, num_batches=count)
        again = clustered_batches(order, offsets, seed=0, epoch=epoch, num_batches=count)
        assert [b.tolist() for b in batches] == [b.tolist() for b in again]
        sizes = [len(b) for b in batches]
        assert len(batches) == count
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1
        assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
        held = [{of_row[int(row)] for row in b} for b in batches]
        assert sum(len(h) for h in held) == len(set().union(*held)), "no cluster is torn"
        together.update(frozenset(h) for h in held)
    if count > 1:
        assert len(together) > count, "each epoch draws other batches"


def sequential_chances(weights, beta):
    """Chance of each label to be among `beta` drawn one after the other, by their weights, without
    replacement.
    """
    if beta == 0:
        return np.zeros(len(weights))
    chances = np.zeros(len(weights))
    for first, share in enumerate(weights / weights.sum()):
        if share > 0:
            rest = weights.copy()
            rest[first] = 0
            chances[first] += share
            if rest.sum() > 0:
                chances += share * sequential_chances(rest, beta - 1)
    return chances


@pytest.mark.parametrize("beta", [1, 2, 3])
def test_weighted_positives_are_drawn_in_proportion_to_their_weights(beta):
    relevance = sp.csr_matrix(np.array([[1, 1, 1, 1, 0], [0, 1, 0, 0, 1]], dtype=np.float32))
    weight_L = np.array([1.0, 2.0, 4.0, 9.0, 0.5])
    nothing = sp.csr_matrix(relevance.shape, dtype=bool)
    sampler = PoolSampler(relevance, nothing, beta=beta, eta=0, size=0, seed=5, weight_L=weight_L)
    draws = 4000
    counts = np.zeros((2, 5))
    for step in range(draws):
        for i, labels in sampled_labels(
            sampler.batch(np.arange(2), epoch=0, step=step, shortlist_NH=None)
        ).items():
            assert len(labels) == min(beta, (4, 2)[i])
            counts[i, list(labels)] += 1
    expected = np.array([sequential_chances(weight_L * row, beta) for row in relevance.toarray()])
    # four standard errors
    np.testing.assert_allclose(counts / draws, expected, atol=4 * 0.5 / np.sqrt(draws))
    uniform = PoolSampler(relevance, nothing, beta=beta, eta=0, size=0, seed=5)
    batch = uniform.batch(np.arange(2), epoch=0, step=0, shortlist_NH=None)
    assert [len(labels) for labels in sampled_labels(batch).values()] == [
        min(beta, 4),
        min(beta, 2),
    ]


def test_weights_leave_the_other_draws_as_they_were(rng):
    """Hard negatives come from the same random numbers; a batch depends on seed, epoch and step
    only.
    """
    case = SamplerCase(rng)
    weight_L = rng.random(30) + 0.1
    for step in range(5):
        batches = [
            case.sampler(beta=99, **options).batch(
                np.arange(20), epoch=1, step=step, shortlist_NH=case.shortlist
            )
            for options in ({}, {"weight_L": weight_L}, {"weight_L": weight_L})
        ]
        assert as_bytes(batches[0]) == as_bytes(batches[1])
        assert as_bytes(batches[1]) == as_bytes(batches[2])
        few = [
            case.sampler(beta=1, weight_L=weight_L).batch(
                np.arange(20), epoch=1, step=step, shortlist_NH=None
            )
            for _ in range(2)
        ]
        check_pairs(case, few[0])
        assert as_bytes(few[0]) == as_bytes(few[1])


# -- what a step needs under its parameters
# ----------------------------------------------------------------------------

HEADS = ("both", "de", "clf")
LABELS = ("pool", "all")
OF_CLF = {"pool": "pool", "all": "all", 7: "some"}


@pytest.mark.parametrize(("heads", "de", "clf"), [*itertools.product(HEADS, LABELS, OF_CLF)])
def test_labels_of_the_heads(tiny_params, heads, de, clf):
    params = tiny_params(**{"model.heads": heads, "pool.de_labels": de, "pool.clf_labels": clf})
    seen = head_labels(params.model, params.pool)
    assert seen == (de if heads != "clf" else "none", OF_CLF[clf] if heads != "de" else "none")
    assert draws_pools(params.model, params.pool) == any(
        labels in ("pool", "some") for labels in seen
    )
    assert encoded_labels(params.model, params.pool, rows_hold_text=False) == seen[0]
    if clf == "pool":
        encoded = encoded_labels(params.model, params.pool, rows_hold_text=True)
        assert encoded == ("pool" if heads == "clf" else de)


def test_what_is_weighted(tiny_params):
    for overrides, weighted in (
        ({}, False),
        ({"loss.weights": "propensity"}, True),
        ({"pool.positives": "tail"}, True),
    ):
        params = tiny_params(**overrides)
        assert weighs_by_propensity(params.loss, params.pool) == weighted
