"""`unidec index build`: the stage that builds the bundle, and the choice of its search index by measurement."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from unidec.cli.options import (
    DEFAULT_BUNDLE,
    AsJson,
    BundleAddress,
    bundle_folder,
)
from unidec.cli.output import show_table
from unidec.cli.stage import add_stage, group

index_app = group("Build a bundle's search index, and choose its kind by measurement.")
add_stage(
    index_app, "build", "index", "Encode the labels and build the search index: outputs/bundle.",
    "unidec index build --set index.kind=pq",
)  # fmt: skip


@index_app.command(
    epilog="Examples: unidec index tune  |  unidec index tune --recall 0.99 -k 10  |  "
    "unidec index tune --kinds pq,ivf-pq --out outputs/bundle-pq"
)
def tune(
    recall: Annotated[
        float, typer.Option("--recall", min=0, max=1, help="share of the exact results that is to be found")
    ] = 0.98,
    k: Annotated[int, typer.Option("-k", min=1, help="results of a search")] = 100,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="write the bundle with the chosen index there")
    ] = None,
    kinds: Annotated[
        str, typer.Option("--kinds", metavar="A,B", help="kinds to measure; by default those that suit the labels")
    ] = "",
    queries: Annotated[int, typer.Option("--queries", min=1, help="queries that are asked")] = 300,
    threads: Annotated[int, typer.Option("--threads", min=1, help="threads of builds and searches")] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure kinds of index on a bundle: recall against exact search, time of one query, memory, time to build; the
    fastest that finds enough is chosen. Exit code 1: none does."""
    from unidec.pipeline.index_tune import index_tune

    named = [name.strip() for name in kinds.split(",") if name.strip()]
    found = index_tune(bundle_folder(bundle), recall, k, queries, named, out, threads)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show_table(*_rows(found))
        _conclusion(found)
    if found["chosen"] is None:
        sys.exit(1)


def _rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    columns = ["kind", "settings", f"recall@{found['k']}", "p50 ms", "p99 ms", "MB", "built in s", ""]
    rows = []
    for one in found["measured"]:
        settings = " ".join(f"{name}={value}" for name, value in one["options"].items())
        rows.append([
            one["kind"], settings, f"{one['recall']:.4f}", f"{one['p50_ms']:.2f}", f"{one['p99_ms']:.2f}",
            f"{one['index_bytes'] / 1e6:.1f}", f"{one['build_seconds']:.1f}",
            "chosen" if one == found["chosen"] else "",
        ])  # fmt: skip
    return columns, rows


def _conclusion(found: dict[str, Any]) -> None:
    print(f"asked: {found['queries']}, {found['labels']} labels")
    if found["chosen"] is None:
        print(f"nothing that was measured finds {found['wanted']:.2%} of the first {found['k']}: try --kinds flat,sq8")
        return
    keys = ", ".join(f"{key.removeprefix('index.')}: {value}" for key, value in found["params"].items())
    print(f"for params.yaml: index: {{{keys}}}")
    print(f"written: {found['out']}" if found["out"] else "not written: --out FOLDER writes the bundle with it")
