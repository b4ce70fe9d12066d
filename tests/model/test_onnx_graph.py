"""Graphs written node by node against the transformers they come from."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unidec.model.onnx_graph import stack_graph
from unidec.model.onnx_int8 import ROOM, Int8Products, input_scales, rounded, watching_graph
from unidec.model.transformer_parts import UnsupportedModel, transformer_parts

ort = pytest.importorskip("onnxruntime")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
         "vocab_size": 90, "max_position_embeddings": 40, "initializer_range": 0.2}  # fmt: skip


def _transformer(kind: str, **more):
    import transformers as t

    torch.manual_seed(3)
    if kind == "distilbert":
        config = t.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=90, max_position_embeddings=40,
            initializer_range=0.2, **more,
        )  # fmt: skip
        return t.DistilBertModel(config).eval()
    made = {"bert": (t.BertConfig, t.BertModel), "roberta": (t.RobertaConfig, t.RobertaModel),
            "xlm-roberta": (t.XLMRobertaConfig, t.XLMRobertaModel)}  # fmt: skip
    config, model = made[kind]
    return model(config(**SIZES, **more), add_pooling_layer=False).eval()


def _parts(transformer):
    state = {name: value.detach().numpy() for name, value in transformer.state_dict().items()}
    return transformer_parts(transformer.config.to_dict(), state)


def _batch(rng: np.random.Generator, pad: int) -> tuple[np.ndarray, np.ndarray]:
    mask = np.arange(9) < np.array([9, 1, 4, 7])[:, None]
    return np.where(mask, rng.integers(5, 90, mask.shape), pad), mask


def _session(model):
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta", "distilbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_graph_computes_what_the_transformer_does(kind, pooling):
    from unidec.model.encoder import pool_tokens

    transformer = _transformer(kind)
    parts = _parts(transformer)
    ids, mask = _batch(np.random.default_rng(0), pad=max(parts.pad_id, 0))
    with torch.no_grad():
        given = torch.from_numpy(mask)
        hidden = transformer(input_ids=torch.from_numpy(ids), attention_mask=given.long()).last_hidden_state
        expected = pool_tokens(hidden, given, pooling).numpy()
    session = _session(stack_graph(parts, pooling))
    whole = session.run(None, {"hidden": parts.hidden(ids), "mask": mask.astype(np.float32)})[0]
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=1e-5)
    alone = session.run(None, {"hidden": parts.hidden(ids[2:3, :4]), "mask": np.ones((1, 4), np.float32)})[0]
    np.testing.assert_allclose(alone[0], expected[2], rtol=1e-4, atol=1e-5)


def test_other_activations_and_architectures():
    import transformers as t

    assert _parts(_transformer("bert", hidden_act="relu")).activation == "relu"
    small = {name: SIZES[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")}
    for wrong in (
        _transformer("bert", hidden_act="gelu_new"),
        _transformer("bert", is_decoder=True),
        t.MPNetModel(t.MPNetConfig(**small, intermediate_size=48), add_pooling_layer=False),
        t.BertModel(t.BertConfig(**SIZES)),
    ):
        with pytest.raises(UnsupportedModel):
            _parts(wrong)


def test_the_same_weights_give_the_same_bytes():
    parts = _parts(_transformer("bert"))
    assert stack_graph(parts, "mean").SerializeToString() == stack_graph(parts, "mean").SerializeToString()


def test_eight_bits_are_close_and_do_not_depend_on_the_batch():
    rng = np.random.default_rng(1)
    parts = _parts(_transformer("bert"))
    ids, mask = _batch(rng, 0)
    feed = {"hidden": parts.hidden(ids), "mask": mask.astype(np.float32)}
    most = _session(watching_graph(parts)).run(None, feed)
    assert len(most) == 4 * len(parts.blocks)
    expected = _session(stack_graph(parts, "mean")).run(None, feed)[0]
    session = _session(stack_graph(parts, "mean", Int8Products(most)))
    got = session.run(None, feed)[0]
    cosine = (got * expected).sum(1) / np.linalg.norm(got, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.min() > 0.999
    for row, length in enumerate(mask.sum(axis=1)):
        alone = session.run(
            None, {"hidden": feed["hidden"][row : row + 1, :length], "mask": feed["mask"][row : row + 1, :length]}
        )
        np.testing.assert_allclose(alone[0][0], got[row], rtol=1e-4, atol=1e-5)


def test_padding_is_not_watched():
    parts = _parts(_transformer("bert"))
    ids, mask = _batch(np.random.default_rng(1), 0)
    session = _session(watching_graph(parts))
    few = session.run(None, {"hidden": parts.hidden(ids), "mask": mask.astype(np.float32)})
    each = [
        session.run(None, {"hidden": parts.hidden(ids[i : i + 1, :n]), "mask": np.ones((1, n), np.float32)})
        for i, n in enumerate(mask.sum(axis=1))
    ]
    for layer, most in enumerate(few):
        np.testing.assert_allclose(most, np.max([one[layer] for one in each], axis=0), rtol=1e-4, atol=1e-5)


def test_scales_hold_what_was_seen():
    rng = np.random.default_rng(2)
    most, weight = np.abs(rng.normal(size=20)).astype(np.float32) * 9, rng.normal(size=(20, 7)).astype(np.float32)
    most[3], weight[:, 2], weight[4] = 0, 0, 0  # an input that was never there, an output and an input without weights
    scale = input_scales(most, weight)
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert (most / scale).max() == pytest.approx(127 / ROOM, rel=1e-5)
    whole, scale_out = rounded(weight)
    assert np.isfinite(scale_out).all() and np.abs(whole * scale_out - weight).max() <= 0.5001 * scale_out.max()
    assert (np.abs(whole).max(axis=0) == np.where(np.arange(7) == 2, 0, 127)).all()
