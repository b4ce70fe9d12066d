"""Commands on data in time: against what the champion was trained on, two versions, a window of live queries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show, show_table

Column = Annotated[str | None, typer.Option("--column", metavar="NAME", help="of the texts, if not query or text")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="where the report goes")]
EXIT_DRIFT = 1


def add_to(app: typer.Typer) -> None:
    """The commands of this file."""
    app.command("data-change", epilog="Examples: unidec data-change  |  unidec data-change --set drift.stop_change=1")(
        data_change
    )
    app.command(
        epilog="Examples: unidec drift old/dataset data/dataset  |  unidec drift models:/unidec@champion queries.csv"
    )(drift)
    app.command(epilog="Examples: unidec monitor queries.parquet  |  unidec monitor log.jsonl --column text --json")(
        monitor
    )


def data_change(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Compare data/dataset with what the champion was trained on; a change beyond the limits ends with exit code 3."""
    loaded = load(params, assignments)
    from unidec import pipeline

    show("data-change", pipeline.data_change(loaded), as_json)


def drift(
    first: Annotated[str, typer.Argument(metavar="EARLIER", help="data set folder, or bundle: its training data")],
    second: Annotated[str, typer.Argument(metavar="LATER", help="data set folder, or a file of queries")],
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    column: Column = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare two versions of the data, or data with a file of queries; exit code 1: something drifted."""
    loaded = load(params, assignments)
    from unidec import pipeline

    _end(pipeline.drift(loaded, first, second, out, column), as_json)


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
    _end(pipeline.monitor(loaded, queries, **options), as_json)


def _end(result: dict[str, Any], as_json: bool) -> None:
    """What was found, and an exit code for scripts."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show_table(["state", "finding"], [[finding["state"], finding["words"]] for finding in result["findings"]])
        if not result.get("judged", True):
            print("not judged: fewer queries than drift.min_window")
        print(f"report: {result['page']}")
    sys.exit(EXIT_DRIFT if result["drifted"] else 0)
