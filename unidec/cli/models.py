"""Commands on registered models: what there is, whether a challenger may take over, promotion and the way back."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show, show_table
from unidec.errors import Refused

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="kept with the version")]
Which = Annotated[str | None, typer.Argument(metavar="[VERSION]", help="number or alias; challenger if not given")]


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    app.command(epilog="Examples: unidec models  |  unidec models --json")(models)
    app.command(epilog="Examples: unidec gate  |  unidec gate 7 --set gate.margin=0.2 --json")(gate)
    app.command(epilog='Examples: unidec promote  |  unidec promote 7 --force --reason "the labels moved"')(promote)
    app.command(epilog='Example: unidec rollback --reason "answers to short queries are odd"')(rollback)


def models(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """List the registered versions: aliases, metrics, data, code, what the gate said, age."""
    loaded = load(params, assignments)
    from unidec.tracking.model_table import list_versions, rows_of

    found = list_versions(loaded.tracking.model_name)
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found:
        print(f"no versions of {loaded.tracking.model_name} yet: unidec register makes one")
    else:
        show_table(*rows_of(found))


def gate(
    version: Which = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Compare a version with the champion and see whether it can be served: outputs/gate.html; exit code 6: refused."""
    loaded = load(params, assignments)
    from unidec import pipeline

    result = pipeline.gate(loaded, version)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        against = f"against version {result['champion']}" if result["champion"] else "(no champion to compare with)"
        show_table(
            ["check", "", "why"],
            [[r["check"], "pass" if r["passed"] else "FAIL", r["words"]] for r in result["reasons"]],
        )
        said = "passed" if result["passed"] else "refused"
        print(f"version {result['challenger']} {against}: {said}; page: {result['page']}")
    sys.exit(0 if result["passed"] else Refused.exit_code)


def promote(
    version: Which = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="also what was made with uncommitted changes; a tag says so")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="whatever the gate said; a tag says so")] = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Make a version that passed the gate the champion, and the champion the previous one."""
    loaded = load(params, assignments)
    from unidec.tracking.promotion import CHALLENGER
    from unidec.tracking.promotion import promote as promote_version

    result = promote_version(
        loaded.tracking.model_name, version or CHALLENGER, allow_dirty=allow_dirty or loaded.gate.allow_dirty,
        force=force, reason=reason,
    )  # fmt: skip
    show("promote", result, as_json)


def rollback(
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Swap champion and previous; the version that is left is refused until somebody forces it."""
    loaded = load(params, assignments)
    from unidec.tracking.promotion import rollback as roll_back

    show("rollback", roll_back(loaded.tracking.model_name, reason=reason), as_json)
