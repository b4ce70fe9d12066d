"""Commands on where models come from: lineage, restoring; and on labels that change without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show, show_table
from unidec.errors import ConfigError

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="models:/unidec@champion (default), models:/unidec/7, bundle:HASH, a folder"
    ),
]


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    app.command(
        epilog="Examples: unidec lineage  |  unidec lineage models:/unidec/7 --json  |  unidec lineage bundle:3f2a91c0"
        "  |  unidec lineage --data 6c82de6d  |  unidec lineage models:/unidec/3 --restore ../version-3"
    )(lineage)
    app.command(epilog="Examples: unidec refresh-labels  |  unidec refresh-labels --version 7 --register")(
        refresh_labels
    )
    app.command(epilog="Examples: unidec register  |  unidec register --bundle outputs/refreshed")(register)


def lineage(
    model: Source = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="HASH", help="the versions that this data went into instead")
    ] = None,
    restore: Annotated[
        Path | None,
        typer.Option("--restore", metavar="FOLDER", help="write the version's project there, to run it again"),
    ] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Print what a model was made of, back to its first ancestor; or which models data went into."""
    if data is not None and (model is not None or restore is not None):
        raise ConfigError("either a model or --data", where="unidec lineage", fix="unidec lineage --data HASH")
    loaded = load(params, assignments)
    from unidec.pipeline import lineage as stage
    from unidec.tracking.lineage import as_lines

    if data is not None:
        found = stage.models_of_data(loaded, data)
        if as_json:
            print(json.dumps(found, indent=2))
        elif not found:
            print(f"no version of {loaded.tracking.model_name} was made of it")
        else:
            rows = [[v["version"], ", ".join(v["aliases"]), ", ".join(v["what"]), v["through"] or ""] for v in found]
            show_table(["version", "aliases", "made of it", "through version"], rows)
        return
    if restore is None:
        about = stage.lineage(loaded, model)
        print(json.dumps(about, indent=2) if as_json else "\n".join(as_lines(about)))
        return
    made = stage.restore(loaded, str(restore), model)
    if as_json:
        print(json.dumps(made, indent=2))
        return
    print("\n".join([f"{made['folder']}: commit {made['commit'][:12]}", *(f"warning: {w}" for w in made["warnings"])]))
    print("\n".join(["go on with", *(f"  {command}" for command in made["commands"])]))


def refresh_labels(
    version: Annotated[str, typer.Option("--version", metavar="VERSION", help="number or alias")] = "champion",
    register: Annotated[bool, typer.Option("--register", help="register the result as challenger")] = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Give a registered model the labels of data/dataset, without training: outputs/refreshed."""
    loaded = load(params, assignments)
    from unidec import pipeline

    result = pipeline.refresh_labels(loaded, version)
    if register and result["changed"]:
        result |= pipeline.register(loaded, result["bundle"])
    show("refresh-labels", result, as_json)


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
