"""A model that starts from another one: what it takes, what it leaves, and what it refuses."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix

from unidec.data.storage import write_folder, write_manifest
from unidec.data.tokens import encode_texts
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import read_arrays
from unidec.model.unidec import UniDEC
from unidec.model.weights import KIND, VERSION, start_sha256
from unidec.retrieval.bundle_model import write_model
from unidec.training.distributed import Ranks
from unidec.training.start import cluster_labels

TEXTS = ["river query w3", "bread bread", "music label w10 w11 planet"]


def create(folder, params, seed):
    torch.manual_seed(seed)
    return UniDEC.create(params.encoder, params.model, 7, folder, 0, params.model_dump())


def trained(folder, params, path, seed=1):
    """An exported model, every weight of which is unlike that of a new one."""
    model = create(folder, params, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    with write_folder(path, KIND, VERSION) as out:
        model.save_into(out)
    return model.eval()


@pytest.fixture
def start(tiny_bert, tiny_params, tmp_path):
    """`start(begin, **now)`: (exported model with `begin`, new model that starts from it with `now`)."""

    def start(begin, **now):
        old = trained(tiny_bert, tiny_params(**begin), tmp_path / "old")
        return old, create(tiny_bert, tiny_params(**begin | {"encoder.start": str(tmp_path / "old")} | now), 2).eval()

    return start


def encode(model, texts=TEXTS):
    return torch.from_numpy(model.encode("queries", encode_texts(texts, model.tokenizer_folder, 16)))


KINDS = {
    "bag": {},
    "residual": {"encoder.residual": True},
    "transformer": {"encoder.kind": "transformer"},
    "both": {"encoder.kind": "both", "encoder.trainable_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_and_heads_are_the_starts_and_the_table_is_new(start, kind):
    old, new = start(KINDS[kind], **{"model.learn_temperature": True})
    assert torch.equal(encode(new), encode(old))
    x_BW = encode(old)
    for head in ("de", "clf"):
        assert torch.equal(getattr(new, head)(x_BW), getattr(old, head)(x_BW))
    assert not new.table.weight.any() and old.table.weight.any(), "rows belong to the start's labels"
    assert not torch.equal(new.log_scale, old.log_scale)


def test_weights_after_the_start_do_not_depend_on_the_seed(tiny_bert, tiny_params, tmp_path):
    trained(tiny_bert, tiny_params(), tmp_path / "old")
    params = tiny_params(**{"encoder.start": str(tmp_path / "old")})
    one, two = (create(tiny_bert, params, seed).dense_state() for seed in (2, 3))
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(("had", "missing"), [("de", "clf"), ("clf", "de")])
def test_a_head_that_the_start_lacks_begins_as_its_other_one(start, had, missing):
    old, new = start({"model.heads": had, "index.space": had}, **{"model.heads": "both", "index.space": "both"})
    given, taken = getattr(old, f"head_{had}")[0], getattr(new, f"head_{missing}")[0]
    assert torch.equal(given.weight, taken.weight) and torch.equal(given.bias, taken.bias)
    assert torch.equal(getattr(new, f"head_{had}")[0].weight, given.weight)


def test_a_second_stage_has_the_classifiers_head_alone(start):
    """NGAME: a dual encoder first, then a classifier on its frozen encoder; rows start at the labels' embeddings."""
    old, new = start({"model.heads": "de", "index.space": "de"},
                     **{"model.heads": "clf", "index.space": "clf", "encoder.frozen": True})  # fmt: skip
    label_LW = encode(old, TEXTS + TEXTS + TEXTS[:1])
    new.start_table(lambda rows: label_LW[rows])
    expected = F.normalize(F.linear(label_LW, old.head_de[0].weight, old.head_de[0].bias), dim=1)
    torch.testing.assert_close(new.table.weight.data, expected.detach())
    assert not any(p.requires_grad for p in new.encoder.parameters())


def test_a_residual_network_that_the_start_lacks_begins_as_the_identity(start):
    old, new = start({}, **{"encoder.residual": True})
    assert torch.equal(encode(new), encode(old))
    assert new.encoder.residual is not None


