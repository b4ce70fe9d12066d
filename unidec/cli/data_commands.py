"""`unidec data`: the data stages, and comparisons of data over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from unidec import pipeline
from unidec.cli.commands import Shown, add_stage, command, group, lines_of, table
from unidec.config import Params

if TYPE_CHECKING:
    from unidec.pipeline.drift_check import DataDrift

Column = Annotated[
    str | None, Option(metavar="NAME", help="column of the texts; default: query or text")
]

data_app = group(
    "data", "Read, check and prepare the data of a training, and compare it over time."
)
add_stage(
    data_app,
    "inputs",
    "Write what each result depends on, its parameters and a hash of its code, for `dvc repro`, to "
    "data/inputs.",
)
add_stage(
    data_app,
    "ingest",
    "Read raw files of any supported layout into data/dataset, and split off validation queries.",
    "--set data.path=my/folder --set data.format=tables",
)
add_stage(
    data_app,
    "validate",
    "Check the data set with Great Expectations; writes data/validation/index.html; exit code 3: a "
    "check failed.",
)
add_stage(data_app, "tokens", "Tokenise queries and labels.", "--set tokens.max_length=64")
add_stage(
    data_app,
    "propensity",
    "Compute inverse propensities and frequency groups of the labels.",
    "--json",
)
add_stage(data_app, "label_graph", "Count label co-occurrences, for Gandalf's soft targets.")
add_stage(
    data_app,
    "data_change",
    "Compare data/dataset with the champion's training data; exit code 3: a change beyond the "
    "limits.",
    "--set drift.stop=1",
    name="change",
)


@command(data_app, "old/dataset data/dataset", "models:/unidec@champion queries.csv")
def drift(
    params: Params,
    first: Annotated[
        str, Argument(metavar="EARLIER", help="data set folder, or a bundle (its training data)")
    ],
    second: Annotated[str, Argument(metavar="LATER", help="data set folder, or a file of queries")],
    column: Column = None,
) -> Shown:
    """Compare two versions of the data, or data with a file of queries; exit code 1: drift."""
    return findings(pipeline.drift(params, first, second, column))


@command(data_app, "marks.jsonl", "marks-monday.jsonl marks-tuesday.jsonl --output data/with-marks")
def from_feedback(
    params: Params,
    files: Annotated[
        list[Path], Argument(metavar="FILE...", help="marks that `unidec serve --feedback` wrote")
    ],
    output: Annotated[
        Path, Option("--output", metavar="FOLDER", help="a new folder, or one of an earlier call")
    ] = Path("data/feedback"),
) -> Shown:
    """Write data/dataset with the page's marks as tables for the next training: relevant labels as
    pairs, others as filter pairs. The last mark of a label decides; marks on test and validation
    queries are not used.
    """
    result = pipeline.from_feedback(params, files, output)
    return Shown(
        result,
        [*lines_of("from-feedback", result), f"next: unidec init --data-path {output}; make train"],
    )


def findings(result: DataDrift) -> Shown:
    """The findings as a table, with exit code 1 if anything drifted."""
    lines = table(
        [{"state": str(one["state"]), "finding": str(one["words"])} for one in result.findings]
    )
    if result.reason:
        lines.append(result.reason)
    return Shown(result, [*lines, f"report: {result.page}"], 1 if result.drifted else 0)
