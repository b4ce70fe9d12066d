"""Exports a model's transformer as ONNX graphs, with torch's exporter and onnxruntime's
quantisation.

The TorchScript exporter (`dynamo=False`) is used because the newer one needs onnxscript.

Legend: B texts, T tokens of the longest text, D width of the transformer, I inputs of a linear
layer, L layers of the same input.
"""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.data.chunks import LONG
from unidec.model.arrays import GRAPH, INT8_GRAPH, MAX_BYTES
from unidec.model.encoder import TextEncoder
from unidec.model.onnx_session import open_session
from unidec.model.packed import Padded
from unidec.model.unidec import UniDEC

OPSET = 18
# alpha of SmoothQuant: how much of the differences in scale moves from a layer's inputs to its
# weights
SMOOTHING = 0.9
# between outputs of graph and model: rounding errors are far smaller, those of wrong traces larger
TOLERANCE = 1e-3
_FAILURES = (ImportError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)
log = logging.getLogger(__name__)
Inputs = dict[str, Any]


class TransformerGraph(nn.Module):
    """Maps token ids and mask, int64 [B, T], to the transformer's pooled vectors float32 [B, D]."""

    transformer: Any

    def __init__(self, encoder: TextEncoder) -> None:
        super().__init__()
        assert encoder.transformer is not None
        self.transformer = encoder.transformer.transformer
        self.pooling = encoder.transformer.pooling
        self.dense = encoder.transformer.dense
        self.width = encoder.transformer.width
        self.unit_vectors = encoder.unit_vectors
        self.max_tokens = encoder.settings.transformer_tokens or None
        self.transformer.set_attn_implementation("eager")

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        ids_BT = input_ids[:, : self.max_tokens]
        mask_BT = attention_mask[:, : self.max_tokens]
        seen: Any = mask_BT
        if getattr(self.transformer.config, "use_bidirectional_attention", False):
            seen = _masks(mask_BT, self.transformer.config.sliding_window)
        hidden = self.transformer(input_ids=ids_BT, attention_mask=seen).last_hidden_state
        vectors_BD = self.dense(Padded(ids_BT, mask_BT).pool(hidden, self.pooling))
        vectors_BD = vectors_BD[:, : self.width]
        return F.normalize(vectors_BD, dim=-1) if self.unit_vectors else vectors_BD


def _masks(mask_BT: Tensor, window: int) -> dict[str, Tensor]:
    """Masks of Gemma 3's layers where attention is not causal: torch cannot trace transformers' own
    code for them.
    """
    place_T = torch.arange(mask_BT.shape[1])
    is_near_TT = (place_T[:, None] - place_T).abs() < window
    all_B1TT = mask_BT[:, None, None, :].bool() & (place_T >= 0)[:, None]
    lowest = torch.finfo(torch.float32).min
    masks = {"full_attention": all_B1TT, "sliding_attention": all_B1TT & is_near_TT}
    return {name: (~mask).float() * lowest for name, mask in masks.items()}


def export_graph(module: nn.Module, path: Path, outputs: Sequence[str]) -> None:
    """Write a module with inputs input_ids and attention_mask, int64 [B, T], as one ONNX file."""
    inputs = {
        "input_ids": torch.ones(2, 5, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    }
    axes = {name: {0: "B", 1: "T"} for name in inputs} | {name: {0: "B"} for name in outputs}
    with warnings.catch_warnings(), torch.no_grad():
        # about the deprecated exporter and each shape that the trace fixes
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(),
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes=axes,
            opset_version=OPSET,
            dynamo=False,
        )


def write_graphs(model: UniDEC, folder: Path, texts: Sequence[str]) -> list[str]:
    """Write a model's transformer as `GRAPH`, and with linear layers in 8 bits as `INT8_GRAPH`.

    A bag alone needs no graph. If the transformer cannot be exported, a warning is logged and no
    file is written: queries are then encoded by torch.

    Args:
        model: on the CPU; its transformer is modified.
        texts: calibrate the quantisation, for example titles of labels.

    Returns:
        The names of the files.
    """
    if model.encoder.transformer is None:
        return []
    size = sum(4 * parameter.numel() for parameter in model.encoder.transformer.parameters())
    graph = folder / GRAPH
    int8_graph = folder / INT8_GRAPH
    try:
        if size > MAX_BYTES:
            raise ValueError(f"the weights have {size} bytes, one file can hold {MAX_BYTES}")
        module = TransformerGraph(model.encoder).eval()
        inputs = _inputs(model, texts)
        untraced = _untraced(model.max_length, module.transformer.config.vocab_size)
        with torch.no_grad():
            expected = module(*map(torch.from_numpy, untraced.values())).numpy()
        _smooth(module, inputs)
        export_graph(module, graph, ["vectors"])
        _check(graph, untraced, expected)
        _quantise(graph, int8_graph, inputs)
        if not _opens(int8_graph):
            int8_graph.unlink()
            log.warning("onnxruntime cannot open the 8-bit graph: torch or onnx encodes queries")
            return [GRAPH]
    except _FAILURES as error:
        graph.unlink(missing_ok=True)
        int8_graph.unlink(missing_ok=True)
        log.warning("no ONNX graph of the transformer, torch will encode queries: %s", error)
        return []
    return [GRAPH, INT8_GRAPH]


