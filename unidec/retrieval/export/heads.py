"""Which score an export is about, and its two sides.

Every export of vectors has a head: "de", "clf", or "both" as the bundle ranks. What is exported of queries and of
labels with the same head has that score as its inner product (`scoring_space.py`), without the
votes of training queries.

Legend: B queries, L labels, n some labels, D' width of the space.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.errors import ConfigError, DataError
from unidec.retrieval.bundle_folder import BundleInfo
from unidec.retrieval.scoring_space import SPACES, Space, label_vectors, query_vectors, width

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Scored:
    """One score of a bundle as an inner product.

    Attributes:
        head: "both", "de" or "clf".
        clf_weight: of the classifier's part; 1 where it is alone.
        clf_normalize: the classifier's score is a cosine.
        has_bias: labels have a bias, for which queries have one more dimension.
        dim: D, width of a head. width: D'.
    """

    head: Space
    clf_weight: float
    clf_normalize: bool
    has_bias: bool
    dim: int
    width: int

    @classmethod
    def of(cls, info: BundleInfo, head: str | None = None) -> Scored:
        """The score of a head; None: what the bundle ranks by.

        Raises:
            DataError: an unknown head, or one that the bundle does not have.
        """
        chosen = info.space if head is None else head
        there: list[str] = [name for name in ("de", "clf") if name in info.vectors]
        if info.space == "both":
            there.append("both")
        if chosen not in SPACES or chosen not in there:
            raise DataError(
                "the bundle has no such head", where="--head", got=chosen, expected=" or ".join(sorted(there))
            )
        has_bias = "bias" in info.vectors and chosen != "de" and not info.clf_normalize
        weight = info.clf_weight if chosen == "both" else 1.0
        wide = width(info.dim, chosen, info.clf_normalize, has_bias)
        return cls(chosen, weight, info.clf_normalize, has_bias, info.dim, wide)

    def labels(self, vectors: Mapping[str, Floats], begin: int, end: int) -> Floats:
        """Label side of some rows, float32 [n, D'].

        Args:
            vectors: the bundle's arrays: de, clf [L, D], bias [L].
        """
        de, clf, bias = (None if (a := vectors.get(name)) is None else a[begin:end] for name in ("de", "clf", "bias"))
        return label_vectors(de, clf, bias, self.head, self.clf_normalize)

    def queries(self, de_BD: Floats | None, clf_BD: Floats | None) -> Floats:
        """Query side, float32 [B, D'], of what the model's heads give."""
        return query_vectors(de_BD, clf_BD, self.head, self.clf_weight, self.clf_normalize, self.has_bias)

    def facts(self) -> dict[str, Any]:
        """For a file's metadata or a README."""
        return {
            "head": self.head,
            "clf_weight": self.clf_weight,
            "clf_normalize": self.clf_normalize,
            "width": self.width,
            "similarity": "inner product",
        }


def refuse_foreign(folder: Path) -> None:
    """Only an earlier export is replaced.

    Raises:
        ConfigError: the folder holds something else.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        kind = json.loads((folder / "manifest.json").read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError):
        kind = None
    if kind not in ("sentence-transformers", "onnx-export"):
        raise ConfigError(
            "the folder exists and is no earlier export", where=str(folder), fix="name a new folder, or remove this one"
        )
