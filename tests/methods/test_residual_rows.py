"""Residual classifier rows against loops: text and free vector, gates, related labels' and queries'
texts; export.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.untrained_model import TEXTS, create_model, encode
from scipy.sparse import csr_matrix

from unidec.data.storage import write_folder
from unidec.methods.assembly import export_of
from unidec.methods.graph_rows import GraphTexts
from unidec.methods.query_rows import QueryTexts
from unidec.methods.residual_rows import ResidualRows
from unidec.model.unidec import KIND, VERSION, UniDEC


@pytest.fixture
def residual(tiny_bert, tiny_params, rng):
    """A residual classifier with free vectors of seven labels, and the encoder's outputs of their
    texts.
    """
    model = create_model(
        tiny_bert, tiny_params(**{"model.clf_residual": True, "model.dropout": 0.5}), 3
    )
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1]) + torch.from_numpy(
        rng.normal(size=(7, 32)).astype(np.float32)
    )
    return model, label_LW, ResidualRows(model, lambda source, rows: label_LW[rows])


def test_free_vectors_start_at_zero_and_rows_at_the_texts(residual):
    model, label_LW, rows = residual
    assert rows.holds_text and not model.table.weight.any()
    rows_LD = F.normalize(
        F.linear(label_LW, model.head_clf[0].weight, model.head_clf[0].bias), dim=1
    )
    torch.testing.assert_close(torch.from_numpy(rows.exported()[0]), rows_LD.detach())


@pytest.mark.parametrize("block", [2, 7, 100])
def test_whole_rows_are_text_and_free_vector(residual, monkeypatch, block, rng):
    monkeypatch.setattr("unidec.methods.residual_rows.START_BLOCK", block)
    model, label_LW, rows = residual
    free_LD = torch.from_numpy(rng.normal(size=(7, 16)).astype(np.float32))
    model.table.weight.data.copy_(free_LD)
    for mode in (True, False):  # without dropout in either
        model.train(mode)
        expected = [
            free + F.normalize(model.head_clf[0].weight @ x + model.head_clf[0].bias, dim=0)
            for x, free in zip(label_LW, free_LD, strict=True)
        ]
        got_LD = torch.from_numpy(rows.exported()[0])
        torch.testing.assert_close(
            got_LD,
            torch.stack(expected).detach(),
            rtol=1e-5,
            atol=1e-6,
        )
    torch.testing.assert_close(
        model.text_rows(label_LW),
        got_LD - free_LD,
        rtol=1e-4,
        atol=1e-6,
    )
    assert torch.equal(model.table.weight, free_LD), "the free vectors stay"


@pytest.mark.parametrize("block", [2, 100])
def test_whole_rows_have_the_mean_of_all_their_queries(
    tiny_bert, tiny_params, rng, monkeypatch, block
):
    monkeypatch.setattr("unidec.methods.residual_rows.START_BLOCK", block)
    values = {
        "model.heads": "clf",
        "index.space": "clf",
        "model.clf_residual": True,
        "model.clf_queries": 2,
    }
    model = create_model(tiny_bert, tiny_params(**values), 3).eval()
    assert model.related_gate.tolist() == [1.0] * len(model.related_gate)
    # of 7 labels, then of 5 queries
    texts_NW = torch.from_numpy(rng.normal(size=(12, 32)).astype(np.float32))
    has_LN = rng.random((7, 5)) < 0.5
    # a label without queries, and one with more than a step draws
    has_LN[3] = False
    has_LN[4] = True
    first = {"labels": 0, "queries": 7}
    queries = QueryTexts(csr_matrix(has_LN.astype(np.float32)), np.arange(5), 2)
    rows = ResidualRows(model, lambda source, rows: texts_NW[first[source] + rows], queries)
    torch.nn.init.normal_(model.related_gate)
    text = model.text_rows(texts_NW).detach().numpy().astype(np.float64)
    for label, row in enumerate(rows.exported()[0]):
        queries = [text[7 + query] for query in range(5) if has_LN[label, query]]
        mean = sum(queries) / np.linalg.norm(sum(queries)) if queries else 0.0
        expected = text[label] + mean * model.related_gate.detach().numpy()
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", [2, 100])
def test_whole_rows_have_the_texts_of_all_related_labels(
    tiny_bert, tiny_params, rng, monkeypatch, block
):
    monkeypatch.setattr("unidec.methods.residual_rows.START_BLOCK", block)
    model = create_model(
        tiny_bert, tiny_params(**{"model.clf_residual": True, "model.clf_graph": True}), 3
    ).eval()
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1]) + torch.from_numpy(
        rng.normal(size=(7, 32)).astype(np.float32)
    )
    graph_LL = rng.random((7, 7)) * (rng.random((7, 7)) < 0.4)
    graph_LL[3] = 0  # related to none
    rows = ResidualRows(
        model, lambda source, rows: label_LW[rows], GraphTexts(csr_matrix(graph_LL))
    )
    torch.nn.init.normal_(model.table.weight)
    torch.nn.init.normal_(model.related_gate)
    text = model.text_rows(label_LW).detach().numpy().astype(np.float64)
    for label, row in enumerate(rows.exported()[0]):
        related = sum(graph_LL[label, other] * text[other] for other in range(7) if other != label)
        related = (
            related / max(np.linalg.norm(related), 1e-12) * model.related_gate.detach().numpy()
        )
        expected = text[label] + model.table.weight[label].numpy() + related
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gates", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_exported_it_is_an_ordinary_classifier(tiny_bert, tiny_params, tmp_path, rng, dtype, gates):
    values = {"model.clf_residual": True, "model.clf_dtype": dtype, "model.clf_gates": gates}
    model = create_model(tiny_bert, tiny_params(**values), 3)
    if gates:
        torch.nn.init.normal_(model.gates)
    label_LW = encode(model, TEXTS + TEXTS + TEXTS[:1])
    rows = ResidualRows(model, lambda source, rows: label_LW[rows])
    model.table.weight.data.copy_(torch.from_numpy(rng.normal(size=(7, 16))))
    rows_LD = torch.from_numpy(rows.exported()[0])
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out, exported=export_of(model.settings, rows))
    loaded = UniDEC.load(tmp_path / "model")
    assert not loaded.settings.clf_residual and model.settings.clf_residual
    assert "gates" not in loaded.state_dict()
    assert ("gates" in model.state_dict()) == gates
    got_LD = torch.from_numpy(loaded.classifier_table()[0])
    expected = rows_LD.to(loaded.table.weight.dtype).float()
    assert torch.equal(got_LD, expected)
    assert torch.equal(encode(loaded), encode(model.eval()))


def test_the_free_vector_and_the_head_get_the_gradient_of_their_sum(residual):
    model, label_LW, _ = residual
    model.head_clf[1].p = 0.0
    model.train()
    ids = torch.tensor([1, 4, 6])
    weight_SD = torch.randn(3, 16)
    leaf = model.table.gather(ids)
    (weight_SD * (leaf + model.text_rows(label_LW[ids]))).sum().backward()
    torch.testing.assert_close(leaf.grad, weight_SD)
    w = model.head_clf[0].weight.detach().double().requires_grad_()
    b = model.head_clf[0].bias.detach().double()
    rows = [torch.nn.functional.normalize(w @ x.double() + b, dim=0) for x in label_LW[ids]]
    sum((g.double() * row).sum() for g, row in zip(weight_SD, rows, strict=True)).backward()
    torch.testing.assert_close(
        model.head_clf[0].weight.grad,
        w.grad.float(),
        rtol=1e-4,
        atol=1e-5,
    )
    model.table.forget()
