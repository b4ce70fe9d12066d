"""Linear layers in 8 bits: fixed scales, found on some texts, so that a text's vector does not depend on its batch.

Legend: I inputs of a layer, O outputs.

    y = (q(x / s) W') t + b,   W' = q(diag(s) W / t)

with q rounding to -127 to 127, s_I a scale for each input and t_O for each output. s takes most of what differs between
inputs out of x and puts it into W (SmoothQuant, Xiao et al. 2023, equation 4): few inputs of a transformer's layers are
many times as large as the others, and one scale for all would leave the others few bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.model.onnx_graph import Graph, linear, stack
from unidec.model.transformer_parts import Floats, Linear, TransformerParts

SHIFT = 0.9  # how much of the differences between inputs goes into the weights: 0 nothing, 1 all
ROOM = 1.1  # above the largest input that was seen
_MOST = 127


def watching_graph(parts: TransformerParts) -> Any:
    """The transformer with, instead of its vectors, the largest absolute value of each input of each linear layer.

    Inputs as `onnx_graph.stack_graph`'s; outputs float32 [I] each, in the order of the layers. Padding does not count.
    """
    graph = Graph()
    outputs: dict[str, tuple[str, list[Any]]] = {}
    width = parts.words_VD.shape[1]

    def watched(graph: Graph, x: str, part: Linear) -> str:
        counted = graph.add("Mul", [x, graph.add("Unsqueeze", ["mask", graph.constant(np.array([2]))])])
        most = graph.add("ReduceMax", [graph.add("Abs", [counted])], axes=[0, 1], keepdims=0)
        outputs[f"most_{len(outputs)}"] = (most, [part.weight_IO.shape[0]])
        return linear(graph, x, part)

    stack(graph, "hidden", "mask", parts, watched)
    return graph.model({"hidden": (np.float32, ["B", "T", width]), "mask": (np.float32, ["B", "T"])}, outputs)


class Int8Products:
    """Writes linear layers in 8 bits, one after the other in the order of `watching_graph`.

    Args:
        most: float32 [I] for each layer, what the largest absolute inputs are.
    """

    def __init__(self, most: list[Floats]) -> None:
        self._most = iter(most)

    def __call__(self, graph: Graph, x: str, part: Linear) -> str:
        """x W + b, float32, with onnxruntime's own operator."""
        scale_I = input_scales(next(self._most), part.weight_IO)
        weight_IO, scale_O = rounded(part.weight_IO * scale_I[:, None])
        small = graph.add("Mul", [x, graph.constant(np.float32(1) / scale_I)])
        one, middle = graph.constant(np.float32(1)), graph.constant(np.uint8(128))
        bytes_ = graph.add("QuantizeLinear", [small, one, middle])
        values = [weight_IO, np.float32(1), scale_O, np.uint8(128), np.zeros(len(scale_O), np.int8), part.bias_O]
        names = [graph.constant(value) for value in values]
        return graph.add("MatMulIntegerToFloat", [bytes_, *names], domain="com.microsoft")


def input_scales(most_I: Floats, weight_IO: Floats) -> Floats:
    """s float32 [I]: an input of `most_I` times `ROOM` is at most 127 s, the largest just that."""
    most_I = np.maximum(most_I, np.float32(1e-4))
    weight_I = np.maximum(np.abs(weight_IO).max(axis=1), np.float32(1e-5))
    scale_I = most_I**SHIFT / weight_I ** (1 - SHIFT)
    return (scale_I * ((most_I / scale_I).max() * ROOM / _MOST)).astype(np.float32)


def rounded(weight_IO: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Weights as int8 [I, O] and the scale of each output, float32 [O]."""
    scale_O = (np.abs(weight_IO).max(axis=0) / _MOST).astype(np.float32)
    scale_O[scale_O == 0] = 1
    return np.rint(weight_IO / scale_O).astype(np.int8), scale_O
