"""Charts of a data set: text lengths, labels per query, queries per label."""

from __future__ import annotations

import itertools

from unidec.data.database import Database
from unidec.evaluation.figures import Chart, bar_chart


def distributions(tables: Database) -> list[Chart | None]:
    """Charts in percent: text lengths, labels per query, queries per label."""
    lengths = {"queries": "text_length", "labels": "text_length"}
    return [
        _histogram(tables, "Text length", lengths, "characters per text"),
        _histogram(tables, "Labels per query", {"queries": "num_positives"}, "labels per query"),
        _histogram(
            tables, "Label frequency", {"labels": "num_train_queries"}, "training queries per label"
        ),
    ]


def _histogram(tables: Database, caption: str, columns: dict[str, str], unit: str) -> Chart | None:
    """Histogram in percent of a column of each table, over bins of doubling width (0, 1, 2 to 3, 4
    to 7, ...), named by their lower bound.
    """
    found: dict[str, dict[int, float]] = {}
    for table, column in columns.items():
        bits = f"CASE {column} WHEN 0 THEN 0 ELSE length(bin({column})) END"
        share = "100 * count(*) / sum(count(*)) OVER ()"
        rows = tables.execute(f"SELECT {bits} AS bits, {share} FROM {table} GROUP BY bits")
        found[table] = dict(rows.fetchall())
    highest = max(itertools.chain([0], *found.values()))
    names = ["0", *(f"{2**power:,}" for power in range(highest))]
    shares = [
        (table, [share.get(bits, 0.0) for bits in range(highest + 1)])
        for table, share in found.items()
    ]
    return bar_chart(
        caption, names, shares, "percent", x_label=f"{unit}; a bar covers its number up to the next"
    )
