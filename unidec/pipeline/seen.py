"""Finds test queries that a model was trained on, as is possible if the splits of the data have
changed.

A training records hashes of the texts of its training and validation queries in the model's folder,
together with the hashes recorded by the models that it started from or learnt from.

Legend: N queries of the data set, n test queries, Q queries that a model has seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from unidec.config import Validation
from unidec.data.dataset import Text, XMCDataset
from unidec.data.profile import text_facts
from unidec.data.raw import SPLITS
from unidec.data.storage import Folder, load_array, read_manifest
from unidec.data.tokens import Bools, Ints
from unidec.evaluation.significance import Check
from unidec.model.arrays import KIND, VERSION

RECORD = "seen_queries.npy"
"""File in a model's folder: uint64 [Q], ascending hashes of texts."""
SEEN_KEY = "seen"  # in the manifest of that folder: {"text", "complete"}
CHECK = "unseen queries"
# minimum number of unseen test queries to compare models that saw more than half of the test split
FEWEST = 100
ACCEPT = "validation.test_texts_in_train: warn"


@dataclass(frozen=True)
class Seen:
    """The queries that a model was trained or selected on.

    Attributes:
        hash_Q: uint64, ascending hashes of the texts as the model reads them.
        text: fields of the texts that were hashed.
        complete: whether nothing is missing; False if, for example, training started from a model
        without a record.
    """

    hash_Q: NDArray[np.uint64]
    text: Text
    complete: bool = True

    def among(self, dataset: XMCDataset, rows: Ints) -> Bools:
        """Whether the text of each query at these rows was seen, bool [n]."""
        hash_N, length_N = text_facts(dataset, "queries", self.text)
        return np.isin(hash_N[rows], self.hash_Q) & (length_N[rows] > 0)


@dataclass(frozen=True)
class Unseen:
    """Test queries for the comparison of two models.

    Attributes:
        rows: int64 [n], data set rows of the queries that no model has seen; all test queries if
            seen ones are accepted.
        counts: number of test queries that each model has seen; None: unknown.
        check: whether there are enough unseen queries.
    """

    rows: Ints
    counts: dict[str, int | None]
    check: Check


def write_record(out: Folder, dataset: XMCDataset, text: Text, earlier: Iterable[Path]) -> None:
    """Record in a model's folder the queries that its training has seen.

    Args:
        earlier: folders of the models that training started from or learnt from.
    """
    hash_Q = _of_dataset(dataset, text).hash_Q
    complete = True
    for model in earlier:
        before = of_model(model)
        if before is None or before.text != text:
            complete = False
            continue
        complete &= before.complete
        hash_Q = np.union1d(hash_Q, before.hash_Q)
    np.save(out.path / RECORD, hash_Q)
    out.meta[SEEN_KEY] = {"text": text, "complete": complete}


def of_model(folder: Path) -> Seen | None:
    """The queries that the exported model in a folder has seen; None without a record of them."""
    record = read_manifest(folder, KIND, VERSION, verify=False)["meta"].get(SEEN_KEY)
    if record is None:
        return None
    return Seen(load_array(folder / RECORD, np.uint64), **record)


def unseen_queries(folders: Mapping[str, Path], dataset: XMCDataset, limits: Validation) -> Unseen:
    """The test queries that none of these bundles (name -> folder) has seen."""
    rows = dataset.rows("test")
    total = len(rows)
    is_seen = np.zeros(total, dtype=bool)
    counts: dict[str, int | None] = {}
    words = []
    for name, folder in folders.items():
        found = of_model(folder / "model")
        if found is None:
            counts[name] = None
            words.append(
                f"which queries the {name} was trained on is unknown: its figures may be too high"
            )
            continue
        mask = found.among(dataset, rows)
        is_seen |= mask
        count = int(mask.sum())
        counts[name] = count
        words.append(f"the {name} was trained on {count:,} of the {total:,} test queries")
        if not found.complete:
            words.append("it may have seen more: its training started from a model without record")
    judged = rows[~is_seen]
    num_left = len(judged)
    least = min(FEWEST, math.ceil(total / 2))
    fewest: int | None = least
    is_enough = num_left >= least
    limit = limits.limit("test_texts_in_train")
    if is_enough:
        words.append(f"both are judged on the {num_left:,} that neither has seen")
    elif limit.severity != "error" or total - num_left <= limit.share * total:
        words.append(f"all are judged on, which {ACCEPT} accepts")
        judged = rows
        is_enough = True
        fewest = None
    else:
        words.append(f"only {num_left:,} are left, too few to judge on")
    check = Check(CHECK, is_enough, len(judged), fewest, "; ".join(words))
    return Unseen(judged, counts, check)


def leak_in_words(found: Seen | None, dataset: XMCDataset) -> tuple[str, int]:
    """Test queries that a model has seen and that are not also current training queries: a phrase
    for messages, and their number.

    (Texts in both splits of one data set are counted by its validation.)
    """
    rows = dataset.rows("test")
    total = len(rows)
    if found is None or not total:
        return "", 0
    trained = _of_dataset(dataset, found.text)
    new = found.among(dataset, rows) & ~trained.among(dataset, rows)
    num = int(new.sum())
    return f"{num:,} of {total:,} test queries ({num / total:.1%})", num


def _of_dataset(dataset: XMCDataset, text: Text) -> Seen:
    """All queries outside the test split, as seen queries."""
    hash_N, length_N = text_facts(dataset, "queries", text)
    is_seen_N = (np.asarray(dataset.split_N) != SPLITS.index("test")) & (length_N > 0)
    return Seen(np.unique(hash_N[is_seen_N]), text)
