"""Shared by all commands: options, loading of parameters, and output: plain lines, or JSON with
--json.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option, Typer

from unidec import pipeline
from unidec.config import Params, load_params, parse_overrides

if TYPE_CHECKING:
    import pandas as pd

app = Typer(
    name="unidec",
    help=(
        "Extreme multi-label classification with a dual encoder and a classifier trained together."
    ),
    epilog="In a checkout, `make train` runs every stage that is out of date.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
has_finished_work = False
"""Whether the command's result is kept elsewhere than in its output, as files or in the
registry.
"""
DEFAULT_PARAMS = Path("params.yaml")
ParamsFile = Annotated[Path, Option("--params", metavar="FILE", help="parameter file")]
Assignments = Annotated[
    list[str] | None,
    Option("--set", metavar="KEY=VALUE", help="override one parameter; repeatable"),
]
AsJson = Annotated[bool, Option("--json", help="print the result as JSON")]
DEFAULT_BUNDLE = "outputs/bundle"
BundleAddress = Annotated[
    str, Option(metavar="WHERE", help="a folder, models:/name@alias or models:/name/version")
]


@dataclass(frozen=True)
class Shown:
    """A command's result: printed as JSON with --json, else as lines; then the program exits with
    `exit_code`.
    """

    found: Any
    lines: Sequence[str]
    exit_code: int = 0


def load(path: Path, assignments: list[str] | None) -> Params:
    return load_params(path, parse_overrides(assignments or []))


def load_if_there(path: Path, assignments: list[str] | None) -> Params:
    """Like `load`, for commands that need only a bundle: without params.yaml all parameters have
    their defaults.
    """
    missing = path == DEFAULT_PARAMS and not path.exists()
    return load_params(None if missing else path, parse_overrides(assignments or []))


def bundle_folder(address: str) -> Path:
    """The folder of a bundle: the path itself, or the local copy of a registered bundle."""
    from unidec.tracking import fetch

    return fetch.bundle_folder(address)


def group(name: str, about: str) -> Typer:
    """A group of commands; without a command it prints its help."""
    made = Typer(name=name, help=about, no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(made)
    return made


def command(
    group: Typer,
    *examples: str,
    name: str | None = None,
    title: str | None = None,
    loads: Callable[[Path, list[str] | None], Params] = load,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: add a function as a command of `group`, with the options that it needs.

    If the function has an argument `params: Params`, it receives the loaded parameters, and the
    command has --params and --set. If it returns a result, the result is printed, and the command
    has --json.

    Args:
        group: group of the command; `app` for none.
        examples: arguments that the help shows after the command's name.
        name: name of the command; default: the function's.
        title: prefix of the printed lines; default: the command's name.
        loads: `load` or `load_if_there`.
    """

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function, eval_str=True)
        prints = signature.return_annotation is not None
        called = name or function.__name__.replace("_", "-")
        own = [p for p in signature.parameters.values() if p.annotation is not Params]
        own = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in own]
        needs_params = len(own) < len(signature.parameters)
        if needs_params:
            own.append(_option("params", ParamsFile, DEFAULT_PARAMS))
            own.append(_option("assignments", Assignments, None))
        if prints:
            own.append(_option("as_json", AsJson, False))

        @functools.wraps(function)
        def run(**given: Any) -> None:
            as_json = given.pop("as_json") if prints else False
            if needs_params:
                assignments = given.pop("assignments")
                given["params"] = loads(given["params"], assignments)
            if result := function(**given):
                show(title or called, result, as_json)

        run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in own}
        path = f"unidec {called}" if group is app else f"unidec {group.info.name} {called}"
        shown = [f"{path} {example}".strip() for example in examples]
        heading = "Examples" if len(shown) > 1 else "Example"
        group.command(called, epilog=f"{heading}: {'  |  '.join(shown)}")(run)
        return function

    return add


def _option(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def add_stage(
    group: Typer, stage: str, about: str, example: str = "", name: str | None = None
) -> None:
    """Add a command that runs `unidec.pipeline.<stage>`, which takes only the parameters; its
    `name` is by default the stage's.
    """

    def run(params: Params) -> Any:
        return getattr(pipeline, stage)(params)

    run.__doc__ = about
    title = stage.replace("_", "-")
    command(group, example, name=name or title, title=title)(run)


def show(title: str, result: Any, as_json: bool) -> None:
    """Print a result (`plain`) as JSON, or as one line per value, including nested ones; long lists
    as their length.
    """
    global has_finished_work
    has_finished_work = not isinstance(result, Shown)
    if has_finished_work:
        result = Shown(result, lines_of(title, result))
    if as_json:
        print(json.dumps(pipeline.plain(result.found), indent=2, default=str))
    else:
        print("\n".join(result.lines))
    if result.exit_code:
        sys.exit(result.exit_code)


def lines_of(title: str, result: Any) -> list[str]:
    """A result (`plain`) as one line per value."""
    return [f"{title}: {key} = {value}" for key, value in values_of(result).items()]


def values_of(result: Any) -> dict[str, str]:
    """The values of a result (`plain`) as texts, including nested ones."""
    values: dict[str, str] = {}
    for key, value in pipeline.plain(result).items():
        if isinstance(value, dict):
            values |= values_of({f"{key}.{name}": one for name, one in value.items()})
            continue
        values[key] = text_of(value)
    return values


def text_of(value: object) -> str:
    """A value as text; a long list as its length."""
    if isinstance(value, list) and len(value) > 5:
        return f"{len(value)} entries"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines of aligned columns for a terminal, tab-separated otherwise. Each row has all columns,
    by their headings.
    """
    lines = [*map(list, rows[:1]), *(list(row.values()) for row in rows)]
    if not sys.stdout.isatty():
        return ["\t".join(line) for line in lines]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    shown = []
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        shown.append("  ".join(cells).rstrip())
    return shown


def shown_rows(
    found: Any, rows: Sequence[Mapping[str, str]], empty: str, exit_code: int = 0
) -> Shown:
    """What was found as a table; without rows the line `empty`."""
    return Shown(found, table(rows) if rows else [empty], exit_code)


def _percent(share: float) -> str:
    return "unknown" if math.isnan(share) else f"{share:.1%}"


def show_predictions(frame: pd.DataFrame) -> None:
    """Print a block per query on a terminal: rank, score, probability, label, title; tab-separated
    lines otherwise.
    """
    if not sys.stdout.isatty():
        print(frame.to_csv(sep="\t", index=False), end="")
        return
    shown = frame[["rank", "score", "probability", "label", "title"]].astype({"rank": str})
    shown["score"] = frame["score"].map("{:.4f}".format)
    shown["probability"] = frame["probability"].map(_percent)
    for query, rows in shown.groupby(frame["query"], sort=False):
        print(query, *table(rows.to_dict("records")), sep="\n")
