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
        given = set()
        for values in rows.values():
            given |= {key for key, value in values.items() if value is not None}
        used = [key for key in columns if key in given]
        heads = (
            columns if isinstance(columns, Mapping) else dict(zip(columns, columns, strict=True))
        )
        cells = [[name, *map(row.get, used)] for name, row in rows.items()]
        return cls([head, *(heads[key] for key in used)], cells if used else [], **more)

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
            yield kind, [(cell, best.get(place) == cell.value) for place, cell in enumerate(row)]


def _cell(value: Any) -> Shown:
    if isinstance(value, Shown):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Shown(number(value), float(value))
    return Shown(number(value))


def render(template: str, **context: Any) -> str:
    """The HTML of a page."""
    return _environment().get_template(f"{template}.html.jinja").render(context)


def write_page(path: str | os.PathLike[str], html: str) -> None:
    """Write a page atomically. Raises ArtifactError if that fails."""
    write_bytes_atomic(path, html.encode("utf-8", "replace"))


@functools.cache
def _environment() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.do"],
    )
    environment.globals |= {"Shown": Shown, "Table": Table, "metrics_shown": shown}
    environment.filters |= {"number": number, "exact": functools.partial(number, exact=True)}
    return environment


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
