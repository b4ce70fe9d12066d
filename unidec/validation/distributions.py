"""Charts of a data set: text lengths, labels per query, queries per label."""

from __future__ import annotations

import numpy as np
import pandas as pd

from unidec.evaluation.figures import Chart, bar_chart


def distributions(tables: dict[str, pd.DataFrame]) -> list[Chart | None]:
    """Charts in percent: text lengths, labels per query, queries per label."""
    queries = tables["queries"]
    labels = tables["labels"]
    lengths = {"queries": queries["text_length"], "labels": labels["text_length"]}
    positives = {"queries": queries["num_positives"]}
    frequencies = {"labels": labels["num_train_queries"]}
    return [
        _histogram("Text length", lengths, "characters per text"),
        _histogram("Labels per query", positives, "labels per query"),
        _histogram("Label frequency", frequencies, "training queries per label"),
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
