"""Classifier rows of labels that nobody trained, estimated from their texts and from labels like them.

Legend: S new labels, K labels with trained rows, N nearest of them, D width of a head.

    row(s) = 0.6 h unit(Phi_C(s)) + 0.4 mean of the rows of the N = 3 trained labels nearest [+ 3 mean of all rows]

with h the mean length of the trained rows, 1 at most; the last term only where the classifier's score is a cosine
(`index.clf_normalize`). Nearest is the largest cosine of the dual encoder's label vectors; without a dual encoder the
largest classifier score of the text. The text alone (how a row begins before training) finds new labels well but pushes
others out: unlike a trained row it has not learnt for which queries it must stay away. The neighbours' rows have. A
cosine takes no notice of a row's length, by which an unsure label could score low: the mean of all rows, which no query
is near to, does that instead. Each part alone and other shares are measured by benchmarks/zero_shot.py;
docs/label-refresh.md has the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from unidec.retrieval.scoring_space import unit_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

NEAREST = 3
TEXT_SHARE = 0.6
MEAN_WEIGHT = 3.0  # of the mean row, with cosines
_ROWS_AT_ONCE = 1 << 15


def estimated_rows(
    vectors: Mapping[str, Floats], trained: Rows, clf_SD: Floats, de_SD: Floats | None, normalize: bool = False
) -> tuple[Floats, float]:
    """Rows and the bias of new labels. Each row depends on its own text alone, not on what else is new.

    Args:
        vectors: a bundle's arrays: "clf" [L, D], "de" [L, D] and "bias" [L] where it has them; may be memory maps.
        trained: int64 [K] ascending, rows of labels that were trained; without any, a row is its text.
        clf_SD, de_SD: float32 [S, D], the texts through both heads; de_SD None: there is no dual encoder.
        normalize: the classifier's score is a cosine.

    Returns:
        float32 [S, D], and the mean bias of the trained labels (0 without biases).
    """
    text_SD = unit_rows(clf_SD)
    bias_L = vectors.get("bias")
    if not len(trained):
        return text_SD, 0.0
    bias = 0.0 if bias_L is None else float(np.mean(bias_L[trained], dtype=np.float64))
    length, mean_D, place_SN = _nearest(vectors, trained, text_SD if de_SD is None else de_SD, de_SD is not None)
    near_SD = np.zeros_like(text_SD)
    for place_S in place_SN.T:  # a few: the rows of all of them at once would be large
        near_SD += vectors["clf"][trained[place_S]] / np.float32(place_SN.shape[1])
    share = np.float32(TEXT_SHARE)
    rows_SD = share * np.float32(min(1.0, length)) * text_SD + (1 - share) * near_SD
    return rows_SD + np.float32(MEAN_WEIGHT) * mean_D if normalize else rows_SD, bias


def _nearest(
    vectors: Mapping[str, Floats], trained: Rows, query_SD: Floats, by_text: bool
) -> tuple[float, Floats, Rows]:
    """Mean length and mean of the trained rows, float32 [D], and the places in `trained` of the nearest labels, best
    first, ties by place: int64 [S, N]. Block by block: each row of the arrays is read once."""
    num = min(NEAREST, len(trained))
    best_SN = np.full((len(query_SD), num), -np.inf, dtype=np.float32)
    place_SN = np.zeros((len(query_SD), num), dtype=np.int64)
    lengths, summed_D = 0.0, np.zeros(query_SD.shape[1])
    for begin in range(0, len(trained), _ROWS_AT_ONCE):
        some = trained[begin : begin + _ROWS_AT_ONCE]
        rows = vectors["clf"][some]
        lengths += float(np.linalg.norm(rows, axis=1).sum(dtype=np.float64))
        summed_D += rows.sum(axis=0, dtype=np.float64)
        score = query_SD @ (vectors["de"][some] if by_text else rows).T
        both = np.concatenate([best_SN, score], axis=1)
        places = np.concatenate([place_SN, np.broadcast_to(np.arange(begin, begin + len(some)), score.shape)], axis=1)
        order = np.argsort(-both, axis=1, kind="stable")[:, :num]
        best_SN, place_SN = np.take_along_axis(both, order, axis=1), np.take_along_axis(places, order, axis=1)
    return lengths / len(trained), (summed_D / len(trained)).astype(np.float32), place_SN
