"""`unidec export`: a bundle's parts for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from unidec.cli.options import DEFAULT_BUNDLE, AsJson, BundleAddress, bundle_folder
from unidec.cli.output import show

Head = Annotated[
    Literal["both", "de", "clf"] | None,
    typer.Option("--head", help="of which score; queries and labels need the same one; default: the bundle's own"),
]
Out = Annotated[Path, typer.Option("--output", metavar="FOLDER", help="a new folder, or that of an earlier export")]
export_app = typer.Typer(
    help="Write a bundle's parts for other programs: label vectors, the query encoder (docs/bundles.md).",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@export_app.command(
    epilog="Examples: unidec export vectors --output labels.parquet  |  unidec export vectors --output labels.npy "
    "--head de --dtype float16 --bundle models:/unidec@champion"
)
def vectors(
    target: Annotated[Path, typer.Option("--output", metavar="FILE", help=".parquet or .npy")] = Path("labels.parquet"),
    head: Head = None,
    dtype: Annotated[Literal["float32", "float16"], typer.Option("--dtype", help="of the numbers")] = "float32",
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    as_json: AsJson = False,
) -> None:
    """Write uid, title and vector of every label, for a vector database with inner product."""
    from unidec.retrieval.export.vectors import export_vectors

    show("vectors", export_vectors(bundle_folder(bundle), target, head=head, dtype=dtype), as_json)


@export_app.command(
    epilog="Examples: unidec export onnx --output onnx  |  unidec export onnx --head de --bundle models:/unidec/7"
)
def onnx(
    target: Out = Path("onnx"), head: Head = None, bundle: BundleAddress = str(DEFAULT_BUNDLE), as_json: AsJson = False
) -> None:
    """Write encoder and heads as an ONNX file, with tokenizer and README beside it."""
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.export.onnx_folder import export_onnx

    show("onnx", export_onnx(Bundle.load(bundle_folder(bundle), lazy=True), target, head=head), as_json)


@export_app.command(
    "sentence-transformers",
    epilog="Examples: unidec export sentence-transformers --head de  |  "
    "unidec export sentence-transformers --head clf --output encoder",
)
def sentence_transformers(
    target: Out = Path("sentence-transformers"),
    head: Head = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    as_json: AsJson = False,
) -> None:
    """Write the query encoder as a folder that SentenceTransformer(folder) loads."""
    from unidec.retrieval.bundle import Bundle
    from unidec.retrieval.export.sentence import export_sentence_transformers

    loaded = Bundle.load(bundle_folder(bundle))
    show("export", export_sentence_transformers(loaded, target, head=head), as_json)
