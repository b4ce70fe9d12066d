"""Prediction of a file of any size in shards: resumable in one process, or written by many.

The predictions have the bytes that `predict_file` writes: shards begin where its batches begin. (Scores can differ in
their last bits where processes use another number of threads, or other processors.)
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa

from unidec.data.shards import Work, alone
from unidec.data.storage import folder_sha256, read_manifest
from unidec.errors import ArtifactError, DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA, Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.predict_file import beside, check_request, writer_of
from unidec.retrieval.query_encoder import Runtime, open_encoder
from unidec.retrieval.sources import Opened, prepare_texts, read_rows
from unidec.retrieval.text_file import in_batches

ROWS_A_SHARD = 1 << 16  # seconds with a bag of tokens, a few minutes with a transformer on one core
BATCH = 256
_bundle = Opened()


def shards_folder(output_path: str | os.PathLike[str]) -> Path:
    """Where the shards of an output lie until they are merged: `<output>.shards`."""
    output = Path(os.path.abspath(output_path))
    return output.with_name(f"{output.name}.shards")


def begin_predictions(
    bundle_path: str | os.PathLike[str],
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    k: int = 5,
    *,
    column: str | None = None,
    batch_size: int = BATCH,
    shards: int | None = None,
    device: str = "cpu",
    runtime: Runtime = "torch",
) -> Work:
    """The plan of a prediction; what an earlier run of the same prediction finished is kept.

    Args:
        bundle_path: a bundle's folder; all its hashes are checked here, and not again by the workers.
        input_path, output_path, k, column, batch_size: see `predict_file`.
        shards: how many; None: one for each 65,536 queries, or those that were begun.
        device: where workers run the model.
        runtime: what encodes the texts, see `query_encoder.open_encoder`; "auto": what is fastest where a worker runs.

    Raises:
        DataError: an unknown format or runtime, no such column, a text that cannot be read.
        ArtifactError: the bundle is damaged, or another process writes the plan's folder.
    """
    source, target = Path(os.path.abspath(input_path)), Path(os.path.abspath(output_path))
    writer_of(target)
    check_request(source, target, k)
    if runtime not in get_args(Runtime):
        raise DataError("an unknown runtime", where="runtime", got=runtime, expected=" ".join(get_args(Runtime)))
    bundle = Path(os.path.abspath(bundle_path))
    read_manifest(bundle, KIND, VERSION)
    folder = shards_folder(target)
    texts, facts, num_rows = prepare_texts(source, column, folder)
    facts |= {"bundle": folder_sha256(bundle), "k": k, "batch_size": batch_size, "runtime": runtime}
    settings = texts | {
        "bundle": str(bundle), "bundle_sha256": facts["bundle"], "k": k, "batch_size": batch_size, "device": device,
        "runtime": runtime, "out": str(target),
    }  # fmt: skip
    return Work.begin(
        folder, "predictions", facts, settings, num_rows, shards=shards, rows_a_shard=ROWS_A_SHARD, multiple=batch_size
    )


def write_prediction_shard(
    work: Work, number: int, show: Callable[[int], object] | None = None, bundle: Bundle | None = None
) -> None:
    """Predicts one shard's queries.

    Args:
        show: called with the number of queries of each batch.
        bundle: the plan's bundle, where it is loaded already.

    Raises:
        DataError: the input changed, or holds a row that is no text.
        ArtifactError: the bundle is another one than when the plan was made.
    """
    told, (first, last) = work.settings, work.rows(number)
    if bundle is None:
        about = (told["bundle"], told["bundle_sha256"], told["device"], told["runtime"])
        bundle = _bundle.get(about, lambda: _load(told))
    row = first
    with work.write(number) as out, pa.OSFile(str(out.path / "predictions.arrow"), "wb") as file:
        options = pa.ipc.IpcWriteOptions(compression="zstd")  # a query's text is there k times
        with pa.ipc.new_file(file, PREDICTION_SCHEMA, options=options) as writer:
            for part in in_batches(read_rows(told, (first, last)), told["batch_size"]):
                table = bundle.predict_table(part, told["k"], first_row=row, batch_size=told["batch_size"])
                writer.write_table(table.combine_chunks())
                row += len(part)
                if show is not None:
                    show(len(part))


def merge_predictions(work: Work) -> Path:
    """Writes the output from its shards, in the input's order and piece by piece, and removes them.

    Raises:
        ArtifactError: a shard is missing or damaged.
        DataError: the output cannot be written.
    """
    work.check_whole()
    target = Path(work.settings["out"])
    write = writer_of(target)
    bar: Progress[None] = progress(total=work.num_rows, desc="merge", unit="query")
    with bar, beside(target) as file, write(file) as put:
        for number in range(work.num_shards):
            path = work.path(number) / "predictions.arrow"
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for batch in range(reader.num_record_batches):
                    put(pa.Table.from_batches([reader.get_batch(batch)]))
            first, last = work.rows(number)
            bar.update(last - first)
    work.remove()
    return target


def predict_resumably(
    bundle: Bundle,
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    k: int = 5,
    *,
    column: str | None = None,
    batch_size: int = BATCH,
    shards: int | None = None,
    runtime: Runtime = "torch",
) -> int:
    """`predict_file` that goes on, after it was killed, with the shards that are missing; in this process.

    Returns:
        number of queries.

    Raises:
        DataError, ArtifactError: as `begin_predictions` and `predict_file`.
    """
    with alone(shards_folder(output_path)):
        work = begin_predictions(
            bundle.path, input_path, output_path, k, column=column, batch_size=batch_size, shards=shards,
            runtime=runtime,
        )  # fmt: skip
        if runtime != "torch":
            bundle.encoder = open_encoder(bundle, runtime)
        missing = work.missing()
        left = sum(last - first for first, last in map(work.rows, missing))
        bar: Progress[None] = progress(total=left, desc="predict", unit="query")
        with bar:
            for number in missing:
                write_prediction_shard(work, number, bar.update, bundle)
        merge_predictions(work)
    return work.num_rows


def _load(told: Any) -> Bundle:
    bundle = Bundle.load(told["bundle"], verify=False, device=_device(told["device"]))  # the plan's maker verified it
    if bundle.sha256 != told["bundle_sha256"]:
        raise ArtifactError(
            "another bundle than the one that the shards were begun with",
            where=told["bundle"],
            got=bundle.sha256,
            expected=told["bundle_sha256"],
            fix="run the same command again: the shards are then made anew",
        )
    if told["runtime"] != "torch":
        import torch

        bundle.encoder = open_encoder(bundle, told["runtime"], torch.get_num_threads())  # what the runner gave it
    return bundle


def _device(name: str) -> str:
    from unidec.training.precision import choose_device

    return str(choose_device(name))
