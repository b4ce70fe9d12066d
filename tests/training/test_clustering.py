"""Balanced clusters: sizes, the split rule against a loop over clusters, determinism, degenerate
points.
"""

import numpy as np
import pytest

from unidec.errors import DataError
from unidec.training import clustering
from unidec.training.clustering import balanced_clusters


def unit(rng, num_points, dim=8):
    vectors = rng.normal(size=(num_points, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def members(clusters):
    return [
        clusters.order_N[a:b].tolist()
        for a, b in zip(clusters.offsets[:-1], clusters.offsets[1:], strict=True)
    ]


def check_partition(clusters, num_points, max_size):
    assert clusters.order_N.dtype == clusters.offsets.dtype == np.int64
    assert sorted(clusters.order_N.tolist()) == list(range(num_points))
    sizes = np.diff(clusters.offsets)
    assert clusters.offsets[0] == 0
    assert clusters.offsets[-1] == num_points
    assert sizes.max(initial=0) <= max_size
    assert sizes.max() - sizes.min() <= 1
    depth = int(np.log2(len(sizes)))
    assert len(sizes) == 2**depth
    assert depth == 0 or -(-num_points // 2 ** (depth - 1)) > max_size  # no deeper than needed


@pytest.mark.parametrize(
    ("num_points", "max_size"),
    [
        (1, 1),
        (1, 9),
        (2, 1),
        (3, 1),
        (3, 2),
        (5, 2),
        (7, 3),
        (16, 4),
        (17, 4),
        (99, 99),
        (99, 98),
        (101, 7),
        (999, 33),
    ],
)
def test_sizes_differ_by_at_most_one(num_points, max_size, rng):
    check_partition(
        balanced_clusters(unit(rng, num_points), max_size, seed=0), num_points, max_size
    )


def test_no_points():
    clusters = balanced_clusters(np.zeros((0, 4), np.float32), 3, seed=0)
    assert clusters.order_N.tolist() == []
    assert clusters.offsets.tolist() == [0, 0]


def loop_split(points, draw, tolerance, max_iterations):
    """One cluster split by the rule, in float64: positions of both halves and the mean cosine
    reached.
    """
    n = len(points)
    first = int(draw[0] * n)
    second = (first + 1 + int(draw[1] * max(n - 1, 0))) % n
    centre_a = points[first]
    centre_b = points[second]
    best = list(range(n))
    best_objective = -np.inf
    for _ in range(max_iterations):
        difference = [float(x @ centre_a) - float(x @ centre_b) for x in points]
        order = sorted(range(n), key=lambda j: -difference[j])
        half = (n + 1) // 2
        sum_a = points[order[:half]].sum(0)
        sum_b = points[order[half:]].sum(0)
        objective = (np.linalg.norm(sum_a) + np.linalg.norm(sum_b)) / n
        gain = objective - best_objective
        if gain > 0:
            best = order
            best_objective = objective
        if gain < tolerance:
            break
        centre_a = sum_a / np.linalg.norm(sum_a)
        centre_b = sum_b / max(np.linalg.norm(sum_b), 1e-30)
    half = (n + 1) // 2
    return best[:half], best[half:], best_objective


def loop_clusters(vectors, max_size, seed, tolerance=1e-4, max_iterations=100):
    """All levels, one cluster after the other."""
    clusters = [np.arange(len(vectors))]
    level = 0
    objectives = []
    while -(-len(vectors) // len(clusters)) > max_size:
        draws = np.random.default_rng([seed, level]).random((len(clusters), 2))
        halves = []
        total = 0.0
        for cluster, draw in zip(clusters, draws, strict=True):
            a, b, objective = loop_split(
                vectors[cluster].astype(np.float64), draw, tolerance, max_iterations
            )
            halves += [cluster[a], cluster[b]]
            total += objective * len(cluster)
        clusters = halves
        level = level + 1
        objectives.append(total / len(vectors))
    return clusters, objectives


@pytest.mark.parametrize(
    ("num_points", "max_size"),
    [
        (40, 10),
        (75, 10),
        (203, 13),
    ],
)
def test_a_level_at_once_equals_a_loop_over_clusters(num_points, max_size, rng):
    equal = 0
    for _ in range(6):
        vectors = unit(rng, num_points)
        seed = int(rng.integers(1000))
        clusters = balanced_clusters(vectors, max_size, seed=seed)
        expected, objectives = loop_clusters(vectors, max_size, seed)
        same = [set(cluster) for cluster in members(clusters)] == [
            set(cluster.tolist()) for cluster in expected
        ]
        if same:
            assert clusters.objective == pytest.approx(objectives[-1], rel=1e-5)
        equal += same
    # Now and then a tie, or a gain at the tolerance, is seen differently by float32 and float64.
    assert equal >= 4


def test_the_number_of_iterations_is_bounded(rng, monkeypatch):
    vectors = unit(rng, 150)
    monkeypatch.setattr(clustering, "TOLERANCE", 0.0)
    monkeypatch.setattr(clustering, "MAX_ITERATIONS", 2)
    clusters = balanced_clusters(vectors, 20, seed=1)
    expected, _ = loop_clusters(vectors, 20, 1, tolerance=0.0, max_iterations=2)
    assert [set(cluster) for cluster in members(clusters)] == [
        set(cluster.tolist()) for cluster in expected
    ]


def test_objective_is_the_mean_cosine_to_the_centre(rng):
    vectors = unit(rng, 90)
    clusters = balanced_clusters(vectors, 12, seed=0)
    cosines = []
    for cluster in members(clusters):
        centre = vectors[cluster].sum(0)
        cosines += (vectors[cluster] @ (centre / np.linalg.norm(centre))).tolist()
    assert clusters.objective == pytest.approx(np.mean(cosines), rel=1e-5)
    chance = balanced_clusters(vectors[rng.permutation(90)], 90, seed=0).objective
    assert clusters.objective > chance


def test_separate_groups_are_found(rng):
    """Four tight groups of 25 around orthogonal axes: the clusters are the groups."""
    group = rng.permutation(np.repeat(np.arange(4), 25))
    vectors = np.eye(4, 6, dtype=np.float32)[group] + 0.01 * rng.normal(size=(100, 6)).astype(
        np.float32
    )
    # A start inside one group may stop at a poor split; the best of a few seeds is the right one.
    best = max(
        (balanced_clusters(vectors, 25, seed=s) for s in range(8)), key=lambda c: c.objective
    )
    assert sorted({group[cluster].tolist()[0] for cluster in members(best)}) == [0, 1, 2, 3]
    assert all(len(set(group[cluster].tolist())) == 1 for cluster in members(best))
    assert best.objective > 0.99


def test_equal_zero_and_opposite_points_are_still_balanced():
    same = np.ones((37, 5), np.float32)
    opposite = np.concatenate([np.tile([1.0, 0.0], (8, 1)), np.tile([-1.0, 0.0], (8, 1))]).astype(
        np.float32
    )
    for vectors, size in (
        (same, 5),
        (np.zeros((20, 3), np.float32), 4),
        (opposite, 8),
        (opposite, 3),
    ):
        check_partition(balanced_clusters(vectors, size, seed=0), len(vectors), size)
    assert balanced_clusters(same, 5, seed=0).objective == pytest.approx(1)


def test_the_seed_decides_and_length_does_not(rng):
    vectors = unit(rng, 300)
    one = balanced_clusters(vectors, 20, seed=0)
    assert np.array_equal(one.order_N, balanced_clusters(vectors, 20, seed=0).order_N)
    assert not np.array_equal(one.order_N, balanced_clusters(vectors, 20, seed=1).order_N)
    # a power of two: exactly the same directions
    longer = balanced_clusters(vectors * 8, 20, seed=0)
    assert longer.objective == pytest.approx(one.objective, rel=1e-4)


def test_input_is_left_alone_and_may_be_read_only(tmp_path, rng):
    vectors = unit(rng, 50) * 3
    before = vectors.copy()
    first = balanced_clusters(vectors, 9, seed=0)
    assert np.array_equal(vectors, before)
    np.save(tmp_path / "v.npy", vectors)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    assert np.array_equal(balanced_clusters(mapped, 9, seed=0).order_N, first.order_N)


def test_bad_input_is_refused(rng):
    vectors = unit(rng, 20)
    vectors[4, 2] = np.nan
    with pytest.raises(DataError, match=r"rows \[4\]"):
        balanced_clusters(vectors, 3, seed=0)


@pytest.mark.parametrize("num_points", [1, 2, 37, 300])
def test_clusters_a_few_at_a_time_are_the_same(num_points, monkeypatch):
    """The bound on copied points decides nothing; it stays under the copy of half of the points
    that a level needs.
    """
    vectors = np.random.default_rng(5).normal(size=(num_points, 6)).astype(np.float32)
    whole = balanced_clusters(vectors, 4, seed=1)
    monkeypatch.setattr(clustering, "POINTS_AT_ONCE", (10, 10))
    some = balanced_clusters(vectors, 4, seed=1)
    assert np.array_equal(some.order_N, whole.order_N) and np.array_equal(
        some.offsets, whole.offsets
    )
    assert some.objective == pytest.approx(whole.objective, rel=1e-5)


def loop_cut(points, draw, sample):
    """Positions of the halves of a part, from the centres of a sample's halves, in float64."""
    step = -(-len(points) // sample)
    sampled = points[::step]
    a, b, _ = loop_split(sampled, draw, clustering.TOLERANCE, clustering.MAX_ITERATIONS)
    centre_a = sampled[a].sum(0)
    centre_b = sampled[b].sum(0)
    centre_a /= np.linalg.norm(centre_a)
    centre_b /= np.linalg.norm(centre_b)
    difference = points @ (centre_a - centre_b)
    order = np.argsort(-difference, kind="stable").tolist()
    half = (len(points) + 1) // 2
    return sorted(order[:half]), sorted(order[half:])


@pytest.mark.parametrize(("num_points", "sample"), [(90, 1000), (203, 20)])
def test_points_on_disk_are_cut_by_a_sample(num_points, sample, rng, monkeypatch):
    """Parts as small as the clusters: nothing is left to do in memory."""
    monkeypatch.setattr(clustering, "PART_BYTES", 26 * 4 * 8)
    monkeypatch.setattr(clustering, "SAMPLE", sample)
    equal = 0
    for seed in range(6):
        half = unit(rng, num_points).astype(np.float16)
        parts = [np.arange(num_points)]
        level = 0
        while num_points > 26 * len(parts):
            halves = []
            for number, part in enumerate(parts):
                draw = np.random.default_rng([seed, level, number]).random(2)
                points = half[part].astype(float)
                halves += [part[positions] for positions in loop_cut(points, draw, sample)]
            parts = halves
            level += 1
        clusters = balanced_clusters(half, 26, seed=seed)
        check_partition(clusters, num_points, 26)
        equal += members(clusters) == [part.tolist() for part in parts]
    assert equal >= 4  # rounding may decide a tie


@pytest.mark.parametrize("num_points", [1, 2, 5, 37, 90])
def test_points_on_disk_are_balanced_and_nearly_as_similar(num_points, rng, monkeypatch):
    half = unit(rng, num_points, dim=3).astype(np.float16)
    whole = balanced_clusters(half.astype(np.float32), 4, seed=1)
    for part_bytes in (1, 30 * 4 * 3, 1 << 28):
        monkeypatch.setattr(clustering, "PART_BYTES", part_bytes)
        monkeypatch.setattr(clustering, "SAMPLE", 16)
        made = balanced_clusters(half, 4, seed=1)
        check_partition(made, num_points, 4)
        again = balanced_clusters(half, 4, seed=1)
        assert np.array_equal(made.order_N, again.order_N)
        assert made.objective > whole.objective - 0.1


def test_equal_and_zero_points_on_disk_are_still_balanced(monkeypatch):
    monkeypatch.setattr(clustering, "PART_BYTES", 1)
    for vectors in (np.ones((37, 5)), np.zeros((20, 3)), np.zeros((0, 3))):
        made = balanced_clusters(vectors.astype(np.float16), 4, seed=0)
        check_partition(made, len(vectors), 4)


def test_a_bad_point_on_disk_is_named(rng, monkeypatch):
    monkeypatch.setattr(clustering, "PART_BYTES", 1)
    monkeypatch.setattr(clustering, "SAMPLE", 4)
    half = unit(rng, 20).astype(np.float16)
    half[13, 2] = np.inf
    with pytest.raises(DataError, match=r"rows \[13\]"):
        balanced_clusters(half, 3, seed=0)
