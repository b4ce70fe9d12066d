"""The label tree against loops in float64: scores, and which clusters a query keeps from level to level."""

import math

import numpy as np
import pytest
import torch

from unidec.model.label_tree import LabelTree, num_clusters
from unidec.model.pairs import MASKED
from unidec.training.clustering import balanced_clusters

WIDTH = 6


def make(rng, counts):
    """A tree with random weights everywhere."""
    tree = LabelTree(counts, WIDTH, dropout=0.5).eval()
    for parameter in tree.parameters():
        parameter.data = torch.from_numpy(rng.normal(size=parameter.shape, scale=0.5)).float()
    return tree, torch.from_numpy(rng.normal(size=(7, WIDTH))).float()


def scored(tree, level, x):
    """One query's scores of a level, float64 [C]."""
    layer, classifier = tree.layers[level], tree.classifiers[level]
    a, b, w, c = (p.detach().double().numpy() for p in (*layer.parameters(), *classifier.parameters()))
    h = [x[i] + (z := a[i] @ x + b[i]) * 0.5 * (1 + math.erf(z / math.sqrt(2))) for i in range(WIDTH)]
    return np.array([w[cluster] @ h + c[cluster] for cluster in range(len(w))])


def test_it_begins_as_one_classifier_a_level_on_the_encoders_vector():
    tree = LabelTree([2, 8], WIDTH, dropout=0.0)
    x_BW = torch.randn(3, WIDTH)
    for classifier, score_BC in zip(tree.classifiers, tree(x_BW), strict=True):
        assert torch.equal(score_BC, classifier(x_BW)) and classifier.weight.std() > 0.1
    sum(score_BC.square().sum() for score_BC in tree(x_BW)).backward()
    assert all(layer.weight.grad.abs().max() > 0 for layer in tree.layers), "and learns from there"


@pytest.mark.parametrize("counts", [[4], [4, 8], [2, 16, 64], [1, 4, 4], [1, 1]])
@pytest.mark.parametrize("num_kept", [0, 1, 3, 100])
@pytest.mark.parametrize("with_positives", [False, True])
def test_scores_and_kept_clusters_equal_loops(counts, num_kept, with_positives, rng):
    tree, x_BW = make(rng, counts)
    finest = rng.integers(0, counts[-1], (len(x_BW), 2))  # a query's positives
    positive = [finest // (counts[-1] // count) for count in counts] if with_positives else None
    given = [
        (torch.arange(len(x_BW)).repeat_interleave(2), torch.from_numpy(each.reshape(-1))) for each in positive or []
    ]
    found = [score_BC.detach().numpy() for score_BC in tree(x_BW, num_kept, given)]
    assert [len(score_BC[0]) for score_BC in found] == counts
    masked = 0
    for query, x in enumerate(x_BW.double().numpy()):
        seen = set(range(counts[0]))
        for level, count in enumerate(counts):
            score, own = scored(tree, level, x), found[level][query]
            for cluster in range(count):
                expected = score[cluster] if cluster in seen else MASKED
                assert own[cluster] == pytest.approx(expected, rel=1e-4, abs=1e-5)
            masked += count - len(seen)
            assert len(seen) >= min(num_kept, count)
            kept = set(sorted(seen, key=lambda cluster: -score[cluster])[: num_kept or count])
            kept |= set(positive[level][query].tolist()) if positive else set()
            if level + 1 < len(counts):
                more = counts[level + 1] // count
                seen = {parent * more + child for parent in kept for child in range(more)}
    if not with_positives:
        assert (masked > 0) == (0 < num_kept < max(counts[:-1], default=0))


def test_a_masked_cluster_teaches_nothing(rng):
    tree, x_BW = make(rng, [4, 16])
    scores = tree(x_BW, 1)
    seen_BC = scores[1] > MASKED
    assert (seen_BC.sum(1) == 4).all()
    torch.logsumexp(scores[1] * 18, dim=1).sum().backward()
    taught = tree.classifiers[1].weight.grad.abs().sum(1) > 0
    assert torch.equal(taught, seen_BC.any(0)) and tree.classifiers[0].weight.grad is None


@pytest.mark.parametrize("num_labels", [1, 2, 37, 64])
def test_a_coarse_cluster_is_several_finer_ones_in_a_row(num_labels, rng):
    """What the tree takes for granted of `balanced_clusters`: its clusters are nested, numbers and all."""
    vectors_LD = rng.normal(size=(num_labels, 5)).astype(np.float32)
    cluster_L = {}
    for size in (16, 5, 2):
        order, offsets, _ = balanced_clusters(vectors_LD, size, seed=3)
        cluster_L[size] = np.empty(num_labels, np.int64)
        cluster_L[size][order] = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        assert len(offsets) - 1 == num_clusters(num_labels, size)
    for size in (16, 5):
        ratio = num_clusters(num_labels, 2) // num_clusters(num_labels, size)
        assert np.array_equal(cluster_L[size], cluster_L[2] // ratio)
