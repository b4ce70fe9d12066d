"""The label tree against loops in float64: scores, and which clusters a query keeps from level to
level.
"""

import math

import numpy as np
import pytest
import torch
from helpers.untrained_model import create_model

from unidec.data.storage import write_folder
from unidec.methods.assembly import export_of
from unidec.methods.cluster_tree import LabelTree
from unidec.model.additions import Rows
from unidec.model.first_rows import start_table
from unidec.model.pairs import MASKED
from unidec.model.pool import num_clusters
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.training.clustering import balanced_clusters
from unidec.training.round_refresh import Refresh

WIDTH = 6


def make(rng, counts):
    """A tree with random weights everywhere."""
    tree = LabelTree(counts, WIDTH, dropout=0.5).eval()
    for parameter in tree.parameters():
        parameter.data = torch.from_numpy(rng.normal(size=parameter.shape, scale=0.5)).float()
    return tree, torch.from_numpy(rng.normal(size=(7, WIDTH))).float()


def gelu(z):
    return z * 0.5 * (1 + math.erf(z / math.sqrt(2)))


def scored(tree, level, x):
    """One query's scores of a level, float64 [C]."""
    layer = tree.layers[level]
    classifier = tree.classifiers[level]
    a, b, w, c = (
        p.detach().double().numpy() for p in (*layer.parameters(), *classifier.parameters())
    )
    h = [x[i] + gelu(a[i] @ x + b[i]) for i in range(WIDTH)]
    return np.array([w[cluster] @ h + c[cluster] for cluster in range(len(w))])


def test_it_begins_as_one_classifier_a_level_on_the_encoders_vector():
    tree = LabelTree([2, 8], WIDTH, dropout=0.0)
    x_BW = torch.randn(3, WIDTH)
    for classifier, score_BC in zip(tree.classifiers, tree(x_BW), strict=True):
        assert torch.equal(score_BC, classifier(x_BW))
        assert classifier.weight.std() > 0.1
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
        (torch.arange(len(x_BW)).repeat_interleave(2), torch.from_numpy(each.reshape(-1)))
        for each in positive or []
    ]
    found = [score_BC.detach().numpy() for score_BC in tree(x_BW, num_kept, given)]
    assert [len(score_BC[0]) for score_BC in found] == counts
    masked = 0
    for query, x in enumerate(x_BW.double().numpy()):
        seen = set(range(counts[0]))
        for level, count in enumerate(counts):
            score = scored(tree, level, x)
            own = found[level][query]
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
    assert torch.equal(taught, seen_BC.any(0))
    assert tree.classifiers[0].weight.grad is None


@pytest.mark.parametrize("num_labels", [1, 2, 37, 64])
def test_a_coarse_cluster_is_several_finer_ones_in_a_row(num_labels, rng):
    """What the tree takes for granted of `balanced_clusters`: its clusters are nested, numbers and
    all.
    """
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


def test_a_label_tree_is_not_exported(tiny_bert, tiny_params, tmp_path):
    """It only trains: what is exported is an ordinary classifier."""
    values = {"model.heads": "clf", "model.levels": [4, 2], "model.clf_init": "xavier"}
    model = create_model(tiny_bert, tiny_params(**values), 3).eval()
    assert model.tree.counts == [2, 4]
    assert model.label_cluster.shape == (7,)
    start_table(model)
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out, exported=export_of(model.settings, Rows()))
    loaded = UniDEC.load(tmp_path / "model")
    assert loaded.settings.levels == []
    assert not {"tree", "label_cluster"} & {name.split(".")[0] for name in loaded.state_dict()}
    expected = model.table.weight.numpy()
    assert np.array_equal(loaded.classifier_table()[0], expected)


