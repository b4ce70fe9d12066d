"""Which queries a model was trained on, counted among the test queries: if the splits of the data
changed, a model can meet queries in the test split that it was trained on.

A training records hashes of the texts of its training and validation queries in the model's folder,
together with those of the model that it started from. Without this record (older models), they are
those that vote in the bundle, or those of the data set if the bundle was trained on the current
one.

Legend: N queries of the data set, n test queries, Q queries that a model has seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from unidec.bundle.bundle_folder import read_info
from unidec.bundle.bundle_info import BundleInfo
from unidec.bundle.neighbour_files import read_titles
from unidec.config import Validation
from unidec.data.dataset import Text, XMCDataset
from unidec.data.profile import PROFILE_KEY, text_facts, text_hashes
from unidec.data.raw import SPLITS
from unidec.data.storage import Folder, load_array, read_manifest
from unidec.evaluation.significance import Check
from unidec.model.arrays import KIND, VERSION

RECORD = "seen_queries.npy"
"""File in a model's folder: uint64 [Q], ascending hashes of texts."""
SEEN_KEY = "seen"  # in the manifest of that folder: {"text", "complete"}
CHECK = "unseen queries"
# test queries on which models are judged, if they saw more than half of the test split
FEWEST = 100
ACCEPT = "validation.test_texts_in_train: warn"


