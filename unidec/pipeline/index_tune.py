"""`unidec index tune`: the quickest index that finds enough, measured on a bundle's labels and on real queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from unidec.data.dataset import Text
from unidec.data.storage import MANIFEST
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.indexing import OPTION_KEYS
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import write_with_index
from unidec.retrieval.index import KINDS, Kind
from unidec.retrieval.index_tune import default_kinds, tune
from unidec.retrieval.scoring_space import LabelRows


def index_tune(
    source: Path, wanted: float = 0.98, k: int = 100, num_queries: int = 300, kinds: Sequence[str] = (),
    out: Path | None = None, threads: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Measure kinds of index on a bundle; with `out` write it with the best one. The bundle itself is not touched.

    Args:
        source: the bundle's folder.
        wanted: recall of the first k labels against exact search, 0 to 1.
        num_queries: of the validation split of data/dataset (training queries where there is none).
        kinds: to be measured; empty: those that suit the number of labels.
        threads: of builds and searches.

    Returns:
        {"bundle", "labels", "k", "wanted", "queries": what was asked, "measured": list, "chosen": one of them or None,
        "params": its keys for params.yaml, "out"}.

    Raises:
        ConfigError: an unknown kind, or a folder that is no place for a bundle.
        ArtifactError: a damaged bundle, or no data set.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError("unknown kinds of index", got=", ".join(unknown), expected=", ".join(KINDS))
    if out is not None and out.exists() and (out.samefile(source) or not (out / MANIFEST).is_file()):
        raise ConfigError("the bundle itself, or something else, is there", where=str(out), fix="name another folder")
    bundle = Bundle.load(source)
    rows, k = LabelRows(bundle.vectors, bundle.info.space, bundle.info.clf_normalize), min(k, bundle.num_labels)
    queries, what = _queries(bundle, num_queries)
    some = cast(Sequence[Kind], kinds) or default_kinds(bundle.num_labels)
    measured, best = tune(rows, queries, k, wanted, some, threads)
    found: dict[str, Any] = {
        "bundle": str(source), "labels": bundle.num_labels, "k": k, "wanted": wanted, "queries": what,
        "measured": [asdict(one) for one in measured], "chosen": None, "params": {}, "out": None,
    }  # fmt: skip
    if best is not None:
        chosen = min((one for one in measured if one.recall >= wanted), key=lambda one: one.p50_ms)
        keys = {f"index.{OPTION_KEYS[name]}": value for name, value in chosen.options.items()}
        found |= {"chosen": asdict(chosen), "params": {"index.kind": chosen.kind} | keys}
        if out is not None:
            found["out"] = str(write_with_index(source, bundle.info, out, best))
    return found


def _queries(bundle: Bundle, num: int) -> tuple[npt.NDArray[np.float32], str]:
    """float32 [N, D'] and what they are."""
    dataset = paths.open_dataset()
    split = "validation" if len(dataset.rows("validation")) else "train"
    of_split = dataset.rows(split)  # type: ignore[arg-type]
    chosen = np.sort(np.random.default_rng(0).choice(of_split, min(num, len(of_split)), replace=False))
    encoded = bundle.encode(dataset.query_texts(chosen, cast(Text, bundle.info.text)))
    return bundle.searched(encoded.de_BD, encoded.clf_BD), f"{len(chosen)} {split} queries of {dataset.name}"
