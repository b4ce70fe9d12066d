"""`unidec models`: registered versions, the gate, promotion and rollback, lineage, monitoring."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unidec.cli.data import Column, Out, print_findings
from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show, show_table
from unidec.cli.stage import add_stage, group
from unidec.errors import ConfigError, Refused

Reason = Annotated[str, typer.Option("--reason", metavar="TEXT", help="kept with the version")]
Which = Annotated[str | None, typer.Argument(metavar="[VERSION]", help="number or alias; challenger if not given")]


Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="models:/unidec@champion (default), models:/unidec/7, bundle:HASH, a folder"
    ),
]

models_app = group("List, compare, promote and trace registered models.")


@models_app.command("list", epilog="Examples: unidec models list  |  unidec models list --json")
def list_models(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """List the registered versions: aliases, metrics, data, code, result of the gate, age."""
    loaded = load(params, assignments)
    from unidec.tracking.model_table import list_versions, rows_of

    found = list_versions(loaded.tracking.model_name)
    if as_json:
        print(json.dumps(found, indent=2))
    elif not found:
        print(f"no versions of {loaded.tracking.model_name} yet: unidec models register makes one")
    else:
        show_table(*rows_of(found))


@models_app.command(epilog="Examples: unidec models gate  |  unidec models gate 7 --set gate.margin=0.2 --json")
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
        outcome = "passed" if result["passed"] else "refused"
        print(f"version {result['challenger']} {against}: {outcome}; page: {result['page']}")
    sys.exit(0 if result["passed"] else Refused.exit_code)


@models_app.command(
    epilog='Examples: unidec models promote  |  unidec models promote 7 --force --reason "the labels moved"'
)
def promote(
    version: Which = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="also a version made with uncommitted changes; recorded in a tag")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="whatever the gate decided; recorded in a tag")] = False,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Make a version that passed the gate the champion, and the champion the previous one."""
    loaded = load(params, assignments)
    from unidec import pipeline

    result = pipeline.promote(loaded, version, allow_dirty=allow_dirty, force=force, reason=reason)
    show("promote", result, as_json)


@models_app.command(epilog='Example: unidec models rollback --reason "answers to short queries are odd"')
def rollback(
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    reason: Reason = "",
    as_json: AsJson = False,
) -> None:
    """Swap champion and previous; the version that is left is refused until somebody forces it."""
    loaded = load(params, assignments)
    from unidec import pipeline

    show("rollback", pipeline.rollback(loaded, reason=reason), as_json)


@models_app.command(
    epilog="Examples: unidec models lineage  |  unidec models lineage models:/unidec/7 --json  |  "
    "unidec models lineage bundle:3f2a91c0  |  unidec models lineage --data 6c82de6d"
)
def lineage(
    model: Source = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="HASH", help="the versions that this data went into instead")
    ] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Print what a model was made of, back to its first ancestor; or which models data went into."""
    if data is not None and model is not None:
        raise ConfigError(
            "either a model or --data", where="unidec models lineage", fix="unidec models lineage --data HASH"
        )
    loaded = load(params, assignments)
    from unidec.tracking import lineage as registry

    name = loaded.tracking.model_name
    if data is not None:
        found = registry.models_of_data(data, model_name=name)
        if as_json:
            print(json.dumps(found, indent=2))
        elif not found:
            print(f"no version of {name} was made of it")
        else:
            rows = [[v["version"], ", ".join(v["aliases"]), ", ".join(v["what"]), v["through"] or ""] for v in found]
            show_table(["version", "aliases", "made of it", "through version"], rows)
        return
    about = registry.lineage(model or f"models:/{name}@champion", model_name=name)
    print(json.dumps(about, indent=2) if as_json else "\n".join(registry.as_lines(about)))


@models_app.command(epilog="Examples: unidec models register  |  unidec models register --bundle outputs/refreshed")
def register(
    bundle: Annotated[
        Path | None, typer.Option("--bundle", metavar="FOLDER", help="outputs/bundle, or outputs/refreshed")
    ] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Register a bundle in MLflow under the alias `challenger`: outputs/bundle if no other is named."""
    loaded = load(params, assignments)
    from unidec import pipeline

    show("register", pipeline.register(loaded) if bundle is None else pipeline.register(loaded, bundle), as_json)


@models_app.command(
    epilog="Examples: unidec models monitor queries.parquet  |  unidec models monitor log.jsonl --column text --json"
)
def monitor(
    queries: Annotated[str, typer.Argument(metavar="FILE", help=".csv, .tsv, .jsonl (also .gz) or .parquet")],
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    column: Column = None,
    labels_column: Annotated[
        str | None, typer.Option("--labels-column", metavar="NAME", help="of the labels that were right, if not labels")
    ] = None,
    bundle: Annotated[
        str | None, typer.Option("--bundle", metavar="SOURCE", help="folder or models:/ address; default: the champion")
    ] = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare a window of live queries with what a model was trained on; exit code 1: it drifted."""
    loaded = load(params, assignments)
    from unidec import pipeline

    options: dict[str, Any] = {"column": column, "labels_column": labels_column, "bundle": bundle, "out": out}
    print_findings(pipeline.monitor(loaded, queries, **options), as_json)


add_stage(
    models_app, "start", "choose_start",
    "Choose what the next training starts from, the champion or nothing, and write it to data/start.json.",
    "unidec models start --set retrain.start=cold",
)  # fmt: skip
