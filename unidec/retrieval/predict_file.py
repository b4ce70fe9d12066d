"""Files of queries to files of predictions, piece by piece: memory does not grow with the file."""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pyarrow as pa

from unidec.errors import DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA, text_column

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle

Texts = Iterator[list[str]]
CHUNK_ROWS = 4096
CSV_BLOCK_BYTES = 16 << 20  # also the longest row that can be read


def predict_file(
    bundle: Bundle,
    input_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    k: int = 5,
    *,
    column: str | None = None,
    batch_size: int = 256,
) -> int:
    """Predict every query of a file into another file.

    Args:
        bundle: a loaded bundle.
        input_path: .csv, .tsv, .jsonl (these also with .gz) or .parquet, with a text column.
        output_path: .parquet, .csv, .tsv or .jsonl, with columns query_row (from 0), query, rank (from 1), label,
            title, score; written beside and renamed when all is done.
        k: labels a query.
        column: name of the text column; default: `query`, else `text`.
        batch_size: queries encoded at once.

    Returns:
        number of queries.

    Raises:
        DataError: an unknown ending, no such column, a row that is not text, or a file that cannot be read; nothing
            is written.
    """
    source, target = Path(input_path), Path(output_path)
    read, write = _reader(source), _writer(target)
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise DataError("input and output are the same file", where=str(source), fix="choose another output")
    if k < 1:
        raise DataError("k is out of range", got=k, expected="at least 1")
    total = _num_rows(source)
    row = 0
    bar: Progress[None] = progress(total=total, desc="predict", unit="query")
    with bar, _beside(target) as beside, write(beside) as put:
        for texts in read(source, column):
            for start in range(0, len(texts), batch_size):
                part = texts[start : start + batch_size]
                put(bundle.predict_table(part, k, first_row=row, batch_size=batch_size))
                row += len(part)
                bar.update(len(part))
    return row


def _ending(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else "".join(suffixes[-1:])


def _reader(path: Path) -> Callable[[Path, str | None], Texts]:
    readers = {".csv": _read_csv, ".tsv": _read_csv, ".jsonl": _read_json_lines, ".parquet": _read_parquet}
    if _ending(path) not in readers:
        raise DataError("an input of unknown format", where=str(path), expected=" ".join(readers))
    if not path.is_file():
        raise DataError("no such file", where=str(path))
    return readers[_ending(path)]


def _num_rows(path: Path) -> int | None:
    import pyarrow.parquet as pq

    if _ending(path) != ".parquet":
        return None
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError("not a readable Parquet file", where=str(path), got=str(error)[:200]) from error


def _read_parquet(path: Path, column: str | None) -> Texts:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        name = text_column(file.schema_arrow.names, column, str(path))
        row = 0
        batches = file.iter_batches(batch_size=CHUNK_ROWS, columns=[name])
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise DataError("a damaged Parquet file", where=str(path), got=str(error)[:200]) from error
            yield _as_texts(batch.column(0), row, path, name)
            row += batch.num_rows


def _read_csv(path: Path, column: str | None) -> Texts:
    from pyarrow import csv as arrow_csv

    delimiter = "\t" if _ending(path) == ".tsv" else ","
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file, delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error, OSError, EOFError, zlib.error) as error:
        raise DataError("a header that cannot be read", where=f"{path}:1", got=str(error)[:200]) from error
    name = text_column(names, column, str(path))
    row = 0
    try:
        reader = arrow_csv.open_csv(
            pa.input_stream(str(path), compression="detect"),
            read_options=arrow_csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False),
            parse_options=arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            convert_options=arrow_csv.ConvertOptions(include_columns=[name], column_types={name: pa.string()}),
        )
        for batch in reader:
            for start in range(0, batch.num_rows, CHUNK_ROWS):
                part = batch.column(0).slice(start, CHUNK_ROWS)
                yield _as_texts(part, row, path, name)
                row += len(part)
    except (pa.ArrowException, OSError) as error:
        where = f"{path}, after row {row}"
        raise DataError("a file that cannot be read", where=where, got=str(error)[:300], expected="UTF-8") from error


def _read_json_lines(path: Path, column: str | None) -> Texts:
    opener: Any = gzip.open if path.suffix.lower() == ".gz" else open
    texts: list[str] = []
    with opener(path, "rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                raise DataError("not a line of JSON", where=f"{path}:{number}", got=str(error)[:200]) from error
            if not isinstance(row, dict):
                raise DataError("not an object", where=f"{path}:{number}", got=type(row).__name__)
            name = text_column(list(row), column, f"{path}:{number}")
            if not isinstance(row[name], str):
                raise DataError("not text", where=f"{path}:{number}, {name}", got=repr(row[name])[:80])
            texts.append(row[name])
            if len(texts) == CHUNK_ROWS:
                yield texts
                texts = []
    if texts:
        yield texts


def _lines(file: IO[bytes], path: Path) -> Iterator[bytes]:
    try:
        yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("a file that cannot be read", where=str(path), got=str(error)[:200]) from error


def _as_texts(array: pa.Array, first_row: int, path: Path, name: str) -> list[str]:
    string = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if not string and not pa.types.is_null(array.type):
        raise DataError("not a column of text", where=f"{path}, {name}", got=array.type, expected="string")
    if array.null_count:
        row = first_row + array.is_null().index(True).as_py()
        raise DataError("no text", where=f"{path}, row {row}, {name}", got="null", fix="give it text or leave it out")
    return array.to_pylist()


Put = Callable[[pa.Table], None]
Open = Callable[[IO[bytes]], contextlib.AbstractContextManager[Put]]


def _writer(path: Path) -> Open:
    writers: dict[str, Open] = {
        ".parquet": _write_parquet,
        ".csv": lambda file: _write_csv(file, ","),
        ".tsv": lambda file: _write_csv(file, "\t"),
        ".jsonl": _write_json_lines,
    }
    if path.suffix.lower() not in writers:
        raise DataError("an output of unknown format", where=str(path), expected=" ".join(writers))
    return writers[path.suffix.lower()]


@contextlib.contextmanager
def _write_parquet(file: IO[bytes]) -> Iterator[Put]:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, PREDICTION_SCHEMA, compression="zstd") as writer:
        waiting: list[pa.Table] = []

        def flush() -> None:
            if waiting:
                writer.write_table(pa.concat_tables(waiting))
                waiting.clear()

        def put(table: pa.Table) -> None:
            waiting.append(table)
            if sum(part.num_rows for part in waiting) >= 1 << 16:  # small row groups are slow to read
                flush()

        yield put
        flush()


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
def _beside(path: Path) -> Iterator[IO[bytes]]:
    """A file beside `path`, flushed and renamed to it at the end, removed after an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(beside, "wb")  # noqa: SIM115
    except OSError as error:
        raise DataError("the output cannot be written", where=str(path), got=error.strerror) from error
    try:
        with file:
            yield file
            if not file.closed:  # Arrow's writers may close it
                file.flush()
                os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        raise DataError("the output cannot be written", where=str(path), got=error.strerror or str(error)) from error
    finally:
        beside.unlink(missing_ok=True)
