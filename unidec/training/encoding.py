"""Encodes a training's texts with its model, as its steps compute: on its device, in its number
format, and from its caches.

Legend: n texts, D width of a head, W width of the encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from unidec.data.tokens import TokenCache
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.frozen import autocast
from unidec.model.unidec import UniDEC
from unidec.training.gradient_cache import TextParts


@dataclass
class Encoding:
    """The model, and what its passes need.

    Attributes:
        tokens: token caches "queries" and "labels".
        build: puts texts on the device, or what the caches of frozen results have of them.
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

    def outputs(self, name: str, rows: np.ndarray) -> Tensor:
        """The encoder's outputs of texts without dropout, [n, W]."""
        with self.autocast():
            output_NW = self.model.encode(name, self.tokens[name], rows, self.build)
        return torch.from_numpy(output_NW).to(self.device)

    def label_outputs(self, labels: np.ndarray) -> Tensor:
        """The encoder's outputs of label texts, [n, W]."""
        return self.outputs("labels", labels)

    def outputs_of(self, parts: TextParts) -> Tensor:
        """`outputs` of texts of several sources."""
        return torch.cat([self.outputs(name, rows) for name, _, rows in parts])

    def vectors(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Vectors float32 [n, D] of the dual encoder, of a classifier alone the classifier's."""
        head: Literal["de", "clf"] = "clf" if self.model.heads == "clf" else "de"
        with self.autocast():
            de, clf = self.model.vectors(
                name, self.tokens[name], rows, self.build, desc=f"encode {name}", only=head
            )
        vectors = clf if head == "clf" else de
        assert vectors is not None
        return vectors

    def vectors_of(self, parts: TextParts) -> np.ndarray:
        """`vectors` of texts of several sources."""
        return np.concatenate([self.vectors(name, rows) for name, _, rows in parts])
