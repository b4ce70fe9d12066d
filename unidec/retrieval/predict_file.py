"""Files of queries to files of predictions, or to vectors, in shards: memory does not grow with the file, and a killed
run resumes. A runner maps `run_shard` over processes or machines; `predict_file` does all in one process.

Shards begin where batches begin, so the output has the same bytes however it is cut. (Scores can differ in their last
bits where processes use another number of threads, or other processors.)

Legend: B queries of a batch, N of the file, D width of a head.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np
import pyarrow as pa

from unidec.data.shards import Work, alone, shards_folder
from unidec.data.storage import file_sha256, folder_sha256, load_array, read_manifest, write_folder
from unidec.data.table_file import ending
from unidec.errors import ArtifactError, DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA, Bundle
from unidec.retrieval.bundle_folder import KIND, VERSION
from unidec.retrieval.query_encoder import Runtime, open_encoder
from unidec.retrieval.text_file import copy_texts, in_batches, parquet_rows, read_parquet, read_texts

QUERIES_A_SHARD = 1 << 16  # seconds with a bag of tokens, a few minutes with a transformer on one core
VECTORS = ".vectors"  # ending of a folder of vectors
GROUP_ROWS = 1 << 16  # of a Parquet file's row groups
_loading = threading.Lock()  # threads of one process load a bundle once


@dataclass(frozen=True)
class FileRequest:
    """Work on a file of queries.

    Attributes:
        bundle: a bundle's folder.
        input: .csv, .tsv, .jsonl (these also with .gz) or .parquet, with a text column.
        output: .parquet, .csv, .tsv or .jsonl, with columns query_row (from 0), query, rank (from 1), label, title,
            score, in the input's order; .vectors: a folder with `de.npy` and `clf.npy` [N, D] float32, those that the
            model has, as `Bundle.encode` gives them.
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
                write_shard(work, number, bundle, bar.update)
        merge(work)
    return work.num_rows


def begin_predictions(request: FileRequest, shards: int | None = None) -> Work:
    """The plan of a prediction; finished shards of the same prediction are kept.

    Raises:
        DataError: an unknown format or runtime, no such column, a text that cannot be read, no query to make a vector
            of, or k below 1.
        ArtifactError: the bundle is damaged (all its hashes are checked here, and not again by workers).
    """
    source, target, bundle = (Path(os.path.abspath(p)) for p in (request.input, request.output, request.bundle))
    kind = "vectors" if target.suffix.lower() == VECTORS else "predictions"
    if kind == "predictions":
        _writer_of(target)
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise DataError("input and output are the same file", where=str(source), fix="choose another output")
    if request.k < 1:
        raise DataError("k is out of range", got=request.k, expected="at least 1")
    if request.runtime not in get_args(Runtime):
        expected = " ".join(get_args(Runtime))
        raise DataError("an unknown runtime", where="runtime", got=request.runtime, expected=expected)
    read_manifest(bundle, KIND, VERSION)
    folder = shards_folder(target)
    texts, facts, num_rows = _prepare_texts(source, request.column, folder)
    if kind == "vectors" and not num_rows:
        raise DataError("a file without queries", where=str(source))
    sha256 = folder_sha256(bundle)
    facts |= {"bundle": sha256, "k": request.k, "batch_size": request.batch_size, "runtime": request.runtime}
    absolute = replace(request, bundle=str(bundle), input=str(source), output=str(target))
    settings = asdict(absolute) | texts | {"bundle_sha256": sha256}
    return Work.begin(
        folder, kind, facts, settings, num_rows,
        shards=shards, rows_a_shard=QUERIES_A_SHARD, multiple=request.batch_size,
    )  # fmt: skip


def run_shard(folder: str | os.PathLike[str], number: int, threads: int = 0) -> None:
    """Write one shard of a plan, unless it is there; in any process that sees the folder.

    Args:
        number: from 0.
        threads: cores that this process may use; 0: as it is.

    Raises:
        ArtifactError: no plan, or as `write_shard`.
        DataError: as `write_shard`.
    """
    work = Work.open(folder)
    if work.is_whole(number):
        return
    if threads:
        import faiss
        import torch

        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
    write_shard(work, number)


def write_shard(
    work: Work, number: int, bundle: Bundle | None = None, show: Callable[[int], object] = lambda _count: None
) -> None:
    """Predict, or encode, one shard's queries.

    Args:
        bundle: the plan's bundle, where it is loaded already.
        show: called with the number of queries of each batch.

    Raises:
        DataError: the input changed, or has a row that is not text.
        ArtifactError: the bundle is another one than when the plan was made, or the shard cannot be written.
    """
    given = work.settings
    bundle = _opened_bundle(given) if bundle is None else bundle

    def batches() -> Iterator[list[str]]:
        for texts in in_batches(_read_rows(given, work.rows(number)), given["batch_size"]):
            yield texts
            show(len(texts))

    with work.write(number) as out:
        if work.kind == "vectors":
            _write_vectors(bundle, batches(), out.path)
        else:
            _write_predictions(bundle, batches(), out.path, given["k"], work.rows(number)[0])