@dataclass(frozen=True)
class Seen:
    """The queries that a model was trained or selected on.

    Attributes:
        hash_Q: uint64, ascending, of the texts as the model reads them.
        text: fields of the texts that were hashed.
        complete: nothing is missing, such as the queries of an older model that training started
        from.
    """

    hash_Q: NDArray[np.uint64]
    text: Text
    complete: bool = True

    def among(self, dataset: XMCDataset, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the text of each query at these rows was seen, bool [n]."""
        hash_N, length_N = text_facts(dataset, "queries", self.text)
        return np.isin(hash_N[rows], self.hash_Q) & (length_N[rows] > 0)


@dataclass(frozen=True)
class Unseen:
    """Test queries for the comparison of two models.

    Attributes:
        rows: int64 [n], of the data set: those that no model has seen, or all if that is accepted.
        counts: number of test queries that each model has seen; None: unknown.
        check: whether there are enough of them.
    """

    rows: NDArray[np.int64]
    counts: dict[str, int | None]
    check: Check


def write_record(out: Folder, dataset: XMCDataset, text: Text, start: Path | None) -> None:
    """Record the queries that a training has seen in the folder of its model.

    Args:
        start: folder of the model that training started from; None: from scratch.
    """
    own = _of_dataset(dataset, text)
    hash_Q = own.hash_Q
    complete = True
    if start is not None:
        before = of_model(start)
        complete = before is not None and before.complete and before.text == text
        if before is not None and before.text == text:
            hash_Q = np.union1d(hash_Q, before.hash_Q)
    np.save(out.path / RECORD, hash_Q)
    out.meta[SEEN_KEY] = {"text": text, "complete": complete}


def of_model(folder: Path) -> Seen | None:
    """The queries that the model in a folder has seen; None if nothing is known about them.

    Args:
        folder: an exported model, also that of a bundle (`model/`), whose voting queries are known,
        too.
    """
    record = read_manifest(folder, KIND, VERSION, verify=False)["meta"].get(SEEN_KEY)
    if record is not None:
        return Seen(load_array(folder / RECORD, np.uint64), record["text"], record["complete"])
    bundle = folder.parent
    if not (bundle / "bundle.json").is_file():
        return None
    info = read_info(bundle)
    if info.knn is None or info.text != "title":  # of long texts, only the titles are stored
        return None
    titles = pc.utf8_trim_whitespace(read_titles(bundle, info.knn.num_queries))
    hash_Q = np.unique(text_hashes(titles))
    return Seen(hash_Q, "title", complete=not _started_from_another(folder))


def of_bundle(bundle: Path, dataset: XMCDataset) -> Seen | None:
    """The queries that a bundle's model has seen; None if nothing is known about them."""
    found = of_model(bundle / "model")
    if found is None and _was_trained_on(read_info(bundle), dataset):
        text = cast(Text, read_info(bundle).text)
        return Seen(
            _of_dataset(dataset, text).hash_Q,
            text,
            complete=not _started_from_another(bundle / "model"),
        )
    return found


def unseen_queries(folders: Mapping[str, Path], dataset: XMCDataset, limits: Validation) -> Unseen:
    """The test queries that none of these bundles (name -> folder) has seen."""
    rows = dataset.rows("test")
    seen = {name: of_bundle(folder, dataset) for name, folder in folders.items()}
    masks = {name: found.among(dataset, rows) for name, found in seen.items() if found is not None}
    counts = {name: int(masks[name].sum()) if name in masks else None for name in folders}
    is_seen = np.zeros(len(rows), dtype=bool)
    for mask in masks.values():
        is_seen |= mask
    left = rows[~is_seen]
    words = [_counted(name, counts[name], len(rows)) for name in folders]
    words += [
        f"the {name} may have seen more: the model that it started from has no record of its "
        "queries"
        for name, found in seen.items()
        if found is not None and not found.complete
    ]
    is_enough = len(left) >= min(FEWEST, len(rows) / 2)
    if not is_enough and _is_accepted(len(rows) - len(left), len(rows), limits):
        words.append(f"all are judged on, which {ACCEPT} accepts")
        return Unseen(rows, counts, Check(CHECK, True, len(rows), None, "; ".join(words)))
    judged = f"the {len(left):,} that neither has seen"
    if len(left) == len(rows):
        judged = "all"
    words.append(
        f"both are judged on {judged}"
        if is_enough
        else f"only {len(left):,} are left, too few to judge on"
    )
    half = -(-len(rows) // 2)
    check = Check(CHECK, is_enough, len(left), min(FEWEST, half), "; ".join(words))
    return Unseen(left, counts, check)


def leak_in_words(found: Seen | None, dataset: XMCDataset) -> tuple[str, int]:
    """Test queries that a model has seen and that are not also training queries now: a sentence
    part, and their number.

    (Texts in both splits of one data set are counted by its validation.)
    """
    rows = dataset.rows("test")
    if found is None or not len(rows):
        return "", 0
    new = found.among(dataset, rows) & ~_of_dataset(dataset, found.text).among(dataset, rows)
    num = int(new.sum())
    share = num / len(rows)
    return f"{num:,} of {len(rows):,} test queries ({share:.1%})", num


def leaks(num: int, dataset: XMCDataset, limits: Validation) -> bool:
    """Whether so many test queries, seen by the model that a training starts from, make its figures
    worthless.
    """
    return num > 0 and not _is_accepted(num, len(dataset.rows("test")), limits)


def _is_accepted(num_seen: int, num_test: int, limits: Validation) -> bool:
    limit = limits.limit("test_texts_in_train")
    return limit.severity != "error" or num_seen <= limit.share * num_test


def _counted(name: str, count: int | None, total: int) -> str:
    if count is None:
        return f"which queries the {name} was trained on is unknown: its figures may be too high"
    return f"the {name} was trained on {count:,} of the {total:,} test queries"


def _of_dataset(dataset: XMCDataset, text: Text) -> Seen:
    """All queries but those of the test split."""
    hash_N, length_N = text_facts(dataset, "queries", text)
    is_seen_N = (np.asarray(dataset.split_N) != SPLITS.index("test")) & (length_N > 0)
    return Seen(np.unique(hash_N[is_seen_N]), text)


def _was_trained_on(info: BundleInfo, dataset: XMCDataset) -> bool:
    # the profile is of the training; after a refresh of the labels, info.dataset is that of the
    # labels
    profile = info.card.get(PROFILE_KEY)
    return isinstance(profile, dict) and profile.get("sha256") == dataset.sha256


def _started_from_another(model: Path) -> bool:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    return "start" in config or bool(config.get("encoder", {}).get("start"))
