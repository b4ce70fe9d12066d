"""Runs expectations as a checkpoint of Great Expectations, with Data Docs that work without a
network.
"""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import BytecodeCache
from jinja2.bccache import Bucket

from unidec.evaluation.page import render

MAX_SAMPLES = 20
_EXTERNAL = re.compile(r"<(script|style|footer)\b.*?</\1>|<(link|img)\b[^>]*>", re.DOTALL)


def run_checkpoint(
    name: str,
    tables: dict[str, pd.DataFrame],
    suites: Callable[[], dict[str, list[Any]]],
    docs: Path | None,
) -> list[tuple[str, Any]]:
    """Run all suites as one checkpoint.

    Args:
        suites: returns each table's expectations. It is called when Great Expectations can be
            imported without warnings.
        docs: folder for Data Docs; None: no Data Docs.

    Returns:
        (table, Great Expectations' result) of each expectation, in the order of the suites.
    """
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # Great Expectations imports modules that Python deprecates
        import great_expectations as gx
        from great_expectations.checkpoint import UpdateDataDocsAction
        from great_expectations.data_context.types.base import ProgressBarsConfig

        expectations = suites()
        context: Any = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = ProgressBarsConfig(globally=False)
        actions = []
        if docs is not None:
            context.add_data_docs_site("local", _site(docs))
            actions.append(UpdateDataDocsAction(name="docs", site_names=["local"]))
        source = context.data_sources.add_pandas(name)
        definitions = []
        for table, frame in tables.items():
            # a checkpoint passes the same batch parameters to all definitions, so each frame is
            # read from its own file
            path = Path(folder, f"{table}.parquet")
            frame.to_parquet(path, index=False)
            batch = source.add_parquet_asset(table, path=path).add_batch_definition("all")
            suite = gx.ExpectationSuite(name=table, expectations=expectations[table])
            context.suites.add(suite)
            definition = gx.ValidationDefinition(name=table, data=batch, suite=suite)
            definitions.append(context.validation_definitions.add(definition))
        checkpoint = gx.Checkpoint(
            name=name,
            validation_definitions=definitions,
            actions=actions,
            result_format={
                "result_format": "SUMMARY",
                "partial_unexpected_count": MAX_SAMPLES,
            },
        )
        with _templates_compiled_once():
            run = context.checkpoints.add(checkpoint).run()
    by_table = {result.suite_name: result for result in run.run_results.values()}
    if docs is not None:
        _without_network(docs, {table: bool(result.success) for table, result in by_table.items()})
    return [(table, item) for table in tables for item in by_table[table].results]


class _Templates(BytecodeCache):
    """Compiled templates, in memory."""

    def __init__(self) -> None:
        self.compiled: dict[tuple[str, str], Any] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self.compiled.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.compiled[bucket.key, bucket.checksum] = bucket.code


_TEMPLATES = _Templates()


@contextlib.contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """Great Expectations compiles its templates again for each kind of page and each suite, which
    takes a fourth of a checkpoint's time.
    """
    from great_expectations.render.view import view

    environment = view.Environment
    view.Environment = functools.partial(environment, bytecode_cache=_TEMPLATES)
    try:
        yield
    finally:
        view.Environment = environment


def severity_of(item: Any) -> str:
    """ "critical" or "warning", of a result of Great Expectations."""
    severity = item.expectation_config.severity
    return str(getattr(severity, "value", severity))


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
