"""Label vectors of the searched space, read row by row: what a compressed index scores its candidates with.

Legend: L labels, C candidates of a query, P rows, D' width of the space (`scoring_space.py`).

A compressed index holds a label in a few bytes; the float32 vectors stay under vectors/ of the bundle, memory-mapped,
and of them only the rows of a query's candidates are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from unidec.retrieval.scoring_space import Space, space_rows

Floats = npt.NDArray[np.float32]
Rows = npt.NDArray[np.int64]


class LabelRows:
    """Rows of `scoring_space.label_vectors`, made of the heads' own arrays as they are asked for; `shape`: (L, D')."""

    def __init__(self, vectors: Mapping[str, Floats], space: Space, clf_normalize: bool) -> None:
        """
        Args:
            vectors: "de" and "clf" float32 [L, D], "bias" float32 [L]; those that exist, in memory or memory-mapped.
            space, clf_normalize: as for `scoring_space.label_vectors`.

        Raises:
            ValueError: a part that the space needs is not given, or the parts differ in number of labels.
        """
        self._vectors = {name: np.asarray(array) for name, array in vectors.items()}
        self._space, self._normalize = space, clf_normalize
        some = self.take(np.zeros(0, dtype=np.int64))  # raises for what is missing
        counts = {len(array) for array in self._vectors.values()}
        if len(counts) != 1:
            raise ValueError(f"parts differ in their number of labels: {sorted(counts)}")
        self._dim = next(array.shape[1] for array in self._vectors.values() if array.ndim == 2)
        self.shape = (counts.pop(), some.shape[1])

    def take(self, rows_P: Rows) -> Floats:
        """float32 [P, D'], contiguous: `scoring_space.label_vectors(...)[rows_P]`."""
        return space_rows(self._vectors, rows_P, self._space, self._normalize)

    def scores(self, query_D: Floats, rows_C: Rows) -> Floats:
        """float32 [C], inner products of one query [D'] with these rows: the heads' parts added, without putting the
        rows of both side by side."""
        out, at = None, 0
        if self._space in ("both", "de"):
            out = np.take(self._vectors["de"], rows_C, axis=0) @ query_D[: self._dim]
            at = self._dim
        if self._space in ("both", "clf"):
            rows_CD = np.take(self._vectors["clf"], rows_C, axis=0)
            part_C = rows_CD @ query_D[at : at + self._dim]
            if self._normalize:
                length = np.sqrt(np.einsum("cd,cd->c", rows_CD, rows_CD))
                part_C = np.divide(part_C, length, out=np.zeros_like(part_C), where=length > 0)
            elif "bias" in self._vectors:
                part_C += self._vectors["bias"][rows_C] * query_D[-1]
            out = part_C if out is None else out + part_C
        assert out is not None
        return out


def as_rows(vectors: LabelRows | npt.NDArray) -> LabelRows:
    """An array [L, D'], float32 or float16, as rows of a space; what is some already stays as it is."""
    return LabelRows({"de": vectors}, "de", False) if isinstance(vectors, np.ndarray) else vectors
