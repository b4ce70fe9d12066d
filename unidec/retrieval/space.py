"""The vector space that is searched: both heads side by side, or one of them.

Legend: L labels, B queries, K results, P pairs of both, U the labels of some pairs, D width of a head; D' width of the
space.

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


def label_vectors(
    de_LD: Floats | None, clf_LD: Floats | None, bias_L: Floats | None, space: Space, clf_normalize: bool
) -> Floats:
    """Label side of the space.

    Args:
        de_LD: label embeddings, unit length; needed in "both" and "de".
        clf_LD: rows of the classifier table; needed in "both" and "clf".
        bias_L: biases of the classifier, or None; not used in "de" or with `clf_normalize`.
        space: "both", "de" or "clf".
        clf_normalize: rows of the table at unit length.

    Returns:
        float32 [L, D'], contiguous; D' as `width` says.

    Raises:
        ValueError: a part that the space needs is not given, or the parts differ in number of labels.
    """
    parts = []
    if space in ("both", "de"):
        parts.append(_given(de_LD, "de_LD", space))
    if space in ("both", "clf"):
        clf = _given(clf_LD, "clf_LD", space)
        parts.append(unit_rows(clf) if clf_normalize else clf)
        if bias_L is not None and not clf_normalize:
            parts.append(np.asarray(bias_L, dtype=np.float32).reshape(-1, 1))
    return _joined(parts, space)


def query_vectors(
    de_BD: Floats | None,
    clf_BD: Floats | None,
    space: Space,
    clf_weight: float,
    clf_normalize: bool,
    has_bias: bool,
) -> Floats:
    """Query side of the space.

    Args:
        de_BD: query embeddings of the dual encoder's head, unit length; needed in "both" and "de".
        clf_BD: query embeddings of the classifier's head, as the model gives them; needed in "both" and "clf".
        space: "both", "de" or "clf".
        clf_weight: weight of the classifier's score in "both"; elsewhere it changes no ranking and is not used.
        clf_normalize: the classifier's score is a cosine.
        has_bias: the label side was made with biases (they are ignored with `clf_normalize` there and here).

    Returns:
        float32 [B, D'], contiguous; `query_vectors(...) @ label_vectors(...).T` are the scores.

    Raises:
        ValueError: a part that the space needs is not given.
    """
    parts = []
    if space in ("both", "de"):
        parts.append(_given(de_BD, "de_BD", space))
    if space in ("both", "clf"):
        clf = _given(clf_BD, "clf_BD", space)
        clf = unit_rows(clf) if clf_normalize else clf
        weight = np.float32(clf_weight if space == "both" else 1.0)
        parts.append(clf * weight)
        if has_bias and not clf_normalize:
            parts.append(np.full((len(clf), 1), weight, dtype=np.float32))
    return _joined(parts, space)


def head_query_vectors(
    de_BD: Floats | None, clf_BD: Floats | None, space: Space, head: Space, clf_normalize: bool, has_bias: bool
) -> Floats:
    """Query side of the space such that one head alone decides: the other's half is 0, the score is that head's own.

    Args:
        de_BD, clf_BD, clf_normalize, has_bias: as for `query_vectors`.
        space: "both", or `head` itself.
        head: "de" or "clf".

    Raises:
        ValueError: a part that the space needs is not given.
    """
    de, clf = (None if array is None else np.zeros_like(array) for array in (de_BD, clf_BD))
    own = {"de": (de_BD, clf), "clf": (de, clf_BD)}[head]
    out = query_vectors(*own, space, 1.0, clf_normalize, has_bias)
    if head == "de" and has_bias and not clf_normalize and space == "both":
        out[:, -1] = 0.0
    return out


def width(dim: int, space: Space, clf_normalize: bool, has_bias: bool) -> int:
    """D' of the space for heads of width `dim`."""
    heads = 2 if space == "both" else 1
    return heads * dim + int(has_bias and not clf_normalize and space != "de")


def head_scores(
    query_BD: Floats,
    label_LD: Floats,
    labels_BK: npt.NDArray[np.int64],
    *,
    bias_L: Floats | None = None,
    normalize: bool = False,
    block: int = 1 << 24,
) -> Floats:
    """One head's part of the scores of the labels that were found.

    Args:
        query_BD, label_LD: that head's vectors.
        labels_BK: label rows; -1 where there is none.
        bias_L: added to the product (not with `normalize`).
        normalize: cosine instead of the product.
        block: at most so many floats are gathered at once.

    Returns:
        float32 [B, K], NaN where there is no label.
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
    query_BD: Floats,
    query_P: npt.NDArray[np.int64],
    label_P: npt.NDArray[np.int64],
    de_LD: Floats | None,
    clf_LD: Floats | None,
    bias_L: Floats | None,
    space: Space,
    clf_normalize: bool,
    *,
    queries: int = 128,
    labels: int = 4096,
) -> Floats:
    """Scores of some pairs in a space: a block of queries against all labels of its pairs, and what is asked for kept.

    That is quicker than pair by pair: neighbours have labels in common.

    Args:
        query_BD: float32 [B, D'], of `query_vectors`.
        query_P, label_P: int64 [P], rows of queries and labels, ascending by query.
        de_LD, clf_LD, bias_L, space, clf_normalize: as for `label_vectors`, whose rows are made as they are needed.
        queries, labels: at most so many of them in one product.

    Returns:
        float32 [P].
    """
    out = np.empty(len(query_P), dtype=np.float32)
    for first in range(0, len(query_BD), queries):
        begin, end = np.searchsorted(query_P, (first, first + queries))
        label_U, place_P = np.unique(label_P[begin:end], return_inverse=True)
        for start in range(0, len(label_U), labels):
            some = label_U[start : start + labels]
            de, clf, bias = (None if array is None else array[some] for array in (de_LD, clf_LD, bias_L))
            score_BU = query_BD[first : first + queries] @ label_vectors(de, clf, bias, space, clf_normalize).T
            here = np.flatnonzero((place_P >= start) & (place_P < start + labels))
            out[begin + here] = score_BU[query_P[begin + here] - first, place_P[here] - start]
    return out


def exact_scores(
    query_BD: Floats,
    rows_A: npt.NDArray[np.int64],
    vectors: Mapping[str, Floats],
    space: Space,
    clf_normalize: bool,
    *,
    labels: int = 4096,
) -> Floats:
    """Scores of all queries with some labels in a space.

    Args:
        query_BD: float32 [B, D'], of `query_vectors`.
        rows_A: int64 [A], rows of labels.
        vectors: of all labels: de, clf [L, D], bias [L]; those that exist.
        space, clf_normalize: as for `label_vectors`.
        labels: so many rows are gathered at once.

    Returns:
        float32 [B, A].
    """
    out = np.empty((len(query_BD), len(rows_A)), dtype=np.float32)
    for start in range(0, len(rows_A), labels):
        some = rows_A[start : start + labels]
        de, clf, bias = (None if name not in vectors else vectors[name][some] for name in ("de", "clf", "bias"))
        out[:, start : start + labels] = query_BD @ label_vectors(de, clf, bias, space, clf_normalize).T
    return out


def unit_rows(vectors_ND: Floats) -> Floats:
    """Rows divided by their length (float32); rows of zeros stay zeros."""
    vectors = np.asarray(vectors_ND, dtype=np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)


def _given(vectors: Floats | None, name: str, space: str) -> Floats:
    if vectors is None:
        raise ValueError(f"space {space!r} needs {name}, got None: the model has no such head")
    array = np.asarray(vectors, dtype=np.float32)
    if array.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, got shape {array.shape}")
    return array


def _joined(parts: list[Floats], space: str) -> Floats:
    if not parts:
        raise ValueError(f"unknown space {space!r}, expected one of {', '.join(SPACES)}")
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"parts of {space!r} differ in their number of rows: {[len(part) for part in parts]}")
    return np.ascontiguousarray(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])
