"""A model's encoder and heads as an ONNX graph, written node by node from its weights.

Nothing is traced: a graph takes less than a second, and the same weights give the same bytes.

Legend: B texts, T tokens of the longest text, D width of the transformer or of a head, H heads of attention, F tokens
of all texts, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unidec.model.arrays import Bag, ModelArrays
from unidec.model.transformer_parts import Block, Linear, Norm, TransformerParts, UnsupportedModel

OPSET = 17  # the first with LayerNormalization
IR_VERSION = 9  # read by onnxruntime from 1.16 on


class Graph:
    """Nodes and constants of a graph that is being written. Values are names."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def constant(self, array: Any) -> str:
        """A constant."""
        from onnx import numpy_helper

        name = f"c{len(self.constants)}"
        array = np.asarray(array)
        array = np.ascontiguousarray(array).reshape(array.shape)  # without reshape a number would become a vector
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def add(self, kind: str, inputs: Sequence[str], outputs: int = 1, domain: str = "", **settings: Any) -> Any:
        """A node; its output, or the list of them."""
        from onnx import helper

        names = [f"v{len(self.nodes)}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, names, domain=domain, **settings))
        return names[0] if outputs == 1 else names

    def model(self, inputs: dict[str, tuple[Any, list[Any]]], outputs: dict[str, tuple[str, list[Any]]]) -> Any:
        """The finished onnx.ModelProto.

        Args:
            inputs: name -> (numpy dtype, shape with names for what varies).
            outputs: name -> (value, shape); float32.
        """
        from onnx import helper

        for name, (value, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        ins = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)
            for name, (dtype, shape) in inputs.items()
        ]
        outs = [helper.make_tensor_value_info(name, 1, shape) for name, (_, shape) in outputs.items()]
        graph = helper.make_graph(self.nodes, "encoder", ins, outs, self.constants)
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="unidec")


def linear(graph: Graph, x: str, part: Linear) -> str:
    """x W + b."""
    return graph.add("Add", [graph.add("MatMul", [x, graph.constant(part.weight_IO)]), graph.constant(part.bias_O)])


LinearOp = Callable[[Graph, str, Linear], str]


def stack(graph: Graph, hidden: str, mask: str, parts: TransformerParts, product: LinearOp = linear) -> str:
    """The norm of the embeddings and all blocks.

    Args:
        hidden: float32 [B, T, D], of `TransformerParts.hidden`.
        mask: float32 [B, T], 1 for tokens, 0 for padding.
        product: writes the linear layers.

    Returns:
        float32 [B, T, D].
    """
    x = _norm(graph, hidden, parts.norm, parts.epsilon)
    far = graph.add("Mul", [graph.add("Sub", [mask, graph.constant(np.float32(1))]), graph.constant(np.float32(1e9))])
    far_B11T = graph.add("Unsqueeze", [far, graph.constant(np.array([1, 2]))])
    for block in parts.blocks:
        y = product(graph, _attention(graph, product(graph, x, block.qkv), far_B11T, parts, block), block.out)
        x = _norm(graph, graph.add("Add", [x, y]), block.norm, parts.epsilon)
        y = _activation(graph, product(graph, x, block.up), parts.activation)
        y = product(graph, y, block.down)
        x = _norm(graph, graph.add("Add", [x, y]), block.last_norm, parts.epsilon)
    return x


def _norm(graph: Graph, x: str, norm: Norm, epsilon: float) -> str:
    return graph.add(
        "LayerNormalization", [x, graph.constant(norm.gain_D), graph.constant(norm.shift_D)], axis=-1, epsilon=epsilon
    )


