"""Encodes a training's texts with its model, as its steps compute: on its device, in its number
format, and from its caches.

Legend: n texts, D width of a head, W width of the encoder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unidec.data.tokens import TokenCache, Tokens
from unidec.model.additions import Classifier
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.frozen import autocast
from unidec.model.row_table import zeros_on_disk
from unidec.model.unidec import UniDEC
from unidec.training.gradient_cache import TextParts

FP32 = 4
MOST_IN_MEMORY = 1 << 30  # bytes of vectors in float32


@dataclass
class Encoding:
    """The model, and the inputs and settings of its passes.

    Attributes:
        tokens: token caches "queries" and "labels".
        build: puts texts on the device, or their results from the caches.
        amp: type of autocast; None: float32.
    """

    model: UniDEC
    tokens: Mapping[str, TokenCache]
    build: InputBuilder
    device: torch.device
    amp: torch.dtype | None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which steps compute."""
        return autocast(self.device, self.amp)

    def clock(self) -> float:
        """Processor time (on a GPU wall time), in seconds."""
        if self.device.type == "cpu":
            return time.process_time()
        return time.perf_counter()

    def outputs(self, name: str, rows: np.ndarray) -> Tensor:
        """The encoder's outputs of texts without dropout, [n, W]."""
        with self.autocast():
            output_NW = self.model.encode(name, self.tokens[name], rows, self.build)
        return torch.from_numpy(output_NW).to(self.device)

    def outputs_of(self, parts: TextParts) -> Tensor:
        """`outputs` of texts of several sources."""
        return torch.cat([self.outputs(name, rows) for name, _, rows in parts])

    def vectors_of(self, parts: TextParts, folder: Path | None = None) -> np.ndarray:
        """Vectors [n, D] of texts of several sources, from the dual encoder or, if the model lacks
        it, the classifier head; float32 in memory, or float16 in a file in `folder` if `on_disk`
        is true. The file is freed with the array or the process.

        Args:
            folder: None: always float32, in memory.

        Raises:
            ArtifactError: not enough space for the file.
        """
        head: Literal["de", "clf"] = "clf" if self.model.heads == "clf" else "de"
        shape = (sum(len(rows) for _, _, rows in parts), self.model.settings.dim)
        if folder is not None and on_disk(*shape):
            out_ND = zeros_on_disk(folder, shape, torch.float16).numpy()
        else:
            out_ND = np.empty(shape, dtype=np.float32)
        begin = 0
        for name, tokens, rows in parts:
            end = begin + len(rows)
            desc = f"encode {name}"
            given = (name, tokens, rows, self.build)
            with self.autocast():
                self.model.vectors(*given, desc=desc, only=head, into=out_ND[begin:end])
            begin = end
        return out_ND


def label_arrays(
    model: UniDEC,
    tokens: Tokens,
    build: InputBuilder,
    folder: Path,
    classifier: Callable[[np.ndarray | None], Classifier],
) -> dict[str, np.ndarray]:
    """Vectors of all labels by name, as in a bundle, if the model has them: "de" and "clf" float32
    [L, D], "bias" float32 [L].

    Args:
        tokens: texts of the labels.
        folder: of files for large arrays.
        classifier: returns rows and biases; the rows fill its argument if that is given.
    """
    de_LD = None
    if model.heads != "clf":
        de_LD = model.encode_labels(tokens, build, into=label_file(model, folder))
    rows_LD, bias_L = classifier(label_file(model, folder))
    arrays = {"de": de_LD, "clf": rows_LD, "bias": bias_L}
    return {name: array for name, array in arrays.items() if array is not None}


def label_file(model: UniDEC, folder: Path) -> np.ndarray | None:
    """A file for float32 vectors of all labels if they are large (`on_disk`), else None. It has no
    name, and is freed with the array or the process.
    """
    shape = (model.num_labels, model.settings.dim)
    return zeros_on_disk(folder, shape, torch.float32).numpy() if on_disk(*shape) else None


def on_disk(num_texts: int, dim: int) -> bool:
    """Whether vectors are in a file during a refresh on a CPU: 2 bytes per dimension, mapped,
    instead of 4 in memory. Rounding, and clustering in parts, change the batches a little.
    """
    return FP32 * num_texts * dim > MOST_IN_MEMORY
