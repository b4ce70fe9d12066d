"""`unidec models`: registered versions, the gate, promotion and rollback, lineage, monitoring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from unidec import pipeline
from unidec.cli.commands import Shown, add_stage, command, group, shown_rows, table
from unidec.cli.data_commands import Column, findings
from unidec.config import Params
from unidec.errors import ConfigError, Refused

Reason = Annotated[str, Option(metavar="TEXT", help="reason, stored with the version")]
Which = Annotated[str, Argument(metavar="[VERSION]", help="number or alias")]

models_app = group("models", "List, compare, promote and trace registered models.")


@command(models_app, "", "--json", name="list")
def list_models(params: Params) -> Shown:
    """List the registered versions: aliases, metrics, data, code, result of the gate, date."""
    from unidec.tracking.lineage import list_versions, rows_of

    name = params.tracking.model_name
    found = list_versions(name)
    empty = f"no versions of {name} yet: unidec models register creates one"
    return shown_rows(found, rows_of(found), empty)


@command(models_app, "", "7 --set gate.margin=0.2 --json")
def gate(params: Params, version: Which = "challenger") -> Shown:
    """Compare a version with the champion, and check that it can be served; writes
    outputs/gate.html; exit code 6: refused.
    """
    result = pipeline.gate(params, version)
    against = "(no champion to compare with)"
    if result.champion:
        against = f"against version {result.champion}"
    outcome = "passed" if result.passed else "refused"
    lines = table(
        [
            {"check": one.check, "": "pass" if one.passed else "FAIL", "why": one.words}
            for one in result.reasons
        ]
    )
    lines.append(f"version {result.challenger} {against}: {outcome}; page: {result.page}")
    return Shown(result, lines, exit_code=0 if result.passed else Refused.exit_code)


@command(models_app, "", '7 --force --reason "new label set"')
def promote(
    params: Params,
    version: Which = "challenger",
    force: Annotated[
        bool, Option("--force", help="promote although the gate refused it; recorded in a tag")
    ] = False,
    reason: Reason = "",
) -> Any:
    """Make a version that passed the gate the champion, and the champion the previous one."""
    return pipeline.promote(params, version, force=force, reason=reason)


@command(models_app, '--reason "wrong answers for short queries"')
def rollback(params: Params, reason: Reason = "") -> Any:
    """Swap champion and previous; the version that was champion is refused until it is promoted
    with --force.
    """
    from unidec.tracking import promotion

    return promotion.rollback(params.tracking.model_name, reason=reason)


@command(models_app, "", "models:/unidec/7 --json", "bundle:3f2a91c0", "--data 6c82de6d")
def lineage(
    params: Params,
    model: Annotated[
        str | None,
        Argument(
            metavar="[MODEL]", help="champion (default), models:/unidec/7, bundle:HASH, a folder"
        ),
    ] = None,
    data: Annotated[
        str | None, Option(metavar="HASH", help="list the versions made from this data instead")
    ] = None,
) -> Shown:
    """Trace a model back to its first ancestor, or list the models that were made from
    some data.
    """
    if data is not None and model is not None:
        raise ConfigError(
            "either a model or --data",
            where="unidec models lineage",
            fix="unidec models lineage --data HASH",
        )
    from unidec.tracking import lineage as registry

    name = params.tracking.model_name
    if data is None:
        versions = registry.lineage(model or f"models:/{name}@champion", model_name=name)
        start = versions[-1].start
        about = None
        if sha256 := start.get("bundle.sha256"):  # of a version that was deleted
            about = {"version": start.get("version"), "bundle_sha256": sha256, "missing": True}
        for version in reversed(versions):
            about = pipeline.plain(version) | {"parent": about}
        return Shown(about, registry.as_lines(versions))
    found = registry.models_of_data(data, model_name=name)
    rows = [
        {
            "version": one.version,
            "aliases": ", ".join(one.aliases),
            "made from it": ", ".join(one.what),
            "through version": one.through or "",
        }
        for one in found
    ]
    return shown_rows(found, rows, f"no version of {name} was made from it")


@command(models_app, "", "--bundle outputs/refreshed")
def register(
    params: Params,
    bundle: Annotated[
        Path | None, Option(metavar="FOLDER", help="outputs/bundle, or outputs/refreshed")
    ] = None,
) -> Any:
    """Register a bundle in MLflow under the alias `challenger`; default: outputs/bundle."""
    return pipeline.register(params) if bundle is None else pipeline.register(params, bundle)


@command(models_app, "queries.parquet", "log.jsonl --column text --json")
def monitor(
    params: Params,
    queries: Annotated[
        str, Argument(metavar="FILE", help=".csv, .tsv, .jsonl (also .gz) or .parquet")
    ],
    column: Column = None,
    bundle: Annotated[
        str | None,
        Option(metavar="SOURCE", help="folder or models:/ address; default: the champion"),
    ] = None,
) -> Shown:
    """Compare a window of live queries with a model's training data; exit code 1: drift."""
    return findings(pipeline.monitor(params, queries, column=column, bundle=bundle))


add_stage(
    models_app,
    "choose_start",
    "Choose whether the next training starts from the champion or from scratch; writes "
    "data/start.json.",
    "--set retrain.start=cold",
    name="start",
)
