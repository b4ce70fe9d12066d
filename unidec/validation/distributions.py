"""Charts of a data set: text lengths, labels per query, queries per label, scripts."""

from __future__ import annotations

import unicodedata
from collections import Counter

import numpy as np
import pandas as pd

from unidec.data.dataset import XMCDataset
from unidec.data.profile import spaced
from unidec.evaluation.figures import Chart, bar_chart
from unidec.validation.frames import TITLES, Reading

CHARACTER_TEXTS = 20_000  # number of evenly spaced texts whose characters are counted


def distributions(
    dataset: XMCDataset, tables: dict[str, pd.DataFrame], reading: Reading = TITLES
) -> list[Chart | None]:
    """Charts in percent: text lengths, labels per query, queries per label, characters
    by script.
    """
    queries = tables["queries"]
    labels = tables["labels"]
    lengths = {"queries": queries["text_length"], "labels": labels["text_length"]}
    positives = {"queries": queries["num_positives"]}
    frequencies = {"labels": labels["num_train_queries"]}
    return [
        _histogram("Text length", lengths, "characters per text"),
        _histogram("Labels per query", positives, "labels per query"),
        _histogram("Label frequency", frequencies, "training queries per label"),
        _characters(dataset, reading),
    ]


def _histogram(caption: str, columns: dict[str, pd.Series], unit: str) -> Chart | None:
    """Histogram in percent over bins of doubling width (0, 1, 2 to 3, 4 to 7, ...), named by their
    lower bound.
    """
    bins = [np.frexp(values.to_numpy(np.float64))[1] for values in columns.values()]
    highest = int(np.concatenate(bins).max(initial=0))
    names = ["0", *(f"{2**power:,}" for power in range(highest))]
    shares = []
    for name, bin_N in zip(columns, bins, strict=True):
        count = np.bincount(bin_N, minlength=len(names))
        share = 100 * count / max(len(bin_N), 1)
        shares.append((name, share.tolist()))
    return bar_chart(
        caption, names, shares, "percent", x_label=f"{unit}; a bar covers its number up to the next"
    )


def _characters(dataset: XMCDataset, reading: Reading) -> Chart | None:
    query_rows = spaced(np.arange(dataset.num_queries), CHARACTER_TEXTS)
    label_rows = spaced(np.arange(dataset.num_labels), CHARACTER_TEXTS)
    of_queries = _scripts(dataset.query_texts(query_rows, reading.text))
    of_labels = _scripts(dataset.label_texts(label_rows, reading.text))
    shares = pd.DataFrame({"queries": of_queries, "labels": of_labels}).fillna(0.0)
    shares = shares.sort_index().sort_values("queries", ascending=False, kind="stable")
    names = shares.index.tolist()
    columns = [(which, shares[which].tolist()) for which in shares]
    return bar_chart(
        "Characters by script",
        names,
        columns,
        "percent of the characters",
        x_label="white space not counted",
    )


def _scripts(texts: list[str]) -> dict[str, float]:
    """Percent of the characters without white space by script; the 8 most frequent."""
    found: Counter[str] = Counter()
    characters = "".join("".join(texts).split())
    for character, count in Counter(characters).items():
        found[_script(character)] += count
    return {name: 100 * count / found.total() for name, count in found.most_common(8)}


def _script(character: str) -> str:
    """The first word of a letter's Unicode name (Latin, Cyrillic, ...), "digits" or
    "other signs".
    """
    kind = unicodedata.category(character)[0]
    if kind == "N":
        return "digits"
    if kind != "L":
        return "other signs"
    return unicodedata.name(character, "other").split()[0].capitalize()
