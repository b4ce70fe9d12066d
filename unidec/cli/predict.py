"""`unidec predict`: the best labels of texts, or of a file of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from unidec.cli.options import DEFAULT_BUNDLE, AsJson, BundleAddress, bundle_folder
from unidec.cli.output import show, show_predictions
from unidec.errors import ConfigError

Runtime = Annotated[
    Literal["torch", "auto", "onnx", "onnx-int8"],
    typer.Option("--runtime", help="what encodes the texts; auto: the fastest that keeps quality (docs/query-path.md)"),
]


def add_to(app: typer.Typer) -> None:
    """The command of this file."""
    app.command(
        epilog='Examples: unidec predict "editor for tables" -k 5  |  '
        "unidec predict --input queries.csv --output predictions.parquet  |  "
        "unidec predict --input q.parquet --output p.parquet --bundle models:/unidec@champion --runtime auto"
    )(predict)


def predict(
    texts: Annotated[list[str] | None, typer.Argument(metavar="[TEXT]...", help="queries")] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="labels for each query")] = 5,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    source: Annotated[
        Path | None, typer.Option("--input", help="queries: .csv, .tsv, .jsonl or .parquet with a column `text`")
    ] = None,
    target: Annotated[Path | None, typer.Option("--output", help="predictions: .parquet, .csv, .tsv or .jsonl")] = None,
    column: Annotated[str | None, typer.Option("--column", help="column of --input, if not `query` or `text`")] = None,
    runtime: Runtime = "torch",
    as_json: AsJson = False,
) -> None:
    """Print the best labels for texts, or write those for a file of queries: killed, the same command goes on."""
    if bool(texts) == bool(source) or bool(source) != bool(target):
        fix = 'unidec predict "text", or unidec predict --input queries.csv --output predictions.parquet'
        raise ConfigError("either texts, or both --input and --output are needed", where="unidec predict", fix=fix)
    folder = bundle_folder(bundle)
    from unidec.retrieval.bundle import Bundle

    loaded = Bundle.load(folder, lazy=runtime != "torch")
    if source is not None and target is not None:
        from unidec.retrieval.predict_shards import predict_resumably

        count = predict_resumably(loaded, source, target, k, column=column, runtime=runtime)
        show("predict", {"queries": count, "output": str(target)}, as_json)
        return
    if runtime != "torch":
        from unidec.retrieval.query_encoder import open_encoder

        loaded.encoder = open_encoder(loaded, runtime)
    import pandas as pd

    frame = loaded.predict_frame(pd.DataFrame({"query": texts}), k=k)
    if as_json:
        print(frame.to_json(orient="records", lines=True, force_ascii=False), end="")
    else:
        show_predictions(frame)
