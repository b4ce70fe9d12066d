"""The flow `unidec-predict`: a file of queries to a file of predictions, in shards, here or on a cluster.

`python -m flows.predict --input queries.parquet --output predictions.parquet` or a run of the deployment
`unidec-predict/predict`. `unidec predict` is the same in one process, without Prefect.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Literal

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import flow

from flows import lifecycle
from flows.shards import SYNTAX, VARIABLE, Runner, merge, write_shards
from unidec.data.shards import alone, shards_folder
from unidec.pipeline.paths import BUNDLES
from unidec.retrieval.predict_file import FileRequest, begin_predictions
from unidec.tracking.fetch import fetch_bundle

_STOPPED = "stopped: the same command resumes with the shards that are missing"


@flow(name="unidec-predict", description=__doc__, persist_result=False)
def predict(
    input: str,
    output: str,
    bundle: str = "outputs/bundle",
    k: int = 5,
    column: str | None = None,
    shards: int | None = None,
    runner: str | None = None,
    device: Literal["cpu", "cuda", "auto"] = "cpu",
    runtime: Literal["torch", "auto", "onnx", "onnx-int8"] = "torch",
) -> dict[str, Any]:
    """Predicts every query of a file; killed or cancelled, the same call resumes with the shards that are missing.

    Args:
        input: .csv, .tsv, .jsonl (also with .gz) or .parquet with a column of queries.
        output: .parquet, .csv, .tsv or .jsonl, a row for each query and label, in the input's order; or .vectors: a
            folder of the queries' vectors, de.npy and clf.npy.
        bundle: a bundle's folder, or a registered one: models:/unidec@champion.
        k: labels for each query.
        column: of the queries, if not `query` or `text`.
        shards: how many; default: one for each 65,536 queries.
        runner: processes, threads, dask, ray, dask://host:port or ray://host:port; see docs/scale.md.
        device: "cpu", "cuda" or "auto": where workers run the model.
        runtime: "torch", "auto", "onnx" or "onnx-int8": what encodes the queries.

    Returns:
        {"rows", "shards", "output"}.

    Raises:
        UnidecError: what is wrong with bundle, input or a shard, which is named with its rows.
    """
    Runner.parse(runner)  # a mistake shows before the input is read
    with lifecycle.at_work(), alone(shards_folder(output)):
        folder = str(fetch_bundle(bundle, BUNDLES))
        request = FileRequest(folder, input, output, k, column, device=device, runtime=runtime)
        work = begin_predictions(request, shards)
        write_shards(work, runner)
        return {"rows": work.num_rows, "shards": work.num_shards, "output": merge(str(work.folder))}


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m flows.predict`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.predict",
        description="Predict a file of queries of any size: streamed, sharded, resumable.",
        epilog="examples:\n"
        "  python -m flows.predict --input queries.parquet --output predictions.parquet\n"
        "  python -m flows.predict --input q.csv.gz --output p.parquet -k 10 --shards 64 --runner processes:8\n"
        "  python -m flows.predict --input q.parquet --output p.parquet --bundle models:/unidec@champion "
        "--runner dask://scheduler:8786\n"
        "stopped or killed, the same command resumes with the missing shards; see docs/scale.md\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--input", required=True, metavar="FILE", help=".csv, .tsv, .jsonl (also .gz) or .parquet")
    parser.add_argument("--output", required=True, metavar="FILE", help=".parquet, .csv, .tsv, .jsonl or .vectors")
    parser.add_argument("--bundle", default="outputs/bundle", metavar="WHERE", help="folder, or models:/name@alias")
    parser.add_argument("-k", type=int, default=5, help="labels for each query (default: 5)")
    parser.add_argument("--runtime", default="torch", choices=["torch", "auto", "onnx", "onnx-int8"])
    parser.add_argument("--column", help="of the queries, if not `query` or `text`")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda", "auto"])
    parser.add_argument("--shards", type=int, metavar="N", help="how many (default: by the number of rows)")
    parser.add_argument("--runner", metavar="WHERE", help=f"{SYNTAX} (default: ${VARIABLE}, else processes)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = vars(parser.parse_args(arguments))

    def in_words(done: dict[str, Any]) -> str:
        return f"{done['rows']:,} rows in {done['shards']:,} shards -> {done['output']}"

    show = lifecycle.as_json if given.pop("json") else in_words
    return lifecycle.on_command_line(lambda: predict(**given), _STOPPED, show)


if __name__ == "__main__":
    from flows.predict import main as _main  # workers import this module by its name

    sys.exit(_main())
