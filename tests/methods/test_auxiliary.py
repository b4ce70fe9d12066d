"""Auxiliary vectors (DEXA) against a loop over labels, as trained, as exported, and in a bundle."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.untrained_model import TEXTS, create_model

from unidec.bundle.bundle_model import write_model
from unidec.data.storage import write_folder
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError
from unidec.methods.assembly import load_model
from unidec.model.arrays import read_arrays
from unidec.model.unidec import KIND, VERSION, UniDEC
from unidec.training.distributed import Ranks
from unidec.training.initial_weights import cluster_labels


@pytest.mark.parametrize("heads", ["de", "both"])
def test_the_labels_searched_have_their_clusters_vectors(
    tiny_bert, tiny_params, tmp_path, rng, heads
):
    """As trained, and as exported; a bundle's model has none, and queries never have."""
    model = create_model(
        tiny_bert, tiny_params(**{"model.heads": heads, "model.auxiliary": 2}), 3
    ).eval()
    assert model.auxiliary.shape == (4, 16), "7 labels, at most 2 a cluster, a power of two"
    cluster_labels(model, rng.normal(size=(7, 16)).astype(np.float32), 2, 0, Ranks())
    cluster_L = model.label_cluster.tolist()
    assert np.bincount(cluster_L).tolist().count(2) == 3
    assert len(set(cluster_L)) == 4
    torch.nn.init.normal_(model.auxiliary)
    tokens = encode_texts([*TEXTS, *TEXTS, TEXTS[0]][:7], tiny_bert, 16)
    x_LW = torch.from_numpy(model.encode("labels", tokens))
    expected = [
        F.normalize(model.head_de[:2](x) + model.auxiliary[cluster_L[label]], dim=0).detach()
        for label, x in enumerate(x_LW)
    ]
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    for one in (model, load_model(tmp_path / "model")):
        found = torch.from_numpy(one.encode_labels(tokens, batch_size=3))
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    plain = F.normalize(model.head_de[:2](x_LW), dim=1).detach()
    torch.testing.assert_close(
        torch.from_numpy(model.encode_queries(tokens)[0]), plain, rtol=1e-5, atol=1e-6
    )
    others = {"num_labels": 9, "dim": model.settings.dim}  # of other labels
    write_model(tmp_path / "model", tmp_path / "bundled", **others)
    assert not {"auxiliary", "label_cluster"} & read_arrays(tmp_path / "bundled").keys()
    bundled = UniDEC.load(tmp_path / "bundled", rows=False)
    torch.testing.assert_close(
        torch.from_numpy(bundled.encode_labels(tokens)), plain, rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ArtifactError, match=r"unknown: auxiliary, label_cluster"):
        UniDEC.load(tmp_path / "model")  # a model without its method would rank other labels
