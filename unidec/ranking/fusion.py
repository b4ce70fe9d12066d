"""Learnt fusion: a small network ranks the candidates of heads and votes by their features.

Legend: B queries, L labels, C candidates from the search, P pairs of a query and a candidate, F
words, X features, M training queries, O pairs of a left-out query and one of its labels, T largest
scores of a query, D width of a head, H hidden units.

    score(x, l) = network(features of x and l) + tail * log(inverse propensity of l)

The features are `FEATURES`, optionally followed by `BY_WORDS`, which come from a second network.
That network ranks labels by words alone: by votes of similar training queries, and by cosines to
the words of the label's text and of its training queries. It is trained on training queries, each
scored as if it were absent from the training data ("left out"): its own vote, its words in the sums
of its labels and its count in their frequencies are subtracted, so that the network sees the same
distribution as for new queries (stacked generalisation, Wolpert 1992). The fusion is trained with
the decoupled softmax over each query's candidates (`fusion_fit.py`).

Source: NGAME (section 3, "score fusion") learns to combine the scores of an encoder and a
classifier, with decision trees over labels. Here one network serves all labels, and also uses
votes, words and label frequencies."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from unidec.ranking.heads import Floats

FEATURES = (
    "blend",
    "dual encoder",
    "classifier",
    "votes",
    "words of the label",
    "words of its queries",
    "labels it comes with",
    "log frequency",
    "log rank by the blend",
    "log rank by the dual encoder",
    "log rank by the classifier",
    "log rank by votes",
    "blend below the best",
    "dual encoder below the best",
    "classifier below the best",
    "votes below the most",
    "label words below the best",
    "query words below the best",
    "best blend",
    "log words of the query",
)
BY_WORDS = ("score by words", "score by words below the best", "log rank by words")
WORD_FEATURES = (
    "votes",
    "votes below the most",
    "log rank by votes",
    "words of the label",
    "label words below the best",
    "log rank by label words",
    "words of its queries",
    "query words below the best",
    "log rank by query words",
    "most votes",
    "best label words",
    "best query words",
    "log frequency",
    "log words of the query",
)
LIMIT = 6.0  # standard deviations from the mean at which a feature is clipped
_PAIRS_AT_ONCE = 1 << 11  # the hidden units of this number of pairs fit in the cache

Number = Annotated[float, Field(allow_inf_nan=False)]


class Network(BaseModel):
    """A small network that scores pairs of a query and a label from their features, as stored in
    bundle.json.

        score(x, l) = w . f(x, l) + sum over h of o_h max(0, v_h . f(x, l) + b_h)

    where f(x, l) are the standardised features: minus their mean, divided by their standard
    deviation, and clipped.

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
        widths = set(map(len, (self.mean, self.scale, self.linear, *self.hidden)))
        if len(widths) != 1:
            raise ValueError(f"the layers differ in width: {sorted(widths)} features")
        if not len(self.hidden) == len(self.hidden_bias) == len(self.out):
            raise ValueError("the layers differ in their number of hidden units")
        return self

    @cached_property
    def _arrays(self) -> tuple[Floats, ...]:
        inputs = (self.mean, self.scale, self.linear)
        hidden = (np.transpose(self.hidden), self.hidden_bias, self.out)
        return tuple(np.asarray(part, dtype=np.float32) for part in inputs + hidden)

    def scores(self, feature_PX: Floats) -> Floats:
        """Scores of pairs with the given features, float32 [P]."""
        mean_X, scale_X, linear_X, hidden_XH, bias_H, out_H = self._arrays
        out_P = np.empty(len(feature_PX), dtype=np.float32)
        for start in range(0, len(out_P), _PAIRS_AT_ONCE):
            block = slice(start, start + _PAIRS_AT_ONCE)
            x_PX = np.clip((feature_PX[block] - mean_X) / scale_X, -LIMIT, LIMIT)
            hidden_PH = np.maximum(x_PX @ hidden_XH + bias_H, 0)
            out_P[block] = x_PX @ linear_X + hidden_PH @ out_H
        return out_P


class Fusion(Network):
    """A trained fusion, as stored in bundle.json.

    Attributes:
        tail: weight of the log inverse propensity. propensity: its constants A and B.
        gain: improvement over the blend on the validation split, by metric.
        words: the network that ranks by words; None: the fusion does not use `BY_WORDS`.
    """

    propensity: tuple[Number, Number]
    tail: Number = 0.0
    gain: dict[str, Number] = Field(default_factory=dict)
    words: Network | None = None

    @model_validator(mode="after")
    def _check_features(self) -> Fusion:
        num = len(self.mean)
        if num != len(self.features):
            raise ValueError(f"weights of {num} features, expected {len(self.features)}")
        return self

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features."""
        return FEATURES if self.words is None else FEATURES + BY_WORDS
