"""`unidec index tune`: the quickest index that finds enough, measured on a bundle's labels and on real queries."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from unidec.data.dataset import Text
from unidec.data.storage import read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.pipeline import paths
from unidec.pipeline.indexing import OPTION_KEYS
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION, write_with_index
from unidec.retrieval.index import KINDS, Kind
from unidec.retrieval.index_tune import default_kinds, tune
from unidec.retrieval.scoring_space import LabelRows

_ENCODED_AT_ONCE = 256


def index_tune(
    source: Path,
    wanted: float = 0.98,
    k: int = 100,
    num_queries: int = 300,
    kinds: Sequence[str] = (),
    out: Path | None = None,
    threads: int = 1,
) -> dict[str, Any]:
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
    if out is not None:
        _check_place(source, out)
    bundle = Bundle.load(source)
    rows = LabelRows(bundle.vectors, bundle.info.space, bundle.info.clf_normalize)
    queries, what = _queries(bundle, num_queries)
    chosen_kinds = cast(Sequence[Kind], kinds) or default_kinds(bundle.num_labels)
    measured, best = tune(rows, queries, min(k, bundle.num_labels), wanted, chosen_kinds, threads)
    found: dict[str, Any] = {
        "bundle": str(source), "labels": bundle.num_labels, "k": min(k, bundle.num_labels), "wanted": wanted,
        "queries": what, "measured": [asdict(one) for one in measured], "chosen": None, "params": {}, "out": None,
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
    found = dataset.rows(split)  # type: ignore[arg-type]
    found = np.sort(np.random.default_rng(0).choice(found, min(num, len(found)), replace=False))
    texts = dataset.query_texts(found, cast(Text, bundle.info.text))
    parts = []
    for start in range(0, len(texts), _ENCODED_AT_ONCE):
        encoded = bundle.encode(texts[start : start + _ENCODED_AT_ONCE])
        parts.append(bundle.searched(encoded.de_BD, encoded.clf_BD))
    return np.concatenate(parts), f"{len(texts)} {split} queries of {dataset.name}"


def _check_place(source: Path, out: Path) -> None:
    """Refuse to write over anything but another bundle."""
    if os.path.realpath(out) == os.path.realpath(source):
        raise ConfigError("the bundle itself stays as it is", where=str(out), fix="name another folder")
    try:
        if out.exists():
            read_manifest(out, KIND, VERSION, verify=False)
    except ArtifactError as error:
        raise ConfigError("there is something else", where=str(out), expected="no folder, or a bundle") from error
