"""Predict a file of queries of any size, in shards; resumable; on this machine or on a cluster
(docs/scale.md).

Run `python -m flows.predict`, or the deployment `unidec-predict/predict`. `unidec predict` does the
same in a single process, without Prefect. Shards are tasks of processes or threads, or of a Dask or
Ray cluster (`flows.runners`).

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

from flows import lifecycle, runners
from unidec.bundle import predict_file
from unidec.config import RawBounds
from unidec.data.shards import alone, shards_folder
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
    runtime: Literal["torch", "auto", "onnx", "onnx-int8"] = "auto",
    quotes: Literal["auto", "yes", "no"] = "auto",
) -> dict[str, Any]:
    """Predicts every query of a file; after a kill or cancellation, the same call resumes with the
    missing shards.

    Args:
        input: .csv, .tsv, .jsonl (also with .gz) or .parquet with a column of queries.
        output: .parquet, .csv, .tsv or .jsonl, a row per query and label, in the input's order.
        bundle: a bundle's folder, or a registered one: models:/unidec@champion.
        k: labels per query.
        column: column of the queries; default: `query` or `text`.
        shards: number of shards; default: one per 65,536 queries.
        runner: processes, threads (:N workers), dask://host:port or ray://host:port; default
            UNIDEC_RUNNER, processes.
        device: device that workers run the model on.
        runtime: runtime of the query encoder; auto: as in the server.
        quotes: whether quotes in a .csv or .tsv file enclose fields, as in `raw.quotes`.

    Returns:
        {"rows", "shards", "output"}.

    Raises:
        UnidecError: an error in the bundle, the input or a shard, which is named with its rows.
    """
    runners.parse_runner(runner)  # reports a mistake before the input is read
    with lifecycle.at_work(), alone(shards_folder(output)):
        folder = str(fetch_bundle(bundle))
        request = predict_file.FileRequest(
            folder, input, output, k, column, device=device, runtime=runtime
        )
        work = predict_file.begin_predictions(request, shards, RawBounds(quotes=quotes))
        runners.write_shards(work, runner)
        written = lifecycle.run("merge", predict_file.merge, work)
        done = {"rows": work.num_rows, "shards": work.num_shards, "output": str(written)}
        return lifecycle.finished(done)


def in_words(done: dict[str, Any]) -> str:
    """The result in one line."""
    return f"{done['rows']:,} rows in {done['shards']:,} shards -> {done['output']}"
