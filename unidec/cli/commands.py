"""What commands share: options, how they become parameters, and what is printed: a table on a terminal, plain lines
otherwise, JSON with --json."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unidec.config import Params, load_params, parse_overrides

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    name="unidec",
    help="Extreme multi-label classification with a dual encoder and a classifier trained together.",
    epilog="In a checkout, `make train` runs all stages, and only those that are out of date.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
DEFAULT_PARAMS = Path("params.yaml")
DEFAULT_BUNDLE = Path("outputs/bundle")
ParamsFile = Annotated[Path, typer.Option("--params", metavar="FILE", help="parameter file")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="another value for one parameter; repeatable")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
BundleAddress = Annotated[
    str, typer.Option("--bundle", metavar="WHERE", help="a folder, models:/name@alias or models:/name/version")
]


def load(path: Path, assignments: list[str] | None) -> Params:
    return load_params(path, parse_overrides(assignments or []))


def load_if_there(path: Path, assignments: list[str] | None) -> Params:
    """As `load`, for commands that a bundle alone is enough for: without params.yaml every key has its default."""
    missing = path == DEFAULT_PARAMS and not path.exists()
    return load_params(None if missing else path, parse_overrides(assignments or []))


def bundle_folder(address: str) -> Path:
    """The folder of a bundle: itself, or the copy of a registered one, fetched if it is not there."""
    if not address.startswith("models:"):
        return Path(address)
    from unidec.tracking import fetch

    return fetch.bundle_folder(address)


def group(about: str) -> typer.Typer:
    """A group of commands; without a command it prints its help."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def command(
    app: typer.Typer,
    *examples: str,
    name: str | None = None,
    title: str | None = None,
    loads: Callable[[Path, list[str] | None], Params] = load,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: a command of `app` with the options that its function needs.

    A function with an argument `params: Params` gets the loaded parameters, and the command --params and --set; one
    that returns a result gets --json, and its result is printed.

    Args:
        examples: command lines for the help.
        name: of the command, if it is not the function's.
        title: of what is printed, if it is not the command's name.
        loads: `load` or `load_if_there`.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        prints, called = signature.return_annotation is not None, name or function.__name__.replace("_", "-")
        more: dict[str, tuple[Any, Any]] = {}
        needs_params = "params" in signature.parameters and signature.parameters["params"].annotation is Params
        if needs_params:
            more |= {"params": (ParamsFile, DEFAULT_PARAMS), "assignments": (Assignments, None)}
        if prints:
            more["as_json"] = (AsJson, False)

        @functools.wraps(function)
        def run(**given: Any) -> None:
            as_json = given.pop("as_json") if prints else False
            if needs_params:
                given["params"] = loads(given["params"], given.pop("assignments"))
            result = function(**given)
            if prints and result:
                show(title or called, result, as_json)

        own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in signature.parameters.values() if p.name not in more]
        shared = [
            Parameter(key, Parameter.KEYWORD_ONLY, annotation=kind, default=value)
            for key, (kind, value) in more.items()
        ]
        run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
        plural = "s" if len(examples) > 1 else ""
        app.command(called, epilog=f"Example{plural}: {'  |  '.join(examples)}")(run)
        return function

    return add


def add_stage(app: typer.Typer, name: str, stage: str, about: str, example: str) -> None:
    """Add a command that runs `unidec.pipeline.<stage>`, which takes nothing but the parameters."""

    def run(params: Params) -> dict[str, Any]:
        from unidec import pipeline

        result: dict[str, Any] = getattr(pipeline, stage)(params)
        return result

    run.__doc__ = about
    command(app, example, name=name, title=stage.replace("_", "-"))(run)


# -- what is printed ---------------------------------------------------------------------------------------------------


def show(title: str, result: dict[str, Any], as_json: bool) -> None:
    """The result as JSON, or as a table on a terminal and plain lines otherwise."""
    if as_json:
        print(json.dumps(result, indent=2, default=str))
        return
    rows = list(_rows(result))
    if not sys.stdout.isatty():
        for key, value in rows:
            print(f"{title}: {key} = {value}")
        return
    _print_table([], rows, title)


def show_table(columns: list[str], rows: list[list[str]]) -> None:
    """A table on a terminal, tab-separated lines otherwise."""
    if sys.stdout.isatty():
        _print_table(columns, rows)
    else:
        print("\n".join("\t".join(line) for line in [columns, *rows]))


def show_predictions(frame: pd.DataFrame) -> None:
    """A block for each query on a terminal: rank, score, label, title; tab-separated lines otherwise."""
    from rich.console import Console

    if not Console().is_terminal:
        print(frame.to_csv(sep="\t", index=False), end="")
        return
    for query, rows in frame.groupby("query", sort=False):
        cells = [[str(row.rank), f"{row.score:.4f}", str(row.label), str(row.title)] for row in rows.itertuples()]
        _print_table(["rank", "score", "label", "title"], cells, str(query))


def _print_table(columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title and escape(title), show_header=bool(columns), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in ("rank", "score") else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    Console().print(table)


def _rows(result: dict[str, Any], prefix: str = "") -> list[list[str]]:
    """Nested results as lines; long lists as their length."""
    rows = []
    for key, value in result.items():
        if isinstance(value, dict):
            rows += _rows(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > 5:
            rows.append([f"{prefix}{key}", f"{len(value)} entries"])
        else:
            rows.append([f"{prefix}{key}", f"{value:.4g}" if isinstance(value, float) else str(value)])
    return rows
