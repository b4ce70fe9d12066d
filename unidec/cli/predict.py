"""`unidec predict`: the best labels of texts, or of a file of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from unidec.cli.options import DEFAULT_BUNDLE, AsJson, BundleAddress, bundle_folder
from unidec.cli.output import show, show_predictions
from unidec.errors import ArtifactError, ConfigError, DataError, UnidecError

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.query_encoder import QueryEncoder

Runtime = Annotated[
    Literal["torch", "auto", "onnx", "onnx-int8"] | None,
    typer.Option(
        "--runtime",
        help="what encodes the texts; auto: the fastest that keeps quality (docs/serving.md). Default: torch for "
        "--input, onnx for texts on the command line (torch where onnxruntime cannot run the model)",
    ),
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
    target: Annotated[
        Path | None, typer.Option("--output", help=".parquet, .csv, .tsv or .jsonl; vectors instead: .vectors")
    ] = None,
    column: Annotated[str | None, typer.Option("--column", help="column of --input, if not `query` or `text`")] = None,
    runtime: Runtime = None,
    as_json: AsJson = False,
) -> None:
    """Print the best labels for texts, or write those for a file of queries: after a kill, the same command resumes."""
    if bool(texts) == bool(source) or bool(source) != bool(target):
        fix = 'unidec predict "text", or unidec predict --input queries.csv --output predictions.parquet'
        raise ConfigError("either texts, or both --input and --output are needed", where="unidec predict", fix=fix)
    for number, text in enumerate(texts or [], 1):
        if not text.strip():  # the server refuses it, too
            raise DataError(
                "a text without anything in it", where=f"unidec predict, text {number}", got=repr(text),
                expected="at least one character that is no space", fix="leave it out",
            )  # fmt: skip
    folder = bundle_folder(bundle)
    from unidec.retrieval.bundle import Bundle

    loaded = Bundle.load(folder, lazy=source is None or runtime not in (None, "torch"))
    if source is not None and target is not None:
        from unidec.retrieval.predict_file import predict_file

        count = predict_file(loaded, source, target, k, column=column, runtime=runtime or "torch")
        show("predict", {"queries": count, "output": str(target)}, as_json)
        return
    loaded.encoder = _encoder(loaded, runtime)
    import pandas as pd

    frame = loaded.predict_frame(pd.DataFrame({"query": texts}), k=k)
    if as_json:
        print(frame.to_json(orient="records", lines=True, force_ascii=False), end="")
    else:
        show_predictions(frame)


def _encoder(bundle: Bundle, runtime: Runtime) -> QueryEncoder:
    """By default onnxruntime with 32 bits: torch's labels without the seconds that importing torch takes."""
    from unidec.retrieval.query_encoder import open_encoder

    if runtime is not None:
        return open_encoder(bundle, runtime)
    try:
        return open_encoder(bundle, "onnx")
    except ArtifactError:
        raise
    except UnidecError:  # an architecture that is not known there, or onnxruntime is not installed
        return open_encoder(bundle, "torch")
