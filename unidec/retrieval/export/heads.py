"""Which score an export is about, and what every exported folder has.

Every export of vectors has a head: "de", "clf", or "both" as the bundle ranks. What is exported of queries and of
labels with the same head has that score as its inner product (`scoring_space.py`), without the votes of training
queries.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.errors import ConfigError, DataError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import BundleInfo
from unidec.retrieval.scoring_space import Space, width


@dataclass(frozen=True)
class Scored:
    """One score of a bundle as an inner product.

    Attributes:
        head: "both", "de" or "clf".
        clf_weight: of the classifier's part; 1 where it is alone.
        clf_normalize: the classifier's score is a cosine.
        has_bias: labels have a bias, for which queries have one more dimension.
        dim: width of a head. width: of the vectors.
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
        there: dict[str, Space] = {name: name for name in ("de", "clf") if name in info.vectors}
        if info.space == "both":
            there["both"] = "both"
        chosen = there.get(head or info.space)
        if chosen is None:
            expected = " or ".join(sorted(there))
            raise DataError("the bundle has no such head", where="--head", got=head, expected=expected)
        has_bias = "bias" in info.vectors and chosen != "de" and not info.clf_normalize
        weight = info.clf_weight if chosen == "both" else 1.0
        wide = width(info.dim, chosen, info.clf_normalize, has_bias)
        return cls(chosen, weight, info.clf_normalize, has_bias, info.dim, wide)

    def facts(self) -> dict[str, Any]:
        """For a file's metadata."""
        facts: dict[str, Any] = {"head": self.head, "clf_weight": self.clf_weight, "clf_normalize": self.clf_normalize}
        return facts | {"width": self.width, "similarity": "inner product"}


def write_readme(folder: Path, bundle: Bundle, score: Scored, outputs: Sequence[str] = (), opset: int = 0) -> None:
    """What an exported folder is and how it is loaded; `outputs`: of its ONNX graph, if it has one."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined)
    text = pages.get_template("readme.md.jinja").render(bundle=bundle, score=score, outputs=outputs, opset=opset)
    (folder / "README.md").write_text(text + "\n", encoding="utf-8")


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
