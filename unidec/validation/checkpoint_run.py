"""Runs expectations as a checkpoint of Great Expectations, with Data Docs that work without a
network.
"""

from __future__ import annotations

import itertools
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from unidec.evaluation.page import render

_EXTERNAL = re.compile(r"<(script|style|footer)\b.*?</\1>|<(link|img)\b[^>]*>", re.DOTALL)


@dataclass(kw_only=True)
class Expectation:
    """What was counted in a table, and its bounds.

    Attributes:
        table: "queries", "labels" or "pairs".
        column: the column that is checked; None: the number of rows.
        description: what is expected.
        key: key of the parameter with the bound; None: there is none.
        fix: what to do if the expectation fails; "": not known.
        minimum, maximum: bounds of `observed`; None: none.
        severity: "critical" or "warning".
        unexpected_count, element_count: number of bad rows, and of all; 0: not counted.
        observed: the number that is judged.
        samples: bad rows.
        success: whether the number is within its bounds.
    """

    table: str
    column: str | None = None
    description: str
    key: str | None = None
    fix: str = ""
    minimum: float | None = None
    maximum: float | None = None
    severity: str
    unexpected_count: int = 0
    element_count: int = 0
    observed: float
    samples: list[dict[str, Any]] = field(default_factory=list)
    success: bool = False


def run_checkpoint(name: str, counted: Sequence[Expectation], docs: Path | None) -> list[bool]:
    """Judge what was counted in the tables of a data set, as one checkpoint.

    Args:
        counted: in the order of the tables. Great Expectations is given a table with a single row,
            the observed numbers.
        docs: folder for Data Docs; None: no Data Docs.

    Returns:
        whether each number is within its bounds.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Great Expectations imports modules that Python deprecates
        import great_expectations as gx
        import great_expectations.expectations as gxe
        import pandas as pd
        from great_expectations.checkpoint import UpdateDataDocsAction
        from great_expectations.data_context.types.base import ProgressBarsConfig

        context: Any = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        actions = []
        if docs is not None:
            context.add_data_docs_site("local", _site(docs))
            actions.append(UpdateDataDocsAction(name="docs", site_names=["local"]))
        source = context.data_sources.add_pandas(name)
        numbers = {}
        definitions = []
        for table, group in itertools.groupby(counted, attrgetter("table")):
            asset = source.add_dataframe_asset(table)
            suite = context.suites.add(gx.ExpectationSuite(name=table))
            for one in group:
                column = f"{table}: {one.description}"
                numbers[column] = [float(one.observed)]
                suite.add_expectation(
                    gxe.ExpectColumnMaxToBeBetween(
                        column=column,
                        min_value=one.minimum,
                        max_value=one.maximum,
                        description=one.description,
                        severity=one.severity,
                    )
                )
            batch = asset.add_batch_definition_whole_dataframe("all")
            definition = gx.ValidationDefinition(name=table, data=batch, suite=suite)
            definitions.append(context.validation_definitions.add(definition))
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=definitions,
            actions=actions,
            result_format={"result_format": "SUMMARY"},
        )
        frame = pd.DataFrame(numbers)
        run = context.checkpoints.add(checkpoint).run(batch_parameters={"dataframe": frame})
    results = run.run_results.values()
    if docs is not None:
        _without_network(docs, {result.suite_name: bool(result.success) for result in results})
    return [bool(item.success) for result in results for item in result.results]


def _site(docs: Path) -> dict[str, Any]:
    return {
        "class_name": "SiteBuilder",
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
        "store_backend": {
            "class_name": "TupleFilesystemStoreBackend",
            "base_directory": str(docs.resolve()),
        },
        "show_how_to_buttons": False,
    }


def _without_network(docs: Path, passed: Mapping[str, bool]) -> None:
    """Replace the Data Docs pages by ones that load nothing: those of Great Expectations load
    scripts and styles from other hosts, and its index needs a script. Its 4 MB of fonts and
    pictures are removed.
    """
    shutil.rmtree(docs / "static", ignore_errors=True)
    index = docs / "index.html"
    index.unlink()
    pages = []
    for path in sorted(docs.rglob("*.html")):
        address = path.relative_to(docs)
        kind, table = address.parts[:2]
        name = f"{kind} of {table.removesuffix('.html')}"
        body = path.read_text(encoding="utf-8").partition("<body>")[2].partition("</body>")[0]
        page = render("docs", title=f"Data Docs: {name}", body=_EXTERNAL.sub("", body))
        path.write_text(page, encoding="utf-8")
        state = passed[table] if kind == "validations" else None
        pages.append((name, address.as_posix(), state))
    page = render("docs", title="Data Docs", body="", pages=pages[::-1])
    index.write_text(page, encoding="utf-8")
