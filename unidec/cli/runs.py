"""`unidec runs`: training runs of this folder, and checks of what they left."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from unidec.cli.options import AsJson
from unidec.cli.output import show_table
from unidec.cli.stage import group

runs_app = group("List training runs, and find and repair what a crash left.")


@runs_app.command("list", epilog="Examples: unidec runs list  |  unidec runs list --json")
def list_runs(as_json: AsJson = False) -> None:
    """List the training runs of this folder: how far each came, its newest checkpoint, its MLflow run."""
    from unidec.pipeline.runs import list_runs, rows_of

    runs = list_runs()
    if as_json:
        print(json.dumps([run.as_dict() for run in runs], indent=2))
    elif not runs:
        print("no runs yet: unidec train begins one")
    else:
        show_table(*rows_of(runs))


@runs_app.command(
    epilog="Examples: unidec runs doctor  |  unidec runs doctor --fix  |  unidec runs doctor --deep --json"
)
def doctor(
    fix: Annotated[bool, typer.Option("--fix", help="do what cannot lose data, and say what was done")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="also hash models, bundles and checkpoints")] = False,
    as_json: AsJson = False,
) -> None:
    """Look for what a crash or a full disk leaves behind; exit code 0: nothing wrong, 1: warnings, 4: broken."""
    from unidec.pipeline.doctor import examine, exit_code, report, rows_of

    findings = examine(deep=deep, fix=fix)
    if as_json:
        print(json.dumps(report(findings), indent=2))
    elif findings:
        show_table(*rows_of(findings))
    else:
        print("healthy")
    sys.exit(exit_code(findings))
