"""What commands print: a table on a terminal, plain lines otherwise, JSON where it is asked for."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def show(command: str, result: dict[str, Any], as_json: bool) -> None:
    """The result as JSON, or as a table on a terminal and plain lines otherwise."""
    if as_json:
        print(json.dumps(result, indent=2, default=str))
        return
    rows = list(_rows(result))
    if not sys.stdout.isatty():
        for key, value in rows:
            print(f"{command}: {key} = {value}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=command, show_header=False, title_justify="left")
    for key, value in rows:
        table.add_row(key, value)
    Console().print(table)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal, tab-separated lines otherwise."""
    if not sys.stdout.isatty():
        print("\n".join("\t".join(line) for line in [columns, *rows]))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def _rows(result: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested results as lines; long lists as their length."""
    rows: list[tuple[str, str]] = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > 5:
            rows.append((f"{prefix}{key}", f"{len(value)} entries"))
        else:
            rows.append((f"{prefix}{key}", f"{value:.4g}" if isinstance(value, float) else str(value)))
    return rows


def show_predictions(frame: pd.DataFrame) -> None:
    """A block for each query: rank, score, label, title."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(frame.to_csv(sep="\t", index=False), end="")
        return
    for query, group in frame.groupby("query", sort=False):
        table = Table(title=escape(str(query)), title_justify="left")
        for name in ("rank", "score", "label", "title"):
            table.add_column(name, justify="right" if name in ("rank", "score") else "left")
        for row in group.itertuples():
            table.add_row(str(row.rank), f"{row.score:.4f}", escape(str(row.label)), escape(str(row.title)))
        console.print(table)
