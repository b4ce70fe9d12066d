"""Astec's surrogate task: pairs of clusters, and rows that the labels of a cluster share."""

import numpy as np
import pytest
import torch
from helpers.untrained_model import create_model

from unidec.data.storage import write_folder
from unidec.methods.assembly import export_of
from unidec.methods.surrogate import ClusterRows
from unidec.model.first_rows import start_table
from unidec.model.unidec import KIND, VERSION, UniDEC


@pytest.mark.parametrize("bias", [False, True])
def test_labels_of_a_cluster_share_its_row(tiny_bert, tiny_params, tmp_path, bias):
    """Astec's surrogate task: as trained, and as exported, an ordinary classifier."""
    values = {
        "model.heads": "clf",
        "model.surrogate": 2,
        "model.clf_init": "xavier",
        "model.clf_bias": bias,
    }
    model = create_model(tiny_bert, tiny_params(**values), 3).eval()
    assert model.table.weight.shape == (4, 16), "7 labels, at most 2 a cluster, a power of two"
    start_table(model)
    assert len(np.unique(model.table.weight)) == 64
    model.label_cluster.copy_(torch.tensor([3, 0, 1, 1, 2, 0, 3]))
    if bias:
        torch.nn.init.normal_(model.bias.weight)
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out, exported=export_of(model.settings, ClusterRows(model)))
    loaded = UniDEC.load(tmp_path / "model")
    assert loaded.settings.surrogate == 0 and "label_cluster" not in loaded.state_dict()
    for weight, biases in (
        ClusterRows(model).exported(),
        loaded.classifier_table(),
    ):
        assert (biases is not None) == bias
        for label, cluster in enumerate([3, 0, 1, 1, 2, 0, 3]):
            expected = model.table.weight[cluster].numpy()
            assert np.array_equal(weight[label], expected)
            assert biases is None or biases[label] == model.bias.weight[cluster, 0]


def test_clusters_take_the_place_of_labels(make_batches, tiny_dataset):
    """Astec's surrogate task, against dense matrices: a cluster is relevant where one of its labels
    is.
    """
    cluster_L = np.random.default_rng(0).integers(0, 15, tiny_dataset.num_labels)
    relevant, filtered = (
        pairs.toarray() > 0 for pairs in (tiny_dataset.relevance, tiny_dataset.filter_pairs)
    )
    expected, ignored = (
        np.stack([pairs[:, cluster_L == c].any(1) for c in range(16)], axis=1)
        for pairs in (relevant, filtered)
    )
    values = {"model.heads": "clf", "model.surrogate": 3, "pool.eta": 0, "pool.beta": 99}
    batches = make_batches(cluster_L=cluster_L, **values)
    assert batches.sampler.num_labels == 16, "one of them empty"
    batch = batches.prepare(batches.rows, 0, 0, None)
    rows = batch.pool.rows_B
    pool = batch.pool.pool_S
    found = np.zeros((2, len(rows), len(pool)), bool)
    found[0, batch.clf.targets.row_P, batch.clf.targets.col_P] = True
    found[1, batch.pool.ignored_row_F, batch.pool.ignored_col_F] = True
    assert np.array_equal(found[0], expected[np.ix_(rows, pool)])
    assert found[0].any(1).any()
    assert np.array_equal(found[1], (ignored & ~expected)[np.ix_(rows, pool)])
    assert found[1].any()
    assert (batch.pool.relevance_P == 1).all() and 15 not in pool
