"""Files of queries to files of predictions in shards: memory does not grow with the file, and a killed run resumes. A
runner maps `run_shard` over processes or machines; `predict_file` does all in one process.

The texts are copied first, a record batch for each batch that is encoded. Shards begin where batches begin, so the
output has the same bytes however it is cut. (Scores can differ in their last bits where processes use another number of
threads, or other processors.)
"""

from __future__ import annotations

import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import IO

import pyarrow as pa

from unidec.data.shards import Work, alone, cuts, shards_folder
from unidec.data.storage import file_sha256, folder_sha256, read_manifest, write_file
from unidec.errors import ArtifactError, DataError
from unidec.model.faiss_library import faiss_module
from unidec.progress import progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA, Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.query_encoder import Runtime, open_encoder
from unidec.retrieval.text_file import read_texts

QUERIES_A_SHARD = 1 << 16  # seconds with a bag of tokens, a few minutes with a transformer on one core
ENDINGS = (".parquet", ".csv", ".tsv", ".jsonl")
TEXTS = "texts.arrow"  # the copy, beside the plan
GROUP_ROWS = 1 << 16  # of a Parquet file's row groups, about: small ones are slow to read
_loading = threading.Lock()  # threads of one process load a bundle once


@dataclass(frozen=True)
class FileRequest:
    """Work on a file of queries.

    Attributes:
        bundle: a bundle's folder.
        input: .csv, .tsv, .jsonl (these also with .gz) or .parquet, with a text column.
        output: .parquet, .csv, .tsv or .jsonl, with columns query_row (from 0), query, rank (from 1), label, title,
            score, probability, in the input's order.
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


def predict_file(bundle: Bundle, request: FileRequest, shards: int | None = None) -> int:
    """Predict every query of a file in this process; after a kill, the same call resumes with the missing shards.

    Args:
        bundle: that of the request, loaded.
        shards: how many; None: one for each 65,536 queries.

    Returns:
        number of queries.

    Raises:
        DataError: as `begin_predictions`; the output is not touched.
        ArtifactError: another process writes this output, or it cannot be written.
    """
    with alone(shards_folder(request.output)):
        work = begin_predictions(request, shards)
        if request.runtime != "torch":
            bundle.encoder = open_encoder(bundle, request.runtime)
        missing = work.missing()
        with progress(total=sum(map(work.size, missing)), desc="predict", unit="query") as bar:
            for number in missing:
                write_shard(work, number, bundle, bar.update)
        merge(work)
    return work.num_rows


def begin_predictions(request: FileRequest, shards: int | None = None) -> Work:
    """Copy the texts and write the plan; finished shards of the same prediction are kept.

    Raises:
        DataError: an unknown format, no such column, a text that cannot be read, or k below 1.
        ArtifactError: the bundle is damaged (all its hashes are checked here, and not again by workers).
    """
    source, target, bundle = (Path(os.path.abspath(p)) for p in (request.input, request.output, request.bundle))
    if target.suffix.lower() not in ENDINGS:
        raise DataError("an output of unknown format", where=str(target), expected=" ".join(ENDINGS))
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise DataError("input and output are the same file", where=str(source), fix="choose another output")
    if request.k < 1:
        raise DataError("k is out of range", got=request.k, expected="at least 1")
    read_manifest(bundle, KIND, VERSION)
    folder, sha256 = shards_folder(target), folder_sha256(bundle)
    num_rows = _copy_texts(source, request.column, folder / TEXTS, request.batch_size)
    count = max(1, -(-num_rows // QUERIES_A_SHARD)) if shards is None else shards
    settings = asdict(request) | {"bundle": str(bundle), "input": str(source), "output": str(target)}
    facts = {name: settings[name] for name in ("k", "runtime", "batch_size")}
    facts |= {"texts": file_sha256(folder / TEXTS), "bundle": sha256, "columns": PREDICTION_SCHEMA.names}
    bounds = cuts(num_rows, count, request.batch_size)
    return Work.begin(folder, facts, settings | {"bundle_sha256": sha256}, bounds)


def _copy_texts(source: Path, column: str | None, target: Path, batch_size: int) -> int:
    """Copy a file's texts into an Arrow file, a record batch for each batch that is encoded; returns their number."""
    num_rows, schema = 0, pa.schema([("text", pa.large_string())])
    texts, bar = read_texts(source, column), progress(desc="read", unit="text")
    with bar, write_file(target) as file, pa.ipc.new_file(file, schema) as writer:
        while batch := list(islice(texts, batch_size)):
            writer.write_batch(pa.record_batch([pa.array(batch, pa.large_string())], schema=schema))
            num_rows += len(batch)
            bar.update(len(batch))
    return num_rows


