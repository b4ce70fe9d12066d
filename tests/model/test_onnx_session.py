"""onnxruntime's sessions: 8-bit products are exact on every processor, threads by processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unidec.cores import num_threads
from unidec.model import onnx_session
from unidec.model.onnx_session import open_session, threads_of_int8

onnx = pytest.importorskip("onnx")


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A graph that multiplies unsigned 8-bit inputs with the largest weights of 8 bits: the sum of
    two such products does not fit into 16 bits.
    """
    weight = np.full((64, 32), 127, dtype=np.int8)
    weight[:, ::2] = -128
    node = onnx.helper.make_node("MatMulInteger", ["x", "weight"], ["y"])
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, ["B", 64])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT32, ["B", 32])
    constant = onnx.numpy_helper.from_array(weight, "weight")
    graph = onnx.helper.make_graph([node], "product", [x], [y], [constant])
    version = onnx.helper.make_opsetid("", 18)
    path = tmp_path / "product.onnx"
    onnx.save(onnx.helper.make_model(graph, opset_imports=[version], ir_version=9), path)
    return path


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_products_of_8_bits_do_not_overflow(product: Path, threads: int, batch: int) -> None:
    x = np.random.default_rng().integers(200, 256, (batch, 64), dtype=np.uint8)
    (got,) = open_session(product, threads).run(None, {"x": x})
    sums = x.astype(np.int64).sum(1)
    expected = np.repeat(sums[:, None] * 127, 32, axis=1)
    expected[:, ::2] = sums[:, None] * -128
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(
    ("vnni", "width", "expected"),
    [(True, 384, 1), (True, 768, 0), (False, 384, 0)],
)
def test_threads_of_a_transformer_in_8_bits(monkeypatch, vnni, width, expected) -> None:
    monkeypatch.setattr(onnx_session, "has_vnni", lambda: vnni)
    assert threads_of_int8(width) == expected


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_session_has_the_threads_that_are_asked_for(product: Path, threads: int) -> None:
    options = open_session(product, threads).get_session_options()
    assert options.intra_op_num_threads == num_threads(threads)
    spinning = options.get_session_config_entry("session.intra_op.allow_spinning")
    assert spinning == "0"


def test_onnxruntime_sends_and_stores_nothing_about_its_user(product: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import pathlib, sys; from unidec.model.onnx_session import open_session; "
        "open_session(pathlib.Path(sys.argv[1]))"
    )
    quiet = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME", "CI")  # on CI it sends nothing anyway
    inherited = {name: value for name, value in os.environ.items() if name not in quiet}
    subprocess.run(
        [sys.executable, "-c", code, str(product)], env={**inherited, "HOME": str(home)}, check=True
    )
    assert not list(home.rglob("*onnxruntime*"))