def _attention(graph: Graph, qkv: str, far_B11T: str, parts: TransformerParts, block: Block) -> str:
    """Softmax attention of all heads, float32 [B, T, D]; the queries are scaled already."""
    width = block.qkv.weight_IO.shape[1] // 3
    shape = graph.constant(np.array([0, 0, 3 * parts.num_heads, width // parts.num_heads]))
    each = graph.add("Transpose", [graph.add("Reshape", [qkv, shape])], perm=[0, 2, 1, 3])
    query, key, value = graph.add("Split", [each], 3, axis=1)
    score = graph.add("MatMul", [query, graph.add("Transpose", [key], perm=[0, 1, 3, 2])])
    share = graph.add("Softmax", [graph.add("Add", [score, far_B11T])], axis=-1)
    mixed = graph.add("Transpose", [graph.add("MatMul", [share, value])], perm=[0, 2, 1, 3])
    return graph.add("Reshape", [mixed, graph.constant(np.array([0, 0, width]))])


def _activation(graph: Graph, x: str, kind: str) -> str:
    if kind == "relu":
        return graph.add("Relu", [x])
    # x / 2 (1 + erf(x / sqrt 2)), in the order in which onnxruntime knows it and makes one step of it
    error = graph.add("Erf", [graph.add("Div", [x, graph.constant(np.float32(np.sqrt(2)))])])
    once = graph.add("Mul", [x, graph.add("Add", [error, graph.constant(np.float32(1))])])
    return graph.add("Mul", [once, graph.constant(np.float32(0.5))])


def pooled(graph: Graph, x: str, mask: str, pooling: str) -> str:
    """One vector a text, float32 [B, D]: the mean over tokens, or the first token's."""
    if pooling == "cls":
        return graph.add("Gather", [x, graph.constant(np.int64(0))], axis=1)
    last = graph.constant(np.array([-1]))
    total = graph.add("MatMul", [graph.add("Unsqueeze", [mask, graph.constant(np.array([1]))]), x])
    total = graph.add("Squeeze", [total, graph.constant(np.array([1]))])
    count = graph.add("ReduceSum", [mask, last], keepdims=1)
    return graph.add("Div", [total, graph.add("Max", [count, graph.constant(np.float32(1))])])


def stack_graph(parts: TransformerParts, pooling: str, product: LinearOp = linear) -> Any:
    """The transformer above its embeddings: hidden float32 [B, T, D] and mask float32 [B, T] to vectors [B, D]."""
    graph = Graph()
    width = parts.words_VD.shape[1]
    x = stack(graph, "hidden", "mask", parts, product)
    return graph.model(
        {"hidden": (np.float32, ["B", "T", width]), "mask": (np.float32, ["B", "T"])},
        {"vectors": (pooled(graph, x, "mask", pooling), ["B", width])},
    )


def encoder_graph(model: ModelArrays) -> Any:
    """A whole model: token ids to both heads' vectors, in standard operators alone.

    Inputs input_ids and attention_mask, int64 [B, T], as the tokenizer gives them (padding on the right). Outputs of
    the heads there are: de float32 [B, D] at unit length, clf float32 [B, D]. Float32 throughout; weights are in the
    file.

    Raises:
        UnsupportedModel: a transformer that `transformer_parts` does not know, or a bag of whole words
            (`encoder.bag_words`), whose rows are found by hashes that ONNX has no operators for.
    """
    graph = Graph()
    mask = graph.add("Cast", ["attention_mask"], to=1)
    parts: list[str] = []
    if (found := model.transformer) is not None:
        x = stack(graph, _hidden(graph, found), mask, found)
        x = pooled(graph, x, mask, model.encoder.pooling)
        parts.append(_unit(graph, x) if model.unit_vectors else x)
    if (bag := model.bag()) is not None:
        parts += _bag(graph, bag, mask)
    x = graph.add("Concat", parts, axis=-1) if len(parts) > 1 else parts[0]
    if (residual := model.residual()) is not None:
        y = _activation(graph, linear(graph, x, residual[0]), "gelu")
        x = graph.add("Add", [x, linear(graph, y, residual[1])])
    outputs = {}
    for name, head in model.heads().items():
        y = linear(graph, x, head)
        y = _unit(graph, graph.add("Tanh", [y])) if name == "de" else y
        outputs[name] = (y, ["B", head.bias_O.shape[0]])
    return graph.model({name: (np.int64, ["B", "T"]) for name in ("input_ids", "attention_mask")}, outputs)


def _hidden(graph: Graph, parts: TransformerParts) -> str:
    """`TransformerParts.hidden` of input_ids."""
    words = graph.add("Gather", [graph.constant(parts.words_VD), "input_ids"])
    table = graph.constant(parts.places_PD)
    if parts.pad_id < 0:
        length = graph.add("Gather", [graph.add("Shape", ["input_ids"]), graph.constant(np.array([1]))])
        first = graph.constant(np.array([parts.first_place]))
        places = graph.add("Slice", [table, first, graph.add("Add", [first, length]), graph.constant(np.array([0]))])
        return graph.add("Add", [words, places])
    pad = graph.constant(np.int64(parts.pad_id))
    is_token = graph.add("Cast", [graph.add("Not", [graph.add("Equal", ["input_ids", pad])])], to=7)
    counted = graph.add("Mul", [graph.add("CumSum", [is_token, graph.constant(np.int64(1))]), is_token])
    return graph.add("Add", [words, graph.add("Gather", [table, graph.add("Add", [counted, pad])])])


def _bag(graph: Graph, bag: Bag, mask: str) -> list[str]:
    """`BagEncoder`: its parts, float32 [B, D] each."""
    if bag.num_words:
        raise UnsupportedModel(
            "a bag of whole words cannot be written as a graph", where="encoder.bag_words", got=bag.num_words,
            expected=0,
        )  # fmt: skip
    rows = graph.add("Gather", [graph.constant(bag.embedding_VD), "input_ids"])
    weights = [graph.add("Mul", [graph.add("Gather", [graph.constant(bag.weight_V), "input_ids"]), mask])]
    if bag.head:
        first = graph.add("CumSum", [mask, graph.constant(np.int64(1))])  # padding has no weight whatever its place
        near = graph.add("LessOrEqual", [first, graph.constant(np.float32(bag.head))])
        weights.append(graph.add("Mul", [weights[0], graph.add("Cast", [near], to=1)]))
    out = []
    for weight in weights:
        row = graph.add("Unsqueeze", [weight, graph.constant(np.array([1]))])
        total = graph.add("Squeeze", [graph.add("MatMul", [row, rows]), graph.constant(np.array([1]))])
        out.append(_unit(graph, total))
    return out


def _unit(graph: Graph, x: str) -> str:
    """Rows divided by their length, as torch.nn.functional.normalize."""
    length = graph.add("ReduceL2", [x], axes=[-1], keepdims=1)
    return graph.add("Div", [x, graph.add("Max", [length, graph.constant(np.float32(1e-12))])])
