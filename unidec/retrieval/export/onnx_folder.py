"""Encoder and heads as one ONNX file, for programs without Python, torch or unidec.

Legend: B texts, T tokens of the longest, D width of a head, D' width of what is searched.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from unidec.data.storage import write_folder, write_json
from unidec.errors import ConfigError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.export import readme
from unidec.retrieval.export.heads import Scored
from unidec.retrieval.export.sentence import refuse_foreign

KIND = "onnx-export"
VERSION = 1
MAX_BYTES = (1 << 31) - (1 << 20)  # protobuf's bound on one file
_EPSILON = 1e-12  # as torch's normalize has it


def export_onnx(bundle: Bundle, folder: str | os.PathLike[str], *, head: str | None = None) -> dict[str, Any]:
    """Write model.onnx, tokenizer.json and README.md into a folder.

    Inputs: `input_ids`, `attention_mask` int64 [B, T], padded on the right. Outputs float32: `de` and `clf` [B, D],
    those that the model has; `vector` [B, D'], whose inner product with the vectors of `export_vectors` of the same
    head is the score that the bundle gives (without votes of training queries). Standard operators only.

    Args:
        bundle: a loaded bundle, on the CPU.
        folder: replaced where it is there already, and only if it is an earlier export.
        head: of `vector`: "both", "de" or "clf"; None: what the bundle ranks by.

    Returns:
        {"head", "width", "outputs", "opset", "bytes", "output"}.

    Raises:
        DataError: no such head.
        ConfigError: onnx is missing, an encoder that a graph cannot say, a folder that is something else.
    """
    try:
        import onnx
    except ImportError as error:
        fix = "pip install 'unidec-xmc[serve]'"
        raise ConfigError("onnx is not installed", where="unidec export onnx", fix=fix) from error
    from unidec.model.arrays import ModelArrays
    from unidec.model.onnx_graph import encoder_graph

    score = Scored.of(bundle.info, head)
    refuse_foreign(Path(folder))
    graph = encoder_graph(ModelArrays.of(bundle.about))
    add_vector(graph, score)
    graph.doc_string = f"query encoder of the unidec bundle {bundle.sha256}"
    onnx.checker.check_model(graph)
    if (size := graph.ByteSize()) > MAX_BYTES:
        fix = "unidec export sentence-transformers has no such bound"
        raise ConfigError(
            "one ONNX file cannot hold this", where=str(bundle.path), got=size, expected=MAX_BYTES, fix=fix
        )
    outputs = [output.name for output in graph.graph.output]
    opset = next(entry.version for entry in graph.opset_import if entry.domain == "")
    meta = {"bundle_sha256": bundle.sha256, "outputs": outputs, **score.facts()}
    with write_folder(folder, KIND, VERSION, meta, num_bytes=size) as out:
        (out.path / "model.onnx").write_bytes(graph.SerializeToString(deterministic=True))
        write_tokenizer(out.path / "tokenizer.json", bundle.about)
        write_json(out.path / "config.json", meta | {"max_length": bundle.about.max_length, "opset": opset})
        (out.path / "README.md").write_text(readme.onnx(bundle, score, outputs, opset), encoding="utf-8")
    facts = {"head": score.head, "width": score.width, "outputs": outputs, "opset": opset, "bytes": size}
    return facts | {"output": str(folder)}


def write_tokenizer(path: Path, model: Any) -> None:
    """tokenizer.json with our truncation and padding in it, so that `encode_batch` gives what the model takes."""
    from tokenizers import Tokenizer

    from unidec.data.tokens import TextTokenizer

    ours = TextTokenizer(model.tokenizer_folder, model.max_length)
    tokenizer = Tokenizer.from_file(str(ours.file))
    tokenizer.enable_truncation(model.max_length, stride=0, strategy="longest_first", direction="right")
    token = tokenizer.id_to_token(ours.pad_id)
    tokenizer.enable_padding(direction="right", pad_id=ours.pad_id, pad_token=token, length=None)
    tokenizer.save(str(path))


def add_vector(graph: Any, score: Scored) -> None:
    """Appends the output `vector` float32 [B, D'] to a graph with outputs `de` and `clf`: `space.query_vectors`."""
    from onnx import TensorProto, helper

    nodes, parts = [], []
    constants = {"unidec_weight": np.float32(score.clf_weight), "unidec_least": np.float32(_EPSILON)}
    if score.head in ("both", "de"):
        parts.append("de")
    if score.head in ("both", "clf"):
        clf = "clf"
        if score.clf_normalize:
            nodes += [
                helper.make_node("ReduceL2", [clf], ["unidec_length"], axes=[-1], keepdims=1)
                if _opset(graph) < 18
                else helper.make_node("ReduceL2", [clf, "unidec_axis"], ["unidec_length"], keepdims=1),
                helper.make_node("Max", ["unidec_length", "unidec_least"], ["unidec_divisor"]),
                helper.make_node("Div", [clf, "unidec_divisor"], ["unidec_unit"]),
            ]
            clf = "unidec_unit"
        nodes.append(helper.make_node("Mul", [clf, "unidec_weight"], ["unidec_clf"]))
        parts.append("unidec_clf")
        if score.has_bias:  # one more dimension, in which labels have their bias
            nodes += [
                helper.make_node("Slice", ["clf", "unidec_0", "unidec_1", "unidec_axis1"], ["unidec_first"]),
                helper.make_node("Mul", ["unidec_first", "unidec_zero"], ["unidec_nothing"]),
                helper.make_node("Add", ["unidec_nothing", "unidec_weight"], ["unidec_one"]),
            ]
            parts.append("unidec_one")
    nodes.append(helper.make_node("Concat", parts, ["vector"], axis=1))
    used = {name for node in nodes for name in node.input}
    integers = {"unidec_axis": [-1], "unidec_axis1": [1], "unidec_0": [0], "unidec_1": [1]}
    constants["unidec_zero"] = np.float32(0)
    for name, value in constants.items():
        if name in used:
            graph.graph.initializer.append(helper.make_tensor(name, TensorProto.FLOAT, [], [float(value)]))
    for name, values in integers.items():
        if name in used:
            graph.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1], values))
    graph.graph.node.extend(nodes)
    graph.graph.output.append(helper.make_tensor_value_info("vector", TensorProto.FLOAT, ["B", score.width]))


def _opset(graph: Any) -> int:
    return next(int(entry.version) for entry in graph.opset_import if entry.domain == "")
