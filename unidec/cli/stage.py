"""A command for each function of `unidec.pipeline` that takes nothing but the parameters."""

from __future__ import annotations

import typer

from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show


def add_stage(app: typer.Typer, command: str, stage: str, about: str, example: str) -> None:
    """Add a command that runs `unidec.pipeline.<stage>` and prints what it returns."""

    def run(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None, as_json: AsJson = False) -> None:
        loaded = load(params, assignments)
        from unidec import pipeline

        show(stage.replace("_", "-"), getattr(pipeline, stage)(loaded), as_json)

    app.command(command, help=about, epilog=f"Example: {example}")(run)


def group(about: str) -> typer.Typer:
    """A group of commands; without a command it prints its help."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)
