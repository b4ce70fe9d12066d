"""`unidec data`: the data stages, and comparisons of data over time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show_table
from unidec.cli.stage import add_stage, group

Column = Annotated[str | None, typer.Option("--column", metavar="NAME", help="of the texts, if not query or text")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="where the report goes")]
EXIT_DRIFT = 1


data_app = group("Read, check and prepare the data of a training, and compare it over time.")

add_stage(
    data_app, "ingest", "ingest",
    "Read raw files of any known layout into data/dataset, and cut the validation split.",
    "unidec data ingest --set data.path=my/folder --set data.format=tables",
)  # fmt: skip
add_stage(
    data_app, "validate", "validate",
    "Check the data set with Great Expectations; a failure ends with exit code 3. Page: data/validation/index.html.",
    "unidec data validate",
)  # fmt: skip
add_stage(data_app, "tokens", "tokens", "Tokenise queries and labels.", "unidec data tokens --set tokens.max_length=64")
add_stage(
    data_app, "propensity", "propensity",
    "Compute inverse propensities and frequency groups of the labels.", "unidec data propensity --json",
)  # fmt: skip
add_stage(
    data_app, "label-graph", "label_graph",
    "Count label co-occurrences, for Gandalf's soft targets.", "unidec data label-graph",
)  # fmt: skip
add_stage(
    data_app, "change", "data_change",
    "Compare data/dataset with what the champion was trained on; a change beyond the limits ends with exit code 3.",
    "unidec data change --set drift.stop_change=1",
)  # fmt: skip


@data_app.command(
    epilog="Examples: unidec data drift old/dataset data/dataset  |  "
    "unidec data drift models:/unidec@champion queries.csv"
)
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

    print_findings(pipeline.drift(loaded, first, second, out, column), as_json)


def print_findings(result: dict[str, Any], as_json: bool) -> None:
    """What was found, and an exit code for scripts."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show_table(["state", "finding"], [[finding["state"], finding["words"]] for finding in result["findings"]])
        if not result.get("judged", True):
            print("not judged: fewer queries than drift.min_window")
        print(f"report: {result['page']}")
    sys.exit(EXIT_DRIFT if result["drifted"] else 0)
