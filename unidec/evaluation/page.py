"""HTML pages from the Jinja2 templates in this folder; texts are escaped, pages load no files."""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic
from unidec.metric_names import shown
from unidec.text_page import environment

Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Shown:
    """A table cell that shows more than a number.

    Attributes:
        text: of the cell. value: compared to find the best of the column. small: shown after the
        text in small print.
        kind: "right" or "wrong" colours the cell.
    """

    text: str
    value: float = math.nan
    small: str = ""
    kind: str = ""


@dataclass(frozen=True)
class Table:
    """A table whose first `text_columns` hold texts, the others numbers or `Shown`. Without rows it
    is falsy and not shown.

    Attributes:
        best: print the largest value of each column in bold. kinds: a CSS class for each row
        ("base", "reference").
        caption: shown above.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    text_columns: int = 1
    best: bool = False
    kinds: Sequence[str] = ()
    caption: str = ""

    @classmethod
    def of(
        cls,
        head: str,
        rows: Mapping[str, Mapping[str, Any]],
        columns: Sequence[str] | Mapping[str, str],
        **more: Any,
    ) -> Table:
        """A table with a row for each name of `rows`, and the `columns` (keys, or key -> heading)
        that have any value.
        """
        used = [key for key in columns if any(row.get(key) is not None for row in rows.values())]
        named = columns if isinstance(columns, Mapping) else {}
        cells = [[name, *map(row.get, used)] for name, row in rows.items()]
        return cls([head, *(named.get(key, key) for key in used)], cells if used else [], **more)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def shown(self) -> Iterator[tuple[str, list[tuple[Shown, bool]]]]:
        """Each row's CSS class, and its cells, each with whether it is bold."""
        rows = [[_cell(value) for value in row] for row in self.rows]
        best: dict[int, float] = {}
        if self.best and len(rows) > 1:
            for place in range(self.text_columns, len(self.header)):
                values = [row[place].value for row in rows if math.isfinite(row[place].value)]
                if len(values) == 1 or len(set(values)) > 1:  # if all are equal, none is best
                    best[place] = max(values)
        kinds = itertools.chain(self.kinds, itertools.repeat(""))
        for kind, row in zip(kinds, rows, strict=False):
            cells = enumerate(row)
            yield kind, [(cell, best.get(place) == cell.value) for place, cell in cells]


def _cell(value: Any) -> Shown:
    if isinstance(value, Shown):
        return value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Shown(number(value), float(value) if is_number else math.nan)


def render(template: str, **context: Any) -> str:
    """The HTML of a page."""
    return _environment().get_template(f"{template}.html.jinja").render(context)


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page atomically. Raises ArtifactError if that fails."""
    write_bytes_atomic(path, html.encode("utf-8", "replace"))


@functools.cache
def _environment() -> Any:
    folder = Path(__file__).parent / "templates"
    pages = environment(folder, autoescape=True, extensions=["jinja2.ext.do"])
    pages.globals |= {"Shown": Shown, "Table": Table, "metrics_shown": shown}
    pages.filters |= {"number": number, "exact": functools.partial(number, exact=True)}
    return pages


def number(value: Any, *, exact: bool = False) -> str:
    """A value as displayed: two decimals, thousands separators, a dash for none; `exact` keeps all
    digits.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value) if exact else f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}" if exact else f"{value:,.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(number(item, exact=exact) for item in value)
    return str(value)
