"""Predict a file of queries of any size: streamed, sharded, resumable; here or on a cluster (docs/scale.md).

`python -m flows.predict`, or a run of the deployment `unidec-predict/predict`. `unidec predict` is the same in one
process, without Prefect.

examples:
  python -m flows.predict --input queries.parquet --output predictions.parquet
  python -m flows.predict --input q.csv.gz --output p.parquet -k 10 --shards 64 --runner processes:8
  python -m flows.predict --input q.parquet --output p.parquet --bundle models:/unidec@champion \\
      --runner dask://scheduler:8786
"""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("predict"))

from typing import Any, Literal

from prefect import flow

from flows import lifecycle
from flows.shards import parse_runner, write_shards
from unidec.data.shards import alone, shards_folder
from unidec.pipeline.paths import BUNDLES
from unidec.retrieval import predict_file
from unidec.tracking.fetch import fetch_bundle


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
        runner: processes, threads (:N workers), dask://host:port or ray://host:port; default UNIDEC_RUNNER, processes.
        device: where workers run the model.
        runtime: what encodes the queries.

    Returns:
        {"rows", "shards", "output"}.

    Raises:
        UnidecError: what is wrong with bundle, input or a shard, which is named with its rows.
    """
    parse_runner(runner)  # a mistake shows before the input is read
    with lifecycle.at_work(), alone(shards_folder(output)):
        folder = str(fetch_bundle(bundle, BUNDLES))
        request = predict_file.FileRequest(folder, input, output, k, column, device=device, runtime=runtime)
        work = predict_file.begin_predictions(request, shards)
        write_shards(work, runner)
        written = lifecycle.run("merge", predict_file.merge, work)
        return {"rows": work.num_rows, "shards": work.num_shards, "output": str(written)}


def in_words(done: dict[str, Any]) -> str:
    """The result in a line."""
    return f"{done['rows']:,} rows in {done['shards']:,} shards -> {done['output']}"
