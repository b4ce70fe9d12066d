"""`unidec data`: the data stages, and comparisons of data over time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unidec.cli.commands import AsJson, add_stage, command, group, show_table
from unidec.config import Params

Column = Annotated[str | None, typer.Option("--column", metavar="NAME", help="of the texts, if not query or text")]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="where the report goes")]
EXIT_DRIFT = 1

data_app = group("Read, check and prepare the data of a training, and compare it over time.")
for _name, _stage, _about, _options in (
    ("ingest", "ingest", "Read raw files of any known layout into data/dataset, and cut the validation split.",
     "--set data.path=my/folder --set data.format=tables"),
    ("validate", "validate", "Check the data set with Great Expectations; a failure ends with exit code 3. Page: "
     "data/validation/index.html.", ""),
    ("tokens", "tokens", "Tokenise queries and labels.", "--set tokens.max_length=64"),
    ("propensity", "propensity", "Compute inverse propensities and frequency groups of the labels.", "--json"),
    ("label-graph", "label_graph", "Count label co-occurrences, for Gandalf's soft targets.", ""),
    ("change", "data_change", "Compare data/dataset with what the champion was trained on; a change beyond the limits "
     "ends with exit code 3.", "--set drift.stop_change=1"),
):  # fmt: skip
    add_stage(data_app, _name, _stage, _about, f"unidec data {_name} {_options}".strip())


@command(
    data_app, "unidec data drift old/dataset data/dataset", "unidec data drift models:/unidec@champion queries.csv"
)
def drift(
    params: Params,
    first: Annotated[str, typer.Argument(metavar="EARLIER", help="data set folder, or bundle: its training data")],
    second: Annotated[str, typer.Argument(metavar="LATER", help="data set folder, or a file of queries")],
    column: Column = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Compare two versions of the data, or data with a file of queries; exit code 1: something drifted."""
    from unidec import pipeline

    print_findings(pipeline.drift(params, first, second, out, column), as_json)


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
