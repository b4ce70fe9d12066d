"""A small network that scores pairs of a query and a label from their features, as stored in bundle.json.

Legend: P pairs, X features, H hidden units.

    score(x, l) = w . f(x, l) + sum over h of o_h max(0, v_h . f(x, l) + b_h)

where f(x, l) are the standardised features: minus their mean, divided by their standard deviation, and clipped.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

LIMIT = 6.0  # standard deviations from the mean at which a feature is clipped
_PAIRS_AT_ONCE = 1 << 11  # the hidden units of this number of pairs fit in the cache

Floats = npt.NDArray[np.float32]
Number = Annotated[float, Field(allow_inf_nan=False)]


class Network(BaseModel):
    """A trained network.

    Attributes:
        mean, scale: of each feature, [X]; scale above 0.
        linear: [X]. hidden: [H][X], hidden_bias and out: [H].
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    mean: list[Number]
    scale: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    linear: list[Number]
    hidden: list[list[Number]]
    hidden_bias: list[Number]
    out: list[Number]

    @model_validator(mode="after")
    def _check_layers(self) -> Network:
        widths = {len(part) for part in (self.mean, self.scale, self.linear, *self.hidden)}
        if len(widths) != 1 or not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError(f"the layers differ in width: {sorted(widths)} features")
        return self

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        parts = (self.mean, self.scale, self.linear, np.transpose(self.hidden), self.hidden_bias, self.out)
        return tuple(np.asarray(part, dtype=np.float32) for part in parts)

    def scores(self, feature_PX: Floats) -> Floats:
        """Scores of pairs with the given features, float32 [P]."""
        mean_X, scale_X, linear_X, hidden_XH, bias_H, out_H = self._arrays
        out_P = np.empty(len(feature_PX), dtype=np.float32)
        for start in range(0, len(out_P), _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            x_PX = np.clip((feature_PX[block] - mean_X) / scale_X, -LIMIT, LIMIT)
            out_P[block] = x_PX @ linear_X + np.maximum(x_PX @ hidden_XH + bias_H, 0) @ out_H
        return out_P