def _inputs(model: UniDEC, texts: Sequence[str]) -> list[Inputs]:
    """Batches of texts of the same length: padding would distort the scales of the quantisation."""
    tokens = model.tokens(texts or ["text"], "queries").for_transformer
    lengths_B = tokens.lengths()
    batches = []
    for length in np.unique(lengths_B[lengths_B > 0]):
        ids, mask = tokens.batch(np.flatnonzero(lengths_B == length))
        batches.append({"input_ids": ids, "attention_mask": mask.astype(np.int64)})
    return batches


def _untraced(max_length: int, num_tokens: int) -> Inputs:
    """Inputs of untraced shapes: texts of full length, of one token, and of half length."""
    max_length = min(max_length, LONG)  # attention grows with the square of the length
    lengths_B = np.array([max_length, 1, max(1, max_length // 2)])
    mask_BT = (np.arange(max_length) < lengths_B[:, None]).astype(np.int64)
    ids_BT = np.arange(mask_BT.size).reshape(mask_BT.shape) % num_tokens
    return {"input_ids": ids_BT * mask_BT, "attention_mask": mask_BT}


def _check(path: Path, inputs: Inputs, expected: npt.NDArray[np.float32]) -> None:
    """Raise ValueError if the graph's output differs from the model's."""
    (got,) = open_session(path).run(None, inputs)
    if not np.allclose(got, expected, rtol=TOLERANCE, atol=TOLERANCE):
        most = np.abs(got - expected).max()
        raise ValueError(f"the exported graph differs from the model by {most:.2g}")


def _opens(path: Path) -> bool:
    """Whether onnxruntime opens a graph as a server does; it cannot open DeBERTa's."""
    try:
        open_session(path)
    except Exception:  # onnxruntime's errors have no common base class
        return False
    return True


class _SmoothLinear(nn.Module):
    """A linear layer that divides its inputs by scales and multiplies its weights by them, so that
    inputs of similar magnitude lose less in 8 bits (SmoothQuant, Xiao et al. 2023, equation 4).

    Args:
        scale_I: the scales. inverse_I: their inverses, a parameter that layers can share.
    """

    def __init__(self, layer: nn.Linear, scale_I: Tensor, inverse_I: nn.Parameter) -> None:
        super().__init__()
        self.inverse_I = inverse_I
        self.weight_OI = nn.Parameter(layer.weight.detach() * scale_I, requires_grad=False)
        self.bias = layer.bias

    @property
    def weight(self) -> Tensor:
        """Needed by transformers, which reads its dtype."""
        return self.weight_OI

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.inverse_I, self.weight_OI, self.bias)


def _smooth(module: nn.Module, inputs: Sequence[Inputs]) -> None:
    """Replace linear layers by `_SmoothLinear`, with scales from their largest inputs on some
    batches. Layers of the same input (those of queries, keys and values) have the same scales, so
    that it is scaled and quantised once.
    """
    largest: dict[nn.Linear, Tensor] = {}
    groups: list[tuple[Tensor, list[nn.Linear]]] = []  # an input and its layers

    def record(layer: nn.Linear, args: tuple[Tensor, ...]) -> None:
        x = args[0]
        largest_I = x.abs().flatten(0, -2).amax(0)
        if layer in largest:
            largest_I = torch.maximum(largest_I, largest[layer])
        elif groups and x is groups[-1][0]:
            groups[-1][1].append(layer)
        else:
            groups.append((x, [layer]))
        largest[layer] = largest_I

    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    with torch.no_grad():
        for batch in inputs:
            module(*map(torch.from_numpy, batch.values()))
    for hook in hooks:
        hook.remove()
    names = {layer: name for name, layer in module.named_modules()}
    for _, group in groups:
        largest_LI = torch.stack([layer.weight.detach().abs().amax(0) for layer in group])
        weight_I = largest_LI.amax(0).clamp_min(1e-5)
        input_I = largest[group[0]].clamp_min(1e-4)
        scale_I = input_I**SMOOTHING / weight_I ** (1 - SMOOTHING)
        inverse_I = nn.Parameter(1 / scale_I, requires_grad=False)
        for layer in group:
            module.set_submodule(names[layer], _SmoothLinear(layer, scale_I, inverse_I))


def _quantise(source: Path, target: Path, inputs: Sequence[Inputs]) -> None:
    """Quantise linear layers to 8 bits; products inside attention stay in 32 bits."""
    import onnx
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static  # type: ignore[import-untyped]
    from onnxruntime.quantization.shape_inference import quant_pre_process  # type: ignore[import-untyped]

    quant_pre_process(source, target, skip_symbolic_shape=True)
    graph = onnx.load(target)
    constants = {constant.name for constant in graph.graph.initializer}
    products = [node for node in graph.graph.node if node.op_type == "MatMul"]
    linear = [node.name for node in products if node.input[1] in constants]
    if not linear:  # of static vectors
        shutil.copyfile(source, target)
        return
    remaining = iter(inputs)
    quantize_static(
        graph,
        target,
        SimpleNamespace(get_next=lambda: next(remaining, None)),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["MatMul"],
        nodes_to_quantize=linear,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        extra_options={"OpTypesToExcludeOutputQuantization": ["MatMul"]},
    )
