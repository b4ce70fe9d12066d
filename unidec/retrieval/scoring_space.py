"""The vector space that is searched: both heads side by side, or one of them.

Legend: L labels, B queries, K results, P pairs of both, A and U some labels, D width of a head; D' width of the space.

A search by inner product in this space ranks labels by

    both:  cos(Phi_D(x), Phi_D(z_l)) + clf_weight * clf(x, l)
    de:    cos(Phi_D(x), Phi_D(z_l))
    clf:   clf(x, l)

where clf(x, l) is cos(Phi_C(x), Psi_l) with `clf_normalize` (UniDEC, section "Inference": `[Phi_D(z_l);
normalize(Psi_l)]` against `[Phi_D(x); normalize(Phi_C(x))]`, clf_weight 1), and Phi_C(x) . Psi_l + bias_l without it.
The bias is one more dimension, in which every query has a one; a cosine has no bias. The dual encoder's vectors are
of unit length as the model gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt

Space = Literal["both", "de", "clf"]
SPACES: tuple[Space, ...] = ("both", "de", "clf")
Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]

_QUERIES_AT_ONCE, _LABELS_AT_ONCE = 128, 4096


def label_vectors(
    de_LD: Floats | None, clf_LD: Floats | None, bias_L: Floats | None, space: Space, clf_normalize: bool
) -> Floats:
    """Label side of the space, float32 [L, D'], contiguous.

    Args:
        de_LD: label embeddings of unit length; needed in "both" and "de".
        clf_LD: rows of the classifier table; needed in "both" and "clf".
        bias_L: biases of the classifier, or None; not used in "de" or with `clf_normalize`.

    Raises:
        ValueError: a part that the space needs is not given, or the parts differ in number of labels.
    """
    given: dict[str, Floats | None] = {"de": de_LD, "clf": clf_LD}
    if space not in SPACES:
        raise ValueError(f"unknown space {space!r}, expected one of {', '.join(SPACES)}")
    parts = []
    for name in ("de", "clf") if space == "both" else (space,):
        if (part := given[name]) is None:
            raise ValueError(f"space {space!r} needs the vectors of {name!r}, got None: the model has no such head")
        parts.append(np.asarray(part, dtype=np.float32))
        if parts[-1].ndim != 2:
            raise ValueError(f"vectors of {name!r} must have two dimensions, got shape {parts[-1].shape}")
    if space != "de" and clf_normalize:
        parts[-1] = unit_rows(parts[-1])
    elif space != "de" and bias_L is not None:
        parts.append(np.asarray(bias_L, dtype=np.float32).reshape(-1, 1))
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"parts of {space!r} differ in their number of rows: {[len(part) for part in parts]}")
    return np.ascontiguousarray(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])


def space_rows(vectors: Mapping[str, Floats], rows_A: Rows | slice, space: Space, clf_normalize: bool) -> Floats:
    """`label_vectors` of some rows, float32 [A, D'].

    Args:
        vectors: arrays of all labels by name: de, clf [L, D], bias [L]; those that exist.
    """
    de, clf, bias = (None if name not in vectors else vectors[name][rows_A] for name in ("de", "clf", "bias"))
    return label_vectors(de, clf, bias, space, clf_normalize)


def query_vectors(
    de_BD: Floats | None, clf_BD: Floats | None, space: Space, clf_weight: float, clf_normalize: bool, has_bias: bool
) -> Floats:
    """Query side of the space, float32 [B, D'], contiguous; its product with the label side is the score.

    Args:
        de_BD, clf_BD: query embeddings as the model's heads give them; those that the space needs.
        clf_weight: weight of the classifier's score in "both"; not used in the other spaces.
        has_bias: the label side was given biases.

    Raises:
        ValueError: a part that the space needs is not given.
    """
    one_B = np.ones(len(clf_BD), dtype=np.float32) if has_bias and clf_BD is not None else None
    out = label_vectors(de_BD, clf_BD, one_B, space, clf_normalize)
    if space == "both" and de_BD is not None:
        out[:, de_BD.shape[1] :] *= np.float32(clf_weight)
    return out


def width(dim: int, space: Space, clf_normalize: bool, has_bias: bool) -> int:
    """D' of the space for heads of width `dim`."""
    heads = 2 if space == "both" else 1
    return heads * dim + int(has_bias and not clf_normalize and space != "de")


def head_scores(
    query_BD: Floats, label_LD: Floats, labels_BK: Rows, *,
    bias_L: Floats | None = None, normalize: bool = False, block: int = 1 << 24,
) -> Floats:  # fmt: skip
    """One head's own score of the labels that were found, float32 [B, K]; NaN where `labels_BK` is -1.

    Args:
        query_BD, label_LD: that head's vectors.
        bias_L: added to the product (not with `normalize`).
        normalize: cosine instead of the product.
        block: at most so many floats are gathered at once.
    """
    num_queries, k = labels_BK.shape
    query = unit_rows(query_BD) if normalize else np.asarray(query_BD, dtype=np.float32)
    out = np.full((num_queries, k), np.nan, dtype=np.float32)
    step = max(1, block // max(1, k * query.shape[1]))
    for start in range(0, num_queries, step):
        labels = labels_BK[start : start + step]
        rows = label_LD[np.maximum(labels, 0)]
        scores = np.matmul(rows, query[start : start + step, :, None])[..., 0]
        if normalize:
            length = np.sqrt(np.einsum("bkd,bkd->bk", rows, rows))
            scores = np.divide(scores, length, out=np.zeros_like(scores), where=length > 0)
        elif bias_L is not None:
            scores = scores + bias_L[np.maximum(labels, 0)]
        out[start : start + step] = np.where(labels >= 0, scores, np.float32(np.nan))
    return out


def pair_scores(
    query_BD: Floats, query_P: Rows, label_P: Rows, vectors: Mapping[str, Floats], space: Space, clf_normalize: bool
) -> Floats:
    """Scores of some pairs, float32 [P]: blocks of queries against all labels of their pairs, which neighbours share.

    Args:
        query_BD: float32 [B, D'], of `query_vectors`.
        query_P, label_P: int64 [P], rows of queries and labels, ascending by query.
        vectors, space, clf_normalize: as for `space_rows`.
    """
    out = np.empty(len(query_P), dtype=np.float32)
    for first in range(0, len(query_BD), _QUERIES_AT_ONCE):
        begin, end = np.searchsorted(query_P, (first, first + _QUERIES_AT_ONCE))
        label_U, place_P = np.unique(label_P[begin:end], return_inverse=True)
        for start in range(0, len(label_U), _LABELS_AT_ONCE):
            some = label_U[start : start + _LABELS_AT_ONCE]
            score_BU = query_BD[first : first + _QUERIES_AT_ONCE] @ space_rows(vectors, some, space, clf_normalize).T
            here = np.flatnonzero((place_P >= start) & (place_P < start + _LABELS_AT_ONCE))
            out[begin + here] = score_BU[query_P[begin + here] - first, place_P[here] - start]
    return out


def exact_scores(
    query_BD: Floats, rows_A: Rows, vectors: Mapping[str, Floats], space: Space, clf_normalize: bool
) -> Floats:
    """Scores of all queries [B, D'] with some labels, float32 [B, A]; arguments as for `pair_scores`."""
    out = np.empty((len(query_BD), len(rows_A)), dtype=np.float32)
    for start in range(0, len(rows_A), _LABELS_AT_ONCE):
        some = slice(start, start + _LABELS_AT_ONCE)
        out[:, some] = query_BD @ space_rows(vectors, rows_A[some], space, clf_normalize).T
    return out


def unit_rows(vectors_ND: Floats) -> Floats:
    """Rows divided by their length (float32); rows of zeros stay zeros."""
    vectors = np.asarray(vectors_ND, dtype=np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
