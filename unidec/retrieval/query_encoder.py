"""Opens the encoder of a bundle's queries: the model itself, or a faster runtime without torch."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Literal

import numpy as np

from unidec.errors import ArtifactError, UnidecError
from unidec.model.arrays import ModelArrays
from unidec.retrieval.encoded import ModelEncoder, QueryEncoder
from unidec.retrieval.fast_encoder import FastEncoder

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle

Runtime = Literal["auto", "torch", "onnx", "onnx-int8"]
AUTO: Runtime = "onnx-int8"  # on all of lf-debian's test queries P@1 47.00 instead of 47.05, in half of the time
CALIBRATION_TEXTS = 128  # of each kind, to find the scales of int8 quantisation
log = logging.getLogger(__name__)


def open_encoder(bundle: Bundle, runtime: Runtime = "auto", threads: int = 0) -> QueryEncoder:
    """The encoder of a bundle's queries.

    Args:
        runtime: "torch": the model itself; "onnx": onnxruntime for its transformer, numpy for the rest; "onnx-int8":
            the transformer's linear layers in 8 bits; "auto": `AUTO` on a CPU, torch on a GPU or if `AUTO` does not
            support the model. A bag of tokens without a transformer is encoded in numpy by all but "torch".
        threads: of one call; 0: as many as this process has cores.

    Raises:
        UnidecError: "onnx" or "onnx-int8" does not support the model, or onnxruntime is not installed.
        ArtifactError: weights are damaged, or do not match the model's configuration or tokenizer.
    """
    threads = threads or usable_cores()
    if runtime != "torch" and (runtime != "auto" or str(getattr(bundle.about, "device", "cpu")) == "cpu"):
        int8 = (AUTO if runtime == "auto" else runtime) == "onnx-int8"
        try:
            arrays = ModelArrays.of(bundle.about)
            return FastEncoder(arrays, bundle.words, int8=int8, threads=threads, texts=_typical(bundle))
        except UnidecError as error:
            if runtime != "auto" or isinstance(error, ArtifactError):
                raise
            log.warning("queries are encoded by torch: %s", str(error).replace("\n", ";"))
    import torch

    torch.set_num_threads(threads)
    return ModelEncoder(bundle.model, bundle.words)


def _typical(bundle: Bundle) -> list[str]:
    """Calibration texts: titles of labels, and of training queries if the bundle has any."""
    columns = [bundle.titles] + ([] if bundle.neighbours is None else [bundle.neighbours.titles])
    some = [column.take(np.linspace(0, len(column) - 1, CALIBRATION_TEXTS).astype(np.int64)) for column in columns]
    return [title for column in some for title in column.to_pylist() if title]


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
