"""Files of queries to files of predictions, in shards: memory does not grow with the file, and a killed run resumes.

Shards begin where batches begin, so the output has the same bytes however it is cut. (Scores can differ in their last
bits where processes use another number of threads, or other processors.)
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, get_args

import pyarrow as pa

from unidec.data.shards import Work, alone, shards_folder
from unidec.data.storage import folder_sha256, read_manifest
from unidec.errors import ArtifactError, DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA, Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.query_encoder import Runtime, open_encoder
from unidec.retrieval.sources import prepare_texts, read_rows
from unidec.retrieval.text_file import in_batches

QUERIES_A_SHARD = 1 << 16  # seconds with a bag of tokens, a few minutes with a transformer on one core
GROUP_ROWS = 1 << 16  # of a Parquet file's row groups
_loading = threading.Lock()  # threads of one process load a bundle once


@dataclass(frozen=True)
class FileRequest:
    """Work on a file of queries.

    Attributes:
        bundle: a bundle's folder.
        input: .csv, .tsv, .jsonl (these also with .gz) or .parquet, with a text column.
        output: .parquet, .csv, .tsv or .jsonl, with columns query_row (from 0), query, rank (from 1), label, title,
            score, in the input's order; or a folder of vectors.
        k: labels a query.
        column: name of the text column; None: `query`, else `text`.
        batch_size: queries encoded at once.
        device: where workers run the model: "cpu", "cuda" or "auto".
        runtime: what encodes the texts, see `query_encoder.open_encoder`; "auto": what is fastest where a worker runs.
    """

    bundle: str
    input: str
    output: str
    k: int = 5
    column: str | None = None
    batch_size: int = 256
    device: str = "cpu"
    runtime: Runtime = "torch"


def predict_file(
    bundle: Bundle,
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    k: int = 5,
    *,
    column: str | None = None,
    batch_size: int = 256,
    shards: int | None = None,
    runtime: Runtime = "torch",
) -> int:
    """Predict every query of a file in this process; after a kill, the same call resumes with the missing shards.

    Args:
        bundle: a loaded bundle; the others as for `FileRequest`.
        shards: how many; None: one for each 65,536 queries, or those that were begun.

    Returns:
        number of queries.

    Raises:
        DataError: an unknown ending, no such column, a row that is not text, or a file that cannot be read; the output
            is not touched.
        ArtifactError: another process writes this output.
    """
    request = FileRequest(
        str(bundle.path), os.fspath(input_path), os.fspath(output_path), k, column, batch_size, runtime=runtime
    )
    with alone(shards_folder(output_path)):
        work = begin_predictions(request, shards)
        if runtime != "torch":
            bundle.encoder = open_encoder(bundle, runtime)
        missing = work.missing()
        bar: Progress[None] = progress(total=sum(map(work.size, missing)), desc="predict", unit="query")
        with bar:
            for number in missing:
                write_prediction_shard(work, number, bundle, bar.update)
        merge_predictions(work)
    return work.num_rows


def begin_predictions(request: FileRequest, shards: int | None = None) -> Work:
    """The plan of a prediction; finished shards of the same prediction are kept.

    Raises:
        DataError: an unknown format or runtime, no such column, a text that cannot be read, or k below 1.
        ArtifactError: the bundle is damaged (all its hashes are checked here, and not again by workers).
    """
    source, target = Path(request.input), Path(request.output)
    _writer_of(target)
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise DataError("input and output are the same file", where=str(source), fix="choose another output")
    if request.k < 1:
        raise DataError("k is out of range", got=request.k, expected="at least 1")
    return begin_work("predictions", request, shards)


def begin_work(kind: str, request: FileRequest, shards: int | None) -> Work:
    """The plan of work on a file of queries, whose shards begin where its batches begin."""
    source, target, bundle = (Path(os.path.abspath(p)) for p in (request.input, request.output, request.bundle))
    if request.runtime not in get_args(Runtime):
        expected = " ".join(get_args(Runtime))
        raise DataError("an unknown runtime", where="runtime", got=request.runtime, expected=expected)
    read_manifest(bundle, KIND, VERSION)
    folder = shards_folder(target)
    texts, facts, num_rows = prepare_texts(source, request.column, folder)
    sha256 = folder_sha256(bundle)
    facts |= {"bundle": sha256, "k": request.k, "batch_size": request.batch_size, "runtime": request.runtime}
    absolute = replace(request, bundle=str(bundle), input=str(source), output=str(target))
    settings = asdict(absolute) | texts | {"bundle_sha256": sha256}
    return Work.begin(
        folder, kind, facts, settings, num_rows,
        shards=shards, rows_a_shard=QUERIES_A_SHARD, multiple=request.batch_size,
    )  # fmt: skip


def write_prediction_shard(
    work: Work, number: int, bundle: Bundle | None = None, show: Callable[[int], object] = lambda _count: None
) -> None:
    """Predict one shard's queries.

    Args:
        bundle: the plan's bundle, where it is loaded already.
        show: called with the number of queries of each batch.

    Raises:
        DataError: the input changed, or has a row that is not text.
        ArtifactError: the bundle is another one than when the plan was made.
    """
    given = work.settings
    bundle = opened_bundle(given) if bundle is None else bundle
    row, _ = work.rows(number)
    with work.write(number) as out, pa.OSFile(str(out.path / "predictions.arrow"), "wb") as file:
        options = pa.ipc.IpcWriteOptions(compression="zstd")  # a query's text is there k times
        with pa.ipc.new_file(file, PREDICTION_SCHEMA, options=options) as writer:
            for texts in in_batches(read_rows(given, work.rows(number)), given["batch_size"]):
                table = bundle.predict_table(texts, given["k"], first_row=row, batch_size=given["batch_size"])
                writer.write_table(table.combine_chunks())
                row += len(texts)
                show(len(texts))


def opened_bundle(settings: Mapping[str, Any]) -> Bundle:
    """The bundle of a plan: a worker loads it once, not once a shard.

    Raises:
        ArtifactError: it is another one than when the plan was made.
    """
    with _loading:
        return _open_bundle(*(settings[key] for key in ("bundle", "bundle_sha256", "device", "runtime")))


@functools.lru_cache(maxsize=1)
def _open_bundle(path: str, sha256: str, device: str, runtime: Runtime) -> Bundle:
    import torch

    from unidec.training.precision import choose_device

    bundle = Bundle.load(path, verify=False, device=str(choose_device(device)))  # `begin_predictions` verified it
    if bundle.sha256 != sha256:
        raise ArtifactError(
            "another bundle than the one of the first shards", where=path, got=bundle.sha256, expected=sha256,
            fix="run the same command again: it begins again with this bundle",
        )  # fmt: skip
    if runtime != "torch":
        bundle.encoder = open_encoder(bundle, runtime, torch.get_num_threads())  # what the runner gave it
    return bundle


def merge_predictions(work: Work) -> Path:
    """Write the output from its shards, in the input's order and batch by batch, and remove them.

    Raises:
        ArtifactError: a shard is missing or damaged.
        DataError: the output cannot be written.
    """
    target = Path(work.settings["output"])
    shards, write = work.whole_shards(), _writer_of(target)
    bar: Progress[None] = progress(total=work.num_rows, desc="merge", unit="query")
    with bar, beside(target) as file, write(file) as put:
        for number, shard in enumerate(shards):
            with pa.memory_map(str(shard / "predictions.arrow")) as source, pa.ipc.open_file(source) as reader:
                for batch in range(reader.num_record_batches):
                    put(pa.Table.from_batches([reader.get_batch(batch)]))
            bar.update(work.size(number))
    work.remove()
    return target


# -- output formats ---------------------------------------------------------------------------------------------------

Put = Callable[[pa.Table], None]
Open = Callable[[IO[bytes]], contextlib.AbstractContextManager[Put]]


def _writer_of(path: Path) -> Open:
    """What writes tables of `PREDICTION_SCHEMA` in the format of a name; the same rows give the same bytes."""
    writers: dict[str, Open] = {
        ".parquet": _write_parquet,
        ".csv": functools.partial(_write_csv, delimiter=","),
        ".tsv": functools.partial(_write_csv, delimiter="\t"),
        ".jsonl": _write_json_lines,
    }
    if path.suffix.lower() not in writers:
        raise DataError("an output of unknown format", where=str(path), expected=" ".join(writers))
    return writers[path.suffix.lower()]


@contextlib.contextmanager
def _write_parquet(file: IO[bytes]) -> Iterator[Put]:
    import pyarrow.parquet as pq

    waiting = PREDICTION_SCHEMA.empty_table()
    with pq.ParquetWriter(file, PREDICTION_SCHEMA, compression="zstd") as writer:

        def put(table: pa.Table) -> None:
            """Row groups of one size, each of one piece, so that the bytes do not depend on how the rows came."""
            nonlocal waiting
            waiting = pa.concat_tables([waiting, table])
            while waiting.num_rows >= GROUP_ROWS:  # small row groups are slow to read
                writer.write_table(waiting.slice(0, GROUP_ROWS).combine_chunks())
                waiting = waiting.slice(GROUP_ROWS)

        yield put
        if waiting.num_rows:
            writer.write_table(waiting.combine_chunks())


@contextlib.contextmanager
def _write_csv(file: IO[bytes], delimiter: str) -> Iterator[Put]:
    from pyarrow import csv as arrow_csv

    options = arrow_csv.WriteOptions(delimiter=delimiter)
    with arrow_csv.CSVWriter(file, PREDICTION_SCHEMA, write_options=options) as writer:
        yield writer.write_table


@contextlib.contextmanager
def _write_json_lines(file: IO[bytes]) -> Iterator[Put]:
    def put(table: pa.Table) -> None:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist()]
        file.write("".join(lines).encode())

    yield put


@contextlib.contextmanager
def beside(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, flushed and renamed to it at the end, removed after an error.

    Raises:
        DataError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            yield file
            if not file.closed:  # Arrow's writers may close it
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError("the output cannot be written", where=str(path), got=error.strerror or str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