def _write_predictions(bundle: Bundle, batches: Iterator[list[str]], folder: Path, k: int, row: int) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")  # a query's text is there k times
    with (
        pa.OSFile(str(folder / "predictions.arrow"), "wb") as file,
        pa.ipc.new_file(file, PREDICTION_SCHEMA, options=options) as writer,
    ):
        for texts in batches:
            writer.write_table(bundle.predict_table(texts, k, first_row=row, batch_size=len(texts)).combine_chunks())
            row += len(texts)


def _write_vectors(bundle: Bundle, batches: Iterator[list[str]], folder: Path) -> None:
    found = [(encoded.de_BD, encoded.clf_BD) for encoded in map(bundle.encode, batches)]
    for name, parts in zip(("de.npy", "clf.npy"), zip(*found, strict=True), strict=True):
        if parts[0] is not None:
            np.save(folder / name, np.concatenate(parts))


def merge(work: Work) -> Path:
    """Write the output from its shards, in the input's order and piece by piece, and remove them; returns its path.

    Raises:
        ArtifactError: a shard is missing or damaged, or the folder cannot be written.
        DataError: the file cannot be written.
    """
    target, shards = Path(work.settings["output"]), work.whole_shards()
    (_merge_vectors if work.kind == "vectors" else _merge_predictions)(work, shards, target)
    work.remove()
    return target


def _merge_predictions(work: Work, shards: Sequence[Path], target: Path) -> None:
    write = _writer_of(target)
    bar: Progress[None] = progress(total=work.num_rows, desc="merge", unit="query")
    with bar, beside(target) as file, write(file) as put:
        for number, shard in enumerate(shards):
            with pa.memory_map(str(shard / "predictions.arrow")) as source, pa.ipc.open_file(source) as reader:
                for batch in range(reader.num_record_batches):
                    put(pa.Table.from_batches([reader.get_batch(batch)]))
            bar.update(work.size(number))


def _merge_vectors(work: Work, shards: Sequence[Path], target: Path) -> None:
    """The bytes that `numpy.save` writes of the whole arrays."""
    names = sorted(path.name for path in shards[0].glob("*.npy"))
    meta = {"bundle_sha256": work.settings["bundle_sha256"], "num_rows": work.num_rows}
    size = sum((shard / name).stat().st_size for shard in shards for name in names)
    with write_folder(target, "vectors", 1, meta, num_bytes=size) as out:
        for name in names:
            arrays = [load_array(shard / name, np.float32, ndim=2) for shard in shards]
            header = {"descr": "<f4", "fortran_order": False, "shape": (work.num_rows, arrays[0].shape[1])}
            with open(out.path / name, "wb") as file:
                np.lib.format.write_array_header_1_0(file, header)
                for array in arrays:
                    array.tofile(file)


def _opened_bundle(settings: Mapping[str, Any]) -> Bundle:
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


# -- input: a Parquet file as it is, or a copy of the texts of any other format, from which any rows can be read ------


def _prepare_texts(path: Path, column: str | None, folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Make the rows of a text file addressable: hash it, and copy what is not Parquet into `folder`.

    Returns:
        (settings for `read_rows`, facts that decide the texts, number of rows).

    Raises:
        DataError: as `text_file.read_texts`, and whatever is wrong with a text of a file that is copied.
        ArtifactError: the copy cannot be written.
    """
    source = Path(os.path.abspath(path))
    next(read_texts(source, column), None)  # a wrong name or column shows before the file is hashed
    facts = {"input": file_sha256(source), "column": column, "ending": ending(source)}
    if ending(source) == ".parquet":
        file, num_rows = source, parquet_rows(source)
    else:
        column, num_rows = "text", _copied(source, column, folder / "texts", facts)
        file = folder / "texts" / "texts.parquet"
    return {"texts": str(file), "size": file.stat().st_size, "column": column}, facts, num_rows


def _copied(source: Path, column: str | None, copy: Path, facts: Mapping[str, Any]) -> int:
    try:
        meta = read_manifest(copy, "text-copy", 2)["meta"]
    except ArtifactError:
        meta = {}
    if meta.get("facts") == facts:
        return int(meta["num_rows"])
    with write_folder(copy, "text-copy", 2, {"facts": facts}) as out:
        num_rows = out.meta["num_rows"] = copy_texts(source, column, out.path / "texts.parquet")
    return num_rows


def _read_rows(settings: Mapping[str, Any], rows: tuple[int, int]) -> Iterator[list[str]]:
    """Texts of rows[0] to rows[1] - 1, some at a time.

    Raises:
        DataError: the file is not the one that was prepared, or cannot be read.
    """
    path = Path(settings["texts"])
    size = path.stat().st_size if path.is_file() else None
    if size != settings["size"]:
        raise DataError(
            "the input changed or is missing", where=str(path), got=size, expected=f"{settings['size']} bytes",
            fix="run the same command again: it begins again with the new input; all machines must see the same folder",
        )  # fmt: skip
    return read_parquet(path, settings["column"], rows)


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
        raise DataError("an output of unknown format", where=str(path), expected=" ".join([*writers, VECTORS]))
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
