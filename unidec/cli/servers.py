"""Commands for who runs the servers."""

from __future__ import annotations

from typing import Annotated

import typer

from unidec.cli.options import AsJson
from unidec.cli.output import show


def copy_store(
    source: Annotated[str, typer.Argument(help="tracking database: sqlite:///mlflow/mlflow.db or postgresql://...")],
    target: Annotated[str, typer.Argument(help="an empty one")],
    artifacts: Annotated[
        str | None,
        typer.Option(help="how the source's addresses of files begin, where its folder had another name"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a tracking database, runs and models, to another kind: SQLite to PostgreSQL, or back."""
    from unidec.tracking.store_copy import copy_store as copy

    result = copy(source, target, artifacts)
    show("copy-store", result, as_json)
    if not as_json:
        places = result["artifacts"]
        print(f"copy-store: now copy the files, too: from {places['from']} to {places['to']}")


def add_to(app: typer.Typer) -> None:
    """Add the commands."""
    example = "unidec copy-store sqlite:///mlflow/mlflow.db postgresql://mlflow@127.0.0.1/mlflow"
    app.command("copy-store", epilog=f"Example: {example}")(copy_store)
