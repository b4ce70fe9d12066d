"""Predicts files of queries in shards, so that memory does not grow with the file and a killed run
can be resumed.

A runner maps shards over processes or machines (`unidec.pipeline.shard_jobs`); `predict_file` does
all the work in one process.

First, the texts are copied into one record batch per encoded batch. Threads predict whole batches
and use no further threads; shards begin at batch boundaries. So the output is the same, byte for
byte, for any number of threads and shards. (Scores can differ in their last bits between
processors.)"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from unidec.bundle.bundle import PREDICTION_SCHEMA, Bundle
from unidec.bundle.bundle_folder import KIND, VERSION
from unidec.bundle.text_file import read_texts
from unidec.config import RawBounds
from unidec.cores import in_order, num_threads, thread_pool
from unidec.data.formats.folder import parts_in
from unidec.data.raw_lines import DEFAULT_BOUNDS
from unidec.data.shards import Job, Work, alone, cuts, shards_folder
from unidec.data.storage import file_sha256, folder_sha256, read_manifest, write_file
from unidec.errors import ArtifactError, DataError
from unidec.progress import progress
from unidec.ranking.query_encoder import Runtime, open_encoder

# seconds for a bag of tokens, a few minutes for a transformer on one core
QUERIES_A_SHARD = 1 << 16
JOB = Job("predictions", "predict", "query")
ENDINGS = (".parquet", ".csv", ".tsv", ".jsonl")
TEXTS = "texts.arrow"  # copy of the texts, beside the plan
SHARD = "predictions.arrow"
GROUP_ROWS = 1 << 16  # approximate rows of a Parquet row group; small groups are slow to read
_loading = threading.Lock()  # the threads of a process load a bundle only once


@dataclass(frozen=True)
class FileRequest:
    """A prediction of a file of queries.

    Attributes:
        bundle: a bundle's folder.
        input: .csv, .tsv, .jsonl (also with .gz) or .parquet file with a text column, or a folder
            of such files, which are read in the order of their names.
        output: .parquet, .csv, .tsv or .jsonl file; columns query_row (from 0), query, rank (from
            1), label, title, score, probability; in the order of the input.
        k: labels per query.
        column: name of the text column; None: `query`, else `text`.
        batch_size: queries encoded at once.
        device: device on which workers run the model: "cpu", "cuda" or "auto".
        runtime: encoder of the texts, see `query_encoder.open_encoder`; "auto": the fastest on the
        worker's machine.
    """

    bundle: str
    input: str
    output: str
    k: int = 5
    column: str | None = None
    batch_size: int = 256
    device: str = "cpu"
    runtime: Runtime = "auto"


def predict_file(
    request: FileRequest, shards: int | None = None, bounds: RawBounds = DEFAULT_BOUNDS
) -> int:
    """Predict all queries of a file in this process; if it is killed, the same call resumes with
    the missing shards.

    Args:
        shards: number of shards; None: one for each 65,536 queries.
        bounds: limits of the input, and how quotes in it are read.

    Returns:
        The number of queries.

    Raises:
        DataError: as `begin_predictions`; the output is not changed.
        ArtifactError: another process writes this output, or it cannot be written.
    """
    with alone(shards_folder(request.output)):
        work = begin_predictions(request, shards, bounds)
        missing = work.missing()
        num_missing = sum(map(work.size, missing))
        with progress(total=num_missing, desc=JOB.title, unit=JOB.unit) as bar:
            for number in missing:
                write_shard(work, number, bar.update)
        merge(work)
    return work.num_rows


def begin_predictions(
    request: FileRequest, shards: int | None, bounds: RawBounds = DEFAULT_BOUNDS
) -> Work:
    """Copy the texts and write the plan; finished shards of the same prediction are kept.

    Raises:
        DataError: unknown format, missing column, unreadable or blank text, or k below 1.
        ArtifactError: the bundle is damaged. All its hashes are checked here; workers do not check
        them again.
    """
    source = Path(request.input).absolute()
    target = Path(request.output).absolute()
    bundle = Path(request.bundle).absolute()
    if target.suffix.lower() not in ENDINGS:
        what = "the output has an unknown format"
        raise DataError(what, where=target, expected=" ".join(ENDINGS))
    if source.resolve() == target.resolve():
        what = "input and output are the same file"
        raise DataError(what, where=source, fix="choose another output")
    if request.k < 1:
        raise DataError("k is out of range", got=request.k, expected="at least 1")
    read_manifest(bundle, KIND, VERSION)
    folder = shards_folder(target)
    sha256 = folder_sha256(bundle)
    texts = (read_texts(file, request.column, bounds) for file in parts_in(source) or [source])
    num_rows = _copy_texts(chain.from_iterable(texts), folder / TEXTS, request.batch_size)
    count = shards
    if count is None:
        count = max(1, -(-num_rows // QUERIES_A_SHARD))
    facts = {
        "k": request.k,
        "runtime": request.runtime,
        "batch_size": request.batch_size,
        "texts": file_sha256(folder / TEXTS),
        "bundle": sha256,
        "columns": PREDICTION_SCHEMA.names,
    }
    settings = asdict(request) | {
        "bundle": str(bundle),
        "input": str(source),
        "output": str(target),
        "bundle_sha256": sha256,
    }
    return Work.begin(folder, JOB, facts, settings, cuts(num_rows, count, request.batch_size))


def _copy_texts(texts: Iterator[str], target: Path, batch_size: int) -> int:
    """Copy texts into an Arrow file, one record batch per encoded batch; returns the number of
    texts.
    """
    num_rows = 0
    schema = pa.schema([("text", pa.large_string())])
    with (
        progress(desc="read", unit="text") as bar,
        write_file(target) as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        while batch := list(islice(texts, batch_size)):
            writer.write_batch(pa.record_batch({"text": batch}, schema=schema))
            num_rows += len(batch)
            bar.update(len(batch))
    return num_rows


def write_shard(
    work: Work,
    number: int,
    show: Callable[[int], object] = lambda _count: None,
    threads: int = 0,
) -> None:
    """Predict the queries of one shard.

    Args:
        show: called with the number of queries of each finished batch.
        threads: threads that predict; 0: one for each core.

    Raises:
        ArtifactError: the bundle differs from the plan's, or the shard cannot be written.
    """
    settings = work.settings
    first, last = work.rows(number)
    facts = ("bundle", "bundle_sha256", "device", "runtime")
    with _loading:
        bundle = open_bundle(*(settings[name] for name in facts))
    batch_size = settings["batch_size"]
    starts = range(first, last, batch_size)
    options = pa.ipc.IpcWriteOptions(compression="zstd")  # a query's text is stored k times
    with (
        work.write(number) as out,
        pa.memory_map(str(work.folder / TEXTS)) as source,
        pa.ipc.open_file(source) as reader,
        pa.OSFile(str(out.path / SHARD), "wb") as file,
        pa.ipc.new_stream(file, PREDICTION_SCHEMA, options=options) as writer,
        thread_pool(threads or None) as pool,
    ):

        def predict(row: int) -> Future[pa.Table]:
            texts = reader.get_batch(row // batch_size)["text"].to_pylist()
            return pool.submit(
                bundle.predict_table, texts, settings["k"], first_row=row, batch_size=len(texts)
            )

        tables = in_order(map(predict, starts), 2 * num_threads())
        for row, table in zip(starts, tables, strict=True):
            writer.write_table(table.combine_chunks())
            show(min(batch_size, last - row))


@functools.lru_cache(maxsize=1)
def open_bundle(path: str, sha256: str, device: str, runtime: Runtime) -> Bundle:
    """The bundle of a plan, cached so that a worker does not load it for each shard."""
    from unidec.training.precision import choose_device

    lazy = device == "cpu" and runtime != "torch"  # then torch is not even imported
    device = "cpu" if lazy else str(choose_device(device))
    # verified by `begin_predictions`
    bundle = Bundle.load(path, verify=False, device=device, lazy=lazy)
    if bundle.sha256 != sha256:
        raise ArtifactError(
            "the bundle differs from that of the first shards",
            where=path,
            got=bundle.sha256,
            expected=sha256,
            fix="run the same command again: it starts over with this bundle",
        )
    if runtime != "torch":
        bundle.encoder = open_encoder(bundle, runtime, threads=1)
    return bundle


def merge(work: Work) -> Path:
    """Write the output from the shards, in input order and in pieces, and delete the shards;
    returns the output path.

    Raises:
        ArtifactError: a shard is missing or damaged, or the output cannot be written.
    """
    target = Path(work.settings["output"])
    batch_rows = work.settings["batch_size"] * work.settings["k"]
    group = max(1, GROUP_ROWS // batch_rows)
    with work.whole() as shards, write_file(target) as file:
        _write_tables(file, target.suffix.lower(), _tables(shards, group))
    return target


def _tables(shards: Sequence[Path], group: int) -> Iterator[pa.Table]:
    """Predictions as tables of `group` batches each, independent of the shards' boundaries."""
    files = (pa.memory_map(str(shard / SHARD)) for shard in shards)
    batches = chain.from_iterable(map(pa.ipc.open_stream, files))
    while table_batches := list(islice(batches, group)):
        yield pa.Table.from_batches(table_batches).combine_chunks()


def _write_tables(file: IO[bytes], kind: str, tables: Iterator[pa.Table]) -> None:
    """Write tables of `PREDICTION_SCHEMA` as .parquet (one row group per table), .csv, .tsv or
    .jsonl.
    """
    import pyarrow.csv as pv
    import pyarrow.parquet as pq

    if kind == ".jsonl":
        for table in tables:
            lines = (json.dumps(row, ensure_ascii=False) for row in table.to_pylist())
            file.writelines(f"{line}\n".encode() for line in lines)
        return
    writer: Any
    if kind == ".parquet":
        writer = pq.ParquetWriter(file, PREDICTION_SCHEMA, compression="zstd")
    else:
        options = pv.WriteOptions(delimiter="\t" if kind == ".tsv" else ",")
        writer = pv.CSVWriter(file, PREDICTION_SCHEMA, write_options=options)
    with writer:
        for table in tables:
            writer.write_table(table)
