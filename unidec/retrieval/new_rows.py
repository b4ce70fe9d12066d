"""Classifier rows of labels that nobody trained, estimated from their texts and from labels like them.

Legend: S new labels, K labels with trained rows, N nearest of them, D width of a head.

    row(s) = 0.6 h unit(Phi_C(s)) + 0.4 mean of the rows of the N = 3 trained labels nearest to s

with h the mean length of the trained rows, 1 at most. Nearest is the largest cosine of the dual encoder's label
vectors; without a dual encoder the largest classifier score of the text. The text alone (how a row begins before
training) finds new labels well but pushes others out: unlike a trained row it has not learnt for which queries it must
stay away. The neighbours' rows have. Each part alone, other shares and other estimates are measured by
benchmarks/zero_shot.py; docs/label-refresh.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from unidec.retrieval.space import unit_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

NEAREST = 3
TEXT_SHARE = 0.6
_ROWS_AT_ONCE = 1 << 15


def estimated_rows(
    vectors: Mapping[str, Floats], trained: Rows, clf_SD: Floats, de_SD: Floats | None
) -> tuple[Floats, float]:
    """Rows and the bias of new labels. Each row depends on its own text alone, not on what else is new.

    Args:
        vectors: a bundle's arrays: "clf" [L, D], "de" [L, D] and "bias" [L] where it has them; may be memory maps.
        trained: int64 [K] ascending, rows of labels that were trained; without any, a row is its text.
        clf_SD, de_SD: float32 [S, D], the texts through both heads; de_SD None: there is no dual encoder.

    Returns:
        float32 [S, D], and the mean bias of the trained labels (0 without biases).
    """
    text_SD = unit_rows(clf_SD)
    bias_L = vectors.get("bias")
    if not len(trained):
        return text_SD, 0.0
    bias = 0.0 if bias_L is None else float(np.mean(bias_L[trained], dtype=np.float64))
    length, place_SN = _nearest(vectors, trained, text_SD if de_SD is None else de_SD, None if de_SD is None else "de")
    near_SD = np.zeros_like(text_SD)
    for place_S in place_SN.T:  # a few: the rows of all of them at once would be large
        near_SD += vectors["clf"][trained[place_S]] / np.float32(place_SN.shape[1])
    share = np.float32(TEXT_SHARE)
    return share * np.float32(min(1.0, length)) * text_SD + (1 - share) * near_SD, bias


def _nearest(vectors: Mapping[str, Floats], trained: Rows, query_SD: Floats, head: str | None) -> tuple[float, Rows]:
    """The mean length of the trained rows, and the places in `trained` of the nearest, best first, ties by place: int64
    [S, N]. Block by block: each row of the arrays is read once."""
    num = min(NEAREST, len(trained))
    best_SN = np.full((len(query_SD), num), -np.inf, dtype=np.float32)
    place_SN = np.zeros((len(query_SD), num), dtype=np.int64)
    lengths = 0.0
    for begin in range(0, len(trained), _ROWS_AT_ONCE):
        some = trained[begin : begin + _ROWS_AT_ONCE]
        rows = vectors["clf"][some]
        lengths += float(np.linalg.norm(rows, axis=1).sum(dtype=np.float64))
        score = query_SD @ (rows if head is None else vectors[head][some]).T
        both = np.concatenate([best_SN, score], axis=1)
        places = np.concatenate([place_SN, np.broadcast_to(np.arange(begin, begin + len(some)), score.shape)], axis=1)
        order = np.argsort(-both, axis=1, kind="stable")[:, :num]
        best_SN, place_SN = np.take_along_axis(both, order, axis=1), np.take_along_axis(places, order, axis=1)
    return lengths / len(trained), place_SN
