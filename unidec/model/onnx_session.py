"""Opens an ONNX graph of a transformer in onnxruntime, for processors of all kinds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from unidec.cores import has_vnni, num_threads

# below this width, the 8-bit products of a layer are done before a second thread has woken up
WIDE = 768
# onnxruntime 1.32 sends events to Microsoft and writes a device id to ~/.cache, from its import on
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def open_session(graph: Path, threads: int = 0) -> Any:
    """Open a graph as an `onnxruntime.InferenceSession` on the CPU.

    Args:
        threads: of one call; 0: see `cores.num_threads`.

    Raises:
        ImportError: onnxruntime is not installed.
        Exception: of onnxruntime, for a graph that it cannot read or rewrite; its errors have no
            common base class.
    """
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads(threads)
    options.inter_op_num_threads = 1
    # errors only: its warnings are about shapes that it infers itself
    options.log_severity_level = 3
    for pool in ("intra_op", "inter_op"):  # threads that wait must not take cores from others
        options.add_session_config_entry(f"session.{pool}.allow_spinning", "0")
    if not has_vnni():
        # these processors add pairs of 8-bit products in 16 bits, which overflow; the exact product
        # is slower. With VNNI the sum is exact, and the option would cost a factor of seven
        options.add_session_config_entry("session.x64quantprecision", "1")
    return onnxruntime.InferenceSession(
        str(graph),
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=["SkipLayerNormFusion"],  # the fused operator takes three times as long
    )


def threads_of_int8(width: int) -> int:
    """Threads with which a transformer of this width encodes one text fastest in 8 bits; 0: all."""
    return 1 if width < WIDE and has_vnni() else 0
