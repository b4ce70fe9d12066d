"""Commands that use a bundle: `unidec predict`, `serve`, `index` and `export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from unidec.cli.commands import (
    DEFAULT_BUNDLE,
    DEFAULT_PARAMS,
    AsJson,
    Assignments,
    BundleAddress,
    ParamsFile,
    Shown,
    add_stage,
    app,
    bundle_folder,
    command,
    group,
    load_if_there,
    show,
    show_predictions,
    table,
    text_of,
)
from unidec.errors import ConfigError, DataError

if TYPE_CHECKING:
    from unidec.pipeline.indexing import Tuned

Runtime = Annotated[
    Literal["auto", "torch", "onnx", "onnx-int8"],
    Option(
        help="runtime of the query encoder; auto: the fastest that keeps quality, as in the server "
        "(docs/serving.md)",
    ),
]
Head = Annotated[
    Literal["both", "de", "clf"] | None,
    Option(help="head to export; queries and labels need the same one; default: the bundle's own"),
]
Target = Annotated[
    Path, Option("--output", metavar="FOLDER", help="a new folder, or one of an earlier export")
]

index_app = group("index", "Build a bundle's search index, and choose its kind by measurement.")
export_app = group(
    "export",
    (
        "Write a bundle's parts for other programs: label vectors, the query encoder "
        "(docs/bundles.md)."
    ),
)


@command(
    app,
    '"editor for tables" -k 5',
    "--input queries.csv --output predictions.parquet",
    "--input q.parquet --output p.parquet --bundle models:/unidec@champion",
)
def predict(
    texts: Annotated[list[str] | None, Argument(metavar="[TEXT]...", help="queries")] = None,
    k: Annotated[int, Option("-k", min=1, help="labels per query")] = 5,
    bundle: BundleAddress = DEFAULT_BUNDLE,
    source: Annotated[
        Path | None,
        Option(
            "--input",
            help="queries: .csv, .tsv, .jsonl or .parquet with a column `text`, or a folder",
        ),
    ] = None,
    target: Annotated[
        Path | None, Option("--output", help=".parquet, .csv, .tsv or .jsonl")
    ] = None,
    column: Annotated[
        str | None, Option(help="column of --input; default: `query` or `text`")
    ] = None,
    runtime: Runtime = "auto",
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Print the best labels for texts, or write them for a file of queries; re-run to resume after
    a kill.
    """
    if bool(texts) == bool(source) or bool(source) != bool(target):
        raise ConfigError(
            "requires either texts, or both --input and --output",
            where="unidec predict",
            fix='unidec predict "text", or unidec predict --input queries.csv --output '
            "predictions.parquet",
        )
    from unidec.data.tokens import is_blank

    for number, text in enumerate(texts or [], 1):
        if is_blank(text):  # the server refuses it, too
            raise DataError("empty text", where=f"text {number}", got=repr(text), fix="remove it")
    settings = load_if_there(params, assignments)
    folder = bundle_folder(bundle)
    if source is not None:
        from unidec.bundle.predict_file import FileRequest, predict_file

        request = FileRequest(
            str(folder), str(source), str(target), k=k, column=column, runtime=runtime
        )
        count = predict_file(request, bounds=settings.raw)
        show("predict", {"queries": count, "output": str(target)}, as_json)
        return
    from unidec.bundle.bundle import Bundle
    from unidec.ranking.query_encoder import open_encoder

    loaded = Bundle.load(folder, lazy=runtime != "torch")
    loaded.encoder = open_encoder(loaded, runtime)
    table = loaded.predict_table(texts or [], k).drop_columns(["query_row"])
    frame = table.to_pandas().astype({"score": float})
    if as_json:
        print(frame.to_json(orient="records", lines=True, force_ascii=False), end="")
    else:
        show_predictions(frame)