def test_levels_of_a_label_tree_have_targets_of_their_own(make_batches, tiny_dataset):
    """Against dense matrices; labels and their pool stay as they are."""
    values = {"model.heads": "clf", "pool.eta": 0, "pool.beta": 2}
    cluster_L = np.random.default_rng(0).integers(0, 16, tiny_dataset.num_labels)
    relevant, filtered = (
        pairs.toarray() > 0 for pairs in (tiny_dataset.relevance, tiny_dataset.filter_pairs)
    )
    plain = make_batches(**values)
    batches = make_batches(cluster_L=cluster_L, **values, **{"model.levels": [20, 10, 3]})
    batch, other = (each.prepare(each.rows[:20], 1, 2, None) for each in (batches, plain))
    assert np.array_equal(batch.pool.pool_S, other.pool.pool_S)
    assert set(other.added) == {"rows"}
    for count, level in zip([2, 4, 16], batch.added["loss_levels"], strict=True):
        member_LC = (cluster_L * count // 16)[:, None] == np.arange(count)
        positive, ignored = (pairs[batches.rows[:20]] @ member_LC for pairs in (relevant, filtered))
        found = np.zeros((2, 20, count), bool)
        found[0, level.row_P, level.col_P] = True
        found[1, level.ignored_row_F, level.ignored_col_F] = True
        assert np.array_equal(found[0], positive)
        assert np.array_equal(found[1], ignored & ~positive)
        assert (level.relevance_P == 1).all()
        assert level.num_positives_B.tolist() == positive.sum(1).tolist()
    assert ignored.any(), "beta of the positives are drawn"
    assert level.sampled_P.any(), "beta of the positives are drawn"
    assert not level.sampled_P.all(), "beta of the positives are drawn"


@pytest.mark.parametrize("num_kept", [1, 2, 99])
@pytest.mark.parametrize("gandalf", [False, True])
def test_a_shortlist_has_the_labels_of_the_clusters_that_the_label_tree_keeps(
    open_trainer, tiny_dataset, num_kept, gandalf
):
    """Against loops: the clusters of highest score among the children of those kept one level
    above.
    """
    values = {
        "model.heads": "clf",
        "model.levels": [8, 3],
        "pool.shortlist": num_kept,
        "pool.gandalf": gandalf,
    }
    trainer = open_trainer(**values, **{"pool.batches": "random", "model.dropout": 0.5})
    for parameter in trainer.model.tree.parameters():
        torch.nn.init.normal_(parameter)
    report = trainer.mine()
    assert trainer.model.tree.training
    made = Refresh.load(trainer.refresher.folder(0), 0)
    x_NW = {
        name: trainer.model.encode(name, tokens) for name, tokens in trainer.encoding.tokens.items()
    }
    x_NW = torch.from_numpy(np.concatenate([x_NW["queries"], x_NW["labels"]]))
    coarse, fine = (score_NC.detach().numpy() for score_NC in trainer.model.tree.eval()(x_NW))
    cluster_L, (few, many) = trainer.model.label_cluster.numpy(), trainer.model.tree.counts
    assert (few, many) == (8, 16)
    positive = trainer.batches.sampler.relevance.toarray() > 0
    found = []
    for row in range(len(made.negatives)):
        if row not in trainer.rows:
            assert (made.negatives[row] == -1).all()
            continue
        kept = np.argsort(-coarse[row])[:num_kept]
        children = [c for c in range(many) if c // (many // few) in kept]
        best = sorted(children, key=lambda c: -fine[row, c])[:num_kept]
        expected = [label for c in best for label in np.flatnonzero(cluster_L == c)]
        assert [label for label in made.negatives[row] if label >= 0] == expected
        found += np.isin(np.flatnonzero(positive[row]), expected).tolist()
    assert made.negatives.dtype == np.int32
    assert report["mine_positives_found"] == pytest.approx(np.mean(found))
    assert report["mine_queries"] == len(trainer.rows) and (
        report["mine_positives_found"] == 1
    ) == (num_kept == 99)
    batch = trainer.batches.prepare(trainer.rows[:3], 0, 0, made.negatives)
    labels = set(made.negatives[trainer.rows[:3]].ravel()) | set(
        np.flatnonzero(positive[trainer.rows[:3]].any(0))
    )
    assert set(batch.pool.pool_S) <= labels
    assert (
        set(batch.pool.pool_S) - set(np.flatnonzero(positive[trainer.rows[:3]].any(0)))
    ) != set()


def test_a_shortlist_is_made_only_where_steps_read_it(open_trainer):
    values = {
        "model.heads": "clf",
        "model.levels": [8, 3],
        "pool.shortlist": 2,
        "pool.batches": "random",
    }
    trainer = open_trainer(**values, **{"pool.clf_labels": "all"})
    assert "mine_queries" not in trainer.mine()
    assert Refresh.load(trainer.refresher.folder(0), 0).negatives is None
