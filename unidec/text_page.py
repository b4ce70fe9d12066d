"""Texts of several lines, for terminals and Markdown, from the Jinja2 templates in `templates/`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from unidec.version import PACKAGE


def render_text(template: str, **context: Any) -> str:
    """The text of a template, without the line break at its end."""
    return _environment().get_template(f"{template}.jinja").render(context).rstrip("\n")


@functools.cache
def _environment() -> Any:
    return environment(PACKAGE / "templates")


def environment(folder: Path, **options: Any) -> Any:
    """Jinja2's environment for the templates in a folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