@pytest.mark.parametrize(
    ("begin", "now", "said"),
    [
        ({}, {"model.dim": 24}, r"head_de.0.weight: shape \[16, 32\] instead of \[24, 32\]"),
        ({}, {"encoder.kind": "both"}, "differs in encoder.kind"),
        ({"encoder.kind": "both"}, {"encoder.kind": "bag"}, "differs in encoder.kind"),
        ({}, {"encoder.bag_words": 8}, "differs in encoder.bag_words"),
        ({"encoder.residual": True}, {"encoder.residual": False}, "unknown: encoder.residual"),
    ],
)
def test_another_encoder_or_width_is_refused(start, begin, now, said):
    with pytest.raises(ConfigError, match=said) as caught:
        start(begin, **now)
    assert "encoder.start" in str(caught.value) and "fix" in str(caught.value)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("file", "change", "kind", "said"),
    [
        ("config.json", lambda c: c["encoder"].update(pooling="cls"), "transformer", "encoder.pooling"),
        ("config.json", lambda c: c["encoder"].update(pooling="cls"), "both", "encoder.pooling"),
        ("tokenizer/tokenizer.json", lambda c: c["model"]["vocab"].update(extra=9999), "bag", "differs in tokenizer"),
        ("encoder_config/config.json", lambda c: c.update(num_attention_heads=1), "transformer", "num_attention_heads"),
    ],
)
def test_another_transformer_is_refused_also_where_every_shape_fits(
    tiny_bert, tiny_params, tmp_path, file, change, kind, said
):
    folder = tmp_path / "old"
    trained(tiny_bert, tiny_params(**{"encoder.kind": kind}), folder)
    edit(folder / file, change)
    write_manifest(folder, KIND, VERSION, {})
    with pytest.raises(ConfigError, match=said):
        create(tiny_bert, tiny_params(**{"encoder.kind": kind, "encoder.start": str(folder)}), 2)


@pytest.mark.parametrize("layers", [0, 1, -1])
@pytest.mark.parametrize(("kind", "frozen"), [("both", True), ("transformer", True), ("transformer", False)])
def test_how_the_start_was_trained_does_not_matter(start, tmp_path, kind, frozen, layers):
    """A transformer that trains alone has vectors of any length: frozen afterwards it keeps them."""
    dropouts = {"encoder.bag_dropout": 0.3} if kind == "both" else {}
    begin = {"encoder.kind": kind, "encoder.dropout": 0.2, "encoder.trainable_layers": layers}
    now = {"encoder.frozen": frozen, "encoder.dropout": 0.0, "encoder.trainable_layers": 0}
    old, new = start(begin | dropouts, **now | {"encoder.bag_dropout": 0.0})
    torch.testing.assert_close(encode(new), encode(old))
    with write_folder(tmp_path / "second", KIND, VERSION) as out:
        new.save_into(out)
    torch.testing.assert_close(encode(UniDEC.load(tmp_path / "second")), encode(old))


def test_who_wrote_a_config_does_not_matter(tiny_bert, tiny_params, tmp_path):
    folder = tmp_path / "old"
    old = trained(tiny_bert, tiny_params(**{"encoder.kind": "transformer"}), folder)
    edit(folder / "encoder_config/config.json", lambda c: c.update(transformers_version="0.1", _name_or_path="x"))
    write_manifest(folder, KIND, VERSION, {})
    new = create(tiny_bert, tiny_params(**{"encoder.kind": "transformer", "encoder.start": str(folder)}), 2).eval()
    assert torch.equal(encode(new), encode(old))


def test_no_model_and_a_damaged_one_are_refused(tiny_bert, tiny_params, tmp_path):
    folder = tmp_path / "old"
    params = tiny_params(**{"encoder.start": str(folder)})
    for call in (lambda: create(tiny_bert, params, 1), lambda: start_sha256(folder)):
        with pytest.raises(ArtifactError, match="old"):
            call()
    trained(tiny_bert, tiny_params(), folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ArtifactError, match="damaged"):
        create(tiny_bert, params, 1)


def test_a_start_is_named_by_its_content(tiny_bert, tiny_params, tmp_path):
    hashes = []
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        trained(tiny_bert, tiny_params(), tmp_path / name, seed)
        hashes.append(start_sha256(tmp_path / name))
    assert hashes[0] == hashes[1] != hashes[2] and len(hashes[0]) == 64


# -- residual classifiers ----------------------------------------------------------------------------------------------


@pytest.fixture
def residual(tiny_bert, tiny_params, rng):
    """A residual classifier with free vectors of seven labels, and the encoder's outputs of their texts."""
    model = create(tiny_bert, tiny_params(**{"model.clf_residual": True, "model.dropout": 0.5}), 3)
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1]) + torch.from_numpy(rng.normal(size=(7, 32)).astype(np.float32))
    model.label_input = lambda rows: label_LW[rows]
    return model, label_LW


def test_free_vectors_start_at_zero_and_rows_at_the_texts(residual):
    model, label_LW = residual
    model.start_table(model.label_input)
    assert not model.table.weight.any()
    rows_LD = F.normalize(F.linear(label_LW, model.head_clf[0].weight, model.head_clf[0].bias), dim=1)
    torch.testing.assert_close(torch.from_numpy(model.classifier_table()[0]), rows_LD.detach())


