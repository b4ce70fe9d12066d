"""The vector space that is searched: the vectors of both heads side by side, or of one head.

Legend: L labels, B queries, C candidates, K results, P pairs or rows, D width of a head, D' width of the space.

A search by inner product in this space ranks labels by

    both:  cos(Phi_D(x), Phi_D(z_l)) + clf_weight * clf(x, l)
    de:    cos(Phi_D(x), Phi_D(z_l))
    clf:   clf(x, l)

where clf(x, l) is cos(Phi_C(x), Psi_l) with `clf_normalize` (UniDEC, section "Inference": `[Phi_D(z_l);
normalize(Psi_l)]` against `[Phi_D(x); normalize(Phi_C(x))]`, clf_weight 1), else Phi_C(x) . Psi_l + bias_l. The bias is
an additional dimension, in which every query has the value 1; a cosine has no bias. The dual encoder returns vectors of
unit length; with `model.normalize: false` it does not, and their inner product takes the place of the cosine.
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

_PAIRS_AT_ONCE = 4096


def _parts(vectors: Mapping[str, Floats], rows_P: Rows | slice, space: Space, clf_normalize: bool) -> list[Floats]:
    """Vectors of each part of the space, float32 [P, D] each, biases [P, 1]; raises as `LabelRows`."""
    if space not in SPACES:
        raise ValueError(f"unknown space {space!r}, expected one of {', '.join(SPACES)}")
    parts = []
    for name in ("de", "clf") if space == "both" else (space,):
        if name not in vectors:
            raise ValueError(f"space {space!r} needs the vectors of {name!r}, got None: the model has no such head")
        parts.append(np.asarray(vectors[name][rows_P], dtype=np.float32))
        if parts[-1].ndim != 2:
            raise ValueError(f"vectors of {name!r} must have two dimensions, got shape {parts[-1].shape}")
    if space != "de" and clf_normalize:
        parts[-1] = unit_rows(parts[-1])
    elif space != "de" and "bias" in vectors:
        parts.append(np.asarray(vectors["bias"][rows_P], dtype=np.float32).reshape(-1, 1))
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"parts of {space!r} differ in their number of rows: {[len(part) for part in parts]}")
    return parts


def _joined(parts: list[Floats]) -> Floats:
    return np.ascontiguousarray(np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0])


class LabelRows:
    """Label side of the space; rows are computed on demand from the heads' arrays, which may be memory-mapped.

    Args:
        vectors: "de": float32 [L, D], label embeddings of unit length, required in "both" and "de". "clf": float32
            [L, D], rows of the classifier table, required in "both" and "clf". "bias": float32 [L], biases of the
            classifier, not used in "de" or with `clf_normalize`.

    Attributes:
        shape: (L, D').

    Raises:
        ValueError: a part that the space requires is missing, or the parts differ in their number of labels.
    """

    def __init__(self, vectors: Mapping[str, Floats], space: Space, clf_normalize: bool) -> None:
        self._space, self._normalize = space, clf_normalize
        self._vectors = {name: np.asarray(array) for name, array in vectors.items()}
        counts = sorted({len(array) for array in self._vectors.values()})
        if len(counts) > 1:
            raise ValueError(f"parts differ in their number of labels: {counts}")
        self.shape = (counts[0], self.take(np.zeros(0, dtype=np.int64)).shape[1])

    def take(self, rows_P: Rows | slice) -> Floats:
        """Vectors of the given rows, float32 [P, D'], contiguous."""
        return _joined(_parts(self._vectors, rows_P, self._space, self._normalize))

    def scores(self, query_BD: Floats, rows_BC: Rows) -> Floats:
        """Inner products of each query [D'] with its own rows, summed over the parts: float32 [B, C]."""
        out, at = np.zeros(rows_BC.shape, dtype=np.float32), 0
        for part_PD in _parts(self._vectors, rows_BC.ravel(), self._space, self._normalize):
            part_BCD = part_PD.reshape(*rows_BC.shape, part_PD.shape[1])
            out += (part_BCD @ query_BD[:, at : at + part_PD.shape[1], None])[:, :, 0]
            at += part_PD.shape[1]
        return out


def as_rows(vectors: LabelRows | npt.NDArray) -> LabelRows:
    """Wraps an array [L, D], float32 or float16, as `LabelRows`; `LabelRows` are returned unchanged."""
    return LabelRows({"de": vectors}, "de", False) if isinstance(vectors, np.ndarray) else vectors


def query_vectors(
    de_BD: Floats | None, clf_BD: Floats | None, space: Space, clf_weight: float, clf_normalize: bool, has_bias: bool
) -> Floats:
    """Query side of the space, float32 [B, D'], contiguous; its inner product with the label side is the score.

    Args:
        de_BD, clf_BD: query embeddings from the model's heads; those that the space requires.
        clf_weight: weight of the classifier's score in "both"; not used in the other spaces.
        has_bias: the label side has biases.

    Raises:
        ValueError: a part that the space requires is missing.
    """
    vectors = {name: np.asarray(part) for name, part in (("de", de_BD), ("clf", clf_BD)) if part is not None}
    if has_bias and clf_BD is not None:
        vectors["bias"] = np.ones(len(clf_BD), dtype=np.float32)
    out = _joined(_parts(vectors, slice(None), space, clf_normalize))
    if space == "both" and de_BD is not None:
        out[:, de_BD.shape[1] :] *= np.float32(clf_weight)
    return out


def width(dim: int, space: Space, clf_normalize: bool, has_bias: bool) -> int:
    """Width D' of the space for heads of width `dim`."""
    heads = 2 if space == "both" else 1
    return heads * dim + int(has_bias and not clf_normalize and space != "de")


def head_scores(
    query_BD: Floats | None, labels_BK: Rows, vectors: Mapping[str, Floats], head: Space, normalize: bool
) -> Floats | None:
    """One head's score of each retrieved label, float32 [B, K], NaN where `labels_BK` is -1; None if the model lacks
    the head.

    Args:
        query_BD: query embeddings from that head.
        vectors, normalize: as `vectors` and `clf_normalize` of `pair_scores`.
    """
    if query_BD is None or head not in vectors:
        return None
    query = query_vectors(query_BD, query_BD, head, 1.0, normalize, "bias" in vectors)
    out = np.full(labels_BK.shape, np.nan, dtype=np.float32)
    query_P, _ = np.nonzero(labels_BK >= 0)
    out[labels_BK >= 0] = pair_scores(query, query_P, labels_BK[labels_BK >= 0], vectors, head, normalize)
    return out


def pair_scores(
    query_BD: Floats, query_P: Rows, label_P: Rows, vectors: Mapping[str, Floats], space: Space, clf_normalize: bool
) -> Floats:
    """Scores of pairs of a query and a label, float32 [P].

    Args:
        query_BD: float32 [B, D'], from `query_vectors`.
        query_P, label_P: int64 [P], rows of queries and labels.
        vectors, space, clf_normalize: as for `LabelRows`.
    """
    out = np.empty(len(query_P), dtype=np.float32)
    for start in range(0, len(query_P), _PAIRS_AT_ONCE):
        block = slice(start, start + _PAIRS_AT_ONCE)
        label_PD = _joined(_parts(vectors, label_P[block], space, clf_normalize))
        out[block] = np.einsum("pd,pd->p", query_BD[query_P[block]], label_PD)
    return out


def unit_rows(vectors_ND: Floats) -> Floats:
    """Rows scaled to unit length, float32; zero rows stay zero."""
    vectors = np.asarray(vectors_ND, dtype=np.float32)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.divide(vectors, length, out=np.zeros_like(vectors), where=length > 0)