def run_shard(folder: str | os.PathLike[str], number: int, threads: int = 0) -> None:
    """Write one shard of a plan, unless it is there; in any process that sees the folder.

    Args:
        threads: cores that this process may use; 0: as it is.

    Raises:
        ArtifactError: no plan, or as `write_shard`.
    """
    work = Work.open(folder)
    if work.is_whole(number):
        return
    if threads:
        import torch

        torch.set_num_threads(threads)
        faiss_module().omp_set_num_threads(threads)
    write_shard(work, number)


def write_shard(
    work: Work, number: int, bundle: Bundle | None = None, show: Callable[[int], object] = lambda _count: None
) -> None:
    """Predict one shard's queries.

    Args:
        bundle: the plan's bundle, where it is loaded already.
        show: called with the number of queries of each batch.

    Raises:
        ArtifactError: the bundle is another one than when the plan was made, or the shard cannot be written.
    """
    given, (first, last) = work.settings, work.rows(number)
    if bundle is None:
        with _loading:
            bundle = _open_bundle(*(given[key] for key in ("bundle", "bundle_sha256", "device", "runtime")))
    options = pa.ipc.IpcWriteOptions(compression="zstd")  # a query's text is there k times
    with (
        work.write(number) as out,
        pa.memory_map(str(work.folder / TEXTS)) as source,
        pa.ipc.open_file(source) as reader,
        pa.OSFile(str(out.path / "predictions.arrow"), "wb") as file,
        pa.ipc.new_file(file, PREDICTION_SCHEMA, options=options) as writer,
    ):
        for row in range(first, last, given["batch_size"]):
            texts = reader.get_batch(row // given["batch_size"])["text"].to_pylist()
            table = bundle.predict_table(texts, given["k"], first_row=row, batch_size=len(texts))
            writer.write_table(table.combine_chunks())
            show(len(texts))


@functools.lru_cache(maxsize=1)
def _open_bundle(path: str, sha256: str, device: str, runtime: Runtime) -> Bundle:
    """The bundle of a plan: a worker loads it once, not once a shard."""
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


def merge(work: Work) -> Path:
    """Write the output from its shards, in the input's order and piece by piece, and remove them; returns its path.

    Raises:
        ArtifactError: a shard is missing or damaged, or the output cannot be written.
    """
    if missing := work.missing():
        raise ArtifactError(
            f"{len(missing)} of {work.num_shards} shards are missing or damaged", where=str(work.folder),
            got=", ".join(work.name(number) for number in missing[:3]),
            fix="run the same command again: it writes only those; workers elsewhere must share this folder",
        )  # fmt: skip
    target, shards = Path(work.settings["output"]), [work.path(number) for number in range(work.num_shards)]
    group = max(1, GROUP_ROWS // (work.settings["batch_size"] * work.settings["k"]))
    with write_file(target) as file:
        _write_tables(file, target.suffix.lower(), _tables(shards, group))
    work.remove()
    return target


def _tables(shards: Sequence[Path], group: int) -> Iterator[pa.Table]:
    """The predictions of so many batches at a time, wherever shards begin."""
    files = (pa.ipc.open_file(pa.memory_map(str(shard / "predictions.arrow"))) for shard in shards)
    batches = (file.get_batch(place) for file in files for place in range(file.num_record_batches))
    while some := list(islice(batches, group)):
        yield pa.Table.from_batches(some).combine_chunks()


def _write_tables(file: IO[bytes], kind: str, tables: Iterator[pa.Table]) -> None:
    """Tables of `PREDICTION_SCHEMA` as .parquet (a row group each), .csv, .tsv or .jsonl."""
    import pyarrow.csv as pv
    import pyarrow.parquet as pq

    if kind == ".jsonl":
        for table in tables:
            file.writelines(f"{json.dumps(row, ensure_ascii=False)}\n".encode() for row in table.to_pylist())
        return
    options = pv.WriteOptions(delimiter="\t" if kind == ".tsv" else ",")
    with (
        pq.ParquetWriter(file, PREDICTION_SCHEMA, compression="zstd")
        if kind == ".parquet"
        else pv.CSVWriter(file, PREDICTION_SCHEMA, write_options=options)
    ) as writer:
        for table in tables:
            writer.write_table(table)