@pytest.mark.parametrize("block", [2, 7, 100])
def test_whole_rows_are_text_and_free_vector(residual, monkeypatch, block, rng):
    monkeypatch.setattr("unidec.model.unidec.START_BLOCK", block)
    model, label_LW = residual
    free_LD = torch.from_numpy(rng.normal(size=(7, 16)).astype(np.float32))
    model.table.weight.data.copy_(free_LD)
    for mode in (True, False):  # without dropout in either
        model.train(mode)
        expected = [
            free + F.normalize(model.head_clf[0].weight @ x + model.head_clf[0].bias, dim=0)
            for x, free in zip(label_LW, free_LD, strict=True)
        ]
        got_LD = torch.from_numpy(model.classifier_table()[0])
        torch.testing.assert_close(got_LD, torch.stack(expected).detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.text_rows(label_LW), got_LD - free_LD, rtol=1e-4, atol=1e-6)
    assert torch.equal(model.table.weight, free_LD), "the free vectors stay"


@pytest.mark.parametrize("block", [2, 100])
def test_whole_rows_have_the_mean_of_all_their_queries(tiny_bert, tiny_params, rng, monkeypatch, block):
    monkeypatch.setattr("unidec.model.unidec.START_BLOCK", block)
    values = {"model.heads": "clf", "index.space": "clf", "model.clf_residual": True, "model.clf_queries": 2}
    model = create(tiny_bert, tiny_params(**values), 3).eval()
    assert model.related_gate.tolist() == [1.0] * len(model.related_gate)
    texts_NW = torch.from_numpy(rng.normal(size=(12, 32)).astype(np.float32))  # of 7 labels, then of 5 queries
    has_LN = rng.random((7, 5)) < 0.5
    has_LN[3], has_LN[4] = False, True  # a label without queries, and one with more than a step draws
    model.label_input, model.related_input = (lambda rows: texts_NW[rows]), (lambda rows: texts_NW[7 + rows])
    model.related_LN = csr_matrix(has_LN.astype(np.float32))
    torch.nn.init.normal_(model.related_gate)
    text = model.text_rows(texts_NW).detach().numpy().astype(np.float64)
    for label, row in enumerate(model.classifier_table()[0]):
        queries = [text[7 + query] for query in range(5) if has_LN[label, query]]
        mean = sum(queries) / np.linalg.norm(sum(queries)) if queries else 0.0
        expected = text[label] + mean * model.related_gate.detach().numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [2, 100])
def test_whole_rows_have_the_texts_of_all_related_labels(tiny_bert, tiny_params, rng, monkeypatch, block):
    monkeypatch.setattr("unidec.model.unidec.START_BLOCK", block)
    model = create(tiny_bert, tiny_params(**{"model.clf_residual": True, "model.clf_graph": True}), 3).eval()
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1]) + torch.from_numpy(rng.normal(size=(7, 32)).astype(np.float32))
    graph_LL = rng.random((7, 7)) * (rng.random((7, 7)) < 0.4)
    graph_LL[3] = 0  # related to none
    model.label_input, model.related_LN = (lambda rows: label_LW[rows]), csr_matrix(graph_LL)
    torch.nn.init.normal_(model.table.weight)
    torch.nn.init.normal_(model.related_gate)
    text = model.text_rows(label_LW).detach().numpy().astype(np.float64)
    for label, row in enumerate(model.classifier_table()[0]):
        related = sum(graph_LL[label, other] * text[other] for other in range(7))
        related = related / max(np.linalg.norm(related), 1e-12) * model.related_gate.detach().numpy()
        expected = text[label] + model.table.weight[label].numpy() + related
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_it_is_an_ordinary_classifier(tiny_bert, tiny_params, tmp_path, rng, dtype, gates):
    values = {"model.clf_residual": True, "model.clf_dtype": dtype, "model.clf_gates": gates}
    model = create(tiny_bert, tiny_params(**values), 3)
    if gates:
        torch.nn.init.normal_(model.gates)
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1])
    model.label_input = lambda rows: label_LW[rows]
    model.table.weight.data.copy_(torch.from_numpy(rng.normal(size=(7, 16))))
    rows_LD = torch.from_numpy(model.classifier_table()[0])
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    loaded = UniDEC.load(tmp_path / "model")
    assert not loaded.settings.clf_residual and model.settings.clf_residual
    assert loaded.gates is None and (model.gates is not None) == gates
    got_LD = torch.from_numpy(loaded.classifier_table()[0])
    assert torch.equal(got_LD, rows_LD.to(loaded.table.weight.dtype).float())
    assert torch.equal(encode(loaded), encode(model.eval()))