@command(app, "", "models:/unidec@champion --port 9000", "--set serve.max_k=20")
def serve(
    source: Annotated[
        str,
        Argument(
            metavar="[BUNDLE]", help="folder, models:/name@alias (followed) or models:/name/version"
        ),
    ] = DEFAULT_BUNDLE,
    host: Annotated[
        str | None, Option(help="address to listen on; default serve.host, 127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, Option(help="port; 0: any free one; default serve.port, 8080")
    ] = None,
    feedback: Annotated[
        str | None,
        Option(
            metavar="FILE",
            help=".jsonl for feedback from the page; `unidec models monitor` reads it",
        ),
    ] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
) -> None:
    """Answer queries over HTTP, with a page to try it at /; SIGTERM or Ctrl-C ends it after all
    requests are answered.

    When an alias moves, the new version is loaded next to the old one and takes over without a
    failed request (docs/serving.md). The environment variable UNIDEC_API_KEY holds the key that
    clients must send; if it is not set, no key is required."""
    from unidec.machine import share_one_heap

    share_one_heap()  # before anything starts a thread
    given = {"serve.host": host, "serve.port": port, "serve.feedback": feedback}
    words = [f"{key}={value}" for key, value in given.items() if value is not None]
    settings = load_if_there(params, [*(assignments or []), *words]).serve
    from unidec.serving.serve import serve as run

    run(source, settings)


add_stage(
    index_app,
    "index",
    "Encode the labels and build the search index: outputs/bundle.",
    "--set index.factory=PQx4",
    name="build",
)


@command(index_app, "", "--recall 0.99 -k 10", "--kinds pq,ivf-pq")
def tune(
    recall: Annotated[
        float, Option(min=0, max=1, help="target recall against the exact search")
    ] = 0.98,
    k: Annotated[int, Option("-k", min=1, help="results per search")] = 100,
    bundle: BundleAddress = DEFAULT_BUNDLE,
    kinds: Annotated[
        str, Option(metavar="A,B", help="kinds to measure; default: those that suit the labels")
    ] = "",
    queries: Annotated[int, Option(min=1, help="number of queries to measure with")] = 300,
    threads: Annotated[int, Option(min=1, help="threads of builds and searches")] = 1,
) -> Shown:
    """Measure kinds of index on a bundle (recall against exact search, query latency, memory, build
    time) and choose the fastest that reaches the target recall. Exit code 1: none does.
    """
    from unidec.pipeline.indexing import index_tune

    named = list(filter(None, map(str.strip, kinds.split(","))))
    found = index_tune(
        bundle_folder(bundle), recall, k, num_queries=queries, kinds=named, threads=threads
    )
    return Shown(found, _tuned(found), exit_code=0 if found.chosen else 1)


def _tuned(found: Tuned) -> list[str]:
    names = ["factory", "search", "recall", "p50_ms", "p99_ms", "index_bytes", "build_seconds"]
    rows = [{name: text_of(getattr(one, name)) for name in names} for one in found.measured]
    lines = table(rows)
    lines.append(
        f"measured with {found.queries}, {found.labels} labels; recall of the first {found.k}"
    )
    if found.chosen is None:
        missed = f"no measured kind reaches a recall of {found.wanted:.2%}: try --kinds flat"
        return [*lines, missed]
    advice = (
        f'for params.yaml: index: {{factory: "{found.chosen.factory}", '
        f'search: "{found.chosen.search}"}}; then rebuild the bundle: `unidec index build`'
    )
    return [*lines, advice]


@command(export_app, "--output labels.parquet", "--head de --bundle models:/unidec@champion")
def vectors(
    target: Annotated[Path, Option("--output", metavar="FILE", help=".parquet")] = Path(
        "labels.parquet"
    ),
    head: Head = None,
    bundle: BundleAddress = DEFAULT_BUNDLE,
) -> Any:
    """Write uid, title and vector of every label, for a vector database with inner product."""
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.export.vectors import export_vectors

    return export_vectors(Bundle.load(bundle_folder(bundle), lazy=True), target, head=head)


@command(export_app, "--output onnx", "--head de --bundle models:/unidec/7")
def onnx(
    target: Target = Path("onnx"), head: Head = None, bundle: BundleAddress = DEFAULT_BUNDLE
) -> Any:
    """Write encoder and heads as an ONNX file, with tokenizer and README beside it."""
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.export.query_side import export_onnx

    return export_onnx(Bundle.load(bundle_folder(bundle), lazy=True), target, head=head)


@command(export_app, "--head de", "--head clf --output encoder", title="export")
def sentence_transformers(
    target: Target = Path("sentence-transformers"),
    head: Head = None,
    bundle: BundleAddress = DEFAULT_BUNDLE,
) -> Any:
    """Write the query encoder as a folder that SentenceTransformer(folder) loads."""
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.export.query_side import export_sentence_transformers

    return export_sentence_transformers(Bundle.load(bundle_folder(bundle)), target, head=head)
