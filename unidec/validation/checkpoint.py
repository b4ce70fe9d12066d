"""One checkpoint of Great Expectations over tables, with Data Docs; everything else here speaks of results only."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

MAX_SAMPLES = 20


def run_checkpoint(
    name: str, tables: dict[str, pd.DataFrame], suites: Callable[[], dict[str, list[Any]]], docs: Path | None
) -> list[tuple[str, Any]]:
    """Run all suites as one checkpoint: (table, result as Great Expectations gives it), in the order of the suites.

    Args:
        suites: makes each table's expectations; Great Expectations may be imported only there.
        docs: folder for Data Docs; None: none are built.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # Great Expectations imports modules that Python deprecates
        import great_expectations as gx
        from great_expectations.checkpoint import UpdateDataDocsAction
        from great_expectations.data_context.types.base import ProgressBarsConfig

        expectations = suites()
        context: Any = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        actions, definitions = [], []
        if docs is not None:
            store = {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())}
            index = {"class_name": "DefaultSiteIndexBuilder"}
            site = {"class_name": "SiteBuilder", "site_index_builder": index, "store_backend": store}
            context.add_data_docs_site("local", site)
            actions.append(UpdateDataDocsAction(name="docs", site_names=["local"]))
        source = context.data_sources.add_pandas(name)
        for table, frame in tables.items():
            # a checkpoint hands one set of batch parameters to all its definitions, so three frames go through files
            path = Path(folder, f"{table}.parquet")
            frame.to_parquet(path, index=False)
            batch = source.add_parquet_asset(table, path=path).add_batch_definition("all")
            suite = context.suites.add(gx.ExpectationSuite(name=table, expectations=expectations[table]))
            definition = gx.ValidationDefinition(name=table, data=batch, suite=suite)
            definitions.append(context.validation_definitions.add(definition))
        shown = {"result_format": "SUMMARY", "partial_unexpected_count": MAX_SAMPLES}
        checkpoint = gx.Checkpoint(name=name, validation_definitions=definitions, actions=actions, result_format=shown)
        run = context.checkpoints.add(checkpoint).run()
    for picture in docs.rglob("*.gif") if docs else ():
        picture.unlink()  # of a guided tour: 3 MB in every run that keeps the docs
    by_table = {result.suite_name: result for result in run.run_results.values()}
    return [(table, item) for table in tables for item in by_table[table].results]


def raised(item: Any) -> str | None:
    """What an expectation's code raised, if it did."""
    info = item.exception_info
    entries = [info] if "raised_exception" in info else list(info.values())
    found = [entry for entry in entries if isinstance(entry, dict) and entry.get("raised_exception")]
    return str(found[0]["exception_message"]) if found else None