def test_the_free_vector_and_the_head_get_the_gradient_of_their_sum(residual):
    model, label_LW = residual
    model.head_clf[1].p = 0.0
    model.train()
    ids, weight_SD = torch.tensor([1, 4, 6]), torch.randn(3, 16)
    leaf = model.table.gather(ids)
    (weight_SD * (leaf + model.text_rows(label_LW[ids]))).sum().backward()
    torch.testing.assert_close(leaf.grad, weight_SD)
    w, b = (model.head_clf[0].weight.detach().double().requires_grad_(), model.head_clf[0].bias.detach().double())
    rows = [torch.nn.functional.normalize(w @ x.double() + b, dim=0) for x in label_LW[ids]]
    sum((g.double() * row).sum() for g, row in zip(weight_SD, rows, strict=True)).backward()
    torch.testing.assert_close(model.head_clf[0].weight.grad, w.grad.float(), rtol=1e-4, atol=1e-5)
    model.table.forget()


# -- auxiliary vectors: DEXA -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["de", "both"])
def test_the_labels_searched_have_their_clusters_vectors(tiny_bert, tiny_params, tmp_path, rng, heads):
    """As trained, and as exported; a bundle's model has none, and queries never have."""
    model = create(tiny_bert, tiny_params(**{"model.heads": heads, "model.auxiliary": 2}), 3).eval()
    assert model.auxiliary.shape == (4, 16), "7 labels, at most 2 a cluster, a power of two"
    cluster_labels(model, rng.normal(size=(7, 16)).astype(np.float32), 2, 0, Ranks())
    cluster_L = model.label_cluster.tolist()
    assert np.bincount(cluster_L).tolist().count(2) == 3 and len(set(cluster_L)) == 4
    torch.nn.init.normal_(model.auxiliary)
    tokens = encode_texts([*TEXTS, *TEXTS, TEXTS[0]][:7], tiny_bert, 16)
    x_LW = torch.from_numpy(model.encode("labels", tokens))
    expected = [
        F.normalize(model.head_de[:2](x) + model.auxiliary[cluster_L[label]], dim=0).detach()
        for label, x in enumerate(x_LW)
    ]
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    for one in (model, UniDEC.load(tmp_path / "model")):
        found = torch.from_numpy(one.encode_labels(tokens, batch_size=3))
        torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-6)
    plain = F.normalize(model.head_de[:2](x_LW), dim=1).detach()
    torch.testing.assert_close(torch.from_numpy(model.encode_queries(tokens)[0]), plain, rtol=1e-5, atol=1e-6)
    write_model(tmp_path / "model", tmp_path / "bundled", 9)  # other labels
    assert not {"auxiliary", "label_cluster"} & read_arrays(tmp_path / "bundled").keys()
    bundled = UniDEC.load(tmp_path / "bundled", rows=False)
    torch.testing.assert_close(torch.from_numpy(bundled.encode_labels(tokens)), plain, rtol=1e-5, atol=1e-6)


def test_a_label_tree_is_not_exported(tiny_bert, tiny_params, tmp_path):
    """It only trains: what is exported is an ordinary classifier."""
    values = {"model.heads": "clf", "model.levels": [4, 2], "model.clf_init": "xavier"}
    model = create(tiny_bert, tiny_params(**values), 3).eval()
    assert model.tree.counts == [2, 4] and model.label_cluster.shape == (7,)
    model.start_table()
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    loaded = UniDEC.load(tmp_path / "model")
    assert loaded.settings.levels == [] and loaded.tree is None and loaded.label_cluster is None
    assert np.array_equal(loaded.classifier_table()[0], model.table.weight.numpy())


@pytest.mark.parametrize("bias", [False, True])
def test_labels_of_a_cluster_share_its_row(tiny_bert, tiny_params, tmp_path, bias):
    """Astec's surrogate task: as trained, and as exported, an ordinary classifier."""
    values = {"model.heads": "clf", "model.surrogate": 2, "model.clf_init": "xavier", "model.clf_bias": bias}
    model = create(tiny_bert, tiny_params(**values), 3).eval()
    assert model.table.weight.shape == (4, 16), "7 labels, at most 2 a cluster, a power of two"
    model.start_table()
    assert len(np.unique(model.table.weight)) == 64
    model.label_cluster.copy_(torch.tensor([3, 0, 1, 1, 2, 0, 3]))
    if bias:
        torch.nn.init.normal_(model.bias.weight)
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    loaded = UniDEC.load(tmp_path / "model")
    assert loaded.settings.surrogate == 0 and loaded.label_cluster is None
    for one in (model, loaded):
        weight, biases = one.classifier_table()
        assert (biases is not None) == bias
        for label, cluster in enumerate([3, 0, 1, 1, 2, 0, 3]):
            assert np.array_equal(weight[label], model.table.weight[cluster].numpy())
            assert biases is None or biases[label] == model.bias.weight[cluster, 0]
