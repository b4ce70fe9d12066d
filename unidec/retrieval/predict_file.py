"""Files of queries to files of predictions, piece by piece: memory does not grow with the file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pyarrow as pa

from unidec.data.table_file import ending
from unidec.errors import DataError
from unidec.progress import Progress, progress
from unidec.retrieval.bundle import PREDICTION_SCHEMA
from unidec.retrieval.text_file import in_batches, parquet_rows, read_texts

if TYPE_CHECKING:
    from unidec.retrieval.bundle import Bundle

GROUP_ROWS = 1 << 16  # of a Parquet file's row groups


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
    texts, write = read_texts(source, column), writer_of(target)
    check_request(source, target, k)
    total = parquet_rows(source) if ending(source) == ".parquet" else None
    row = 0
    bar: Progress[None] = progress(total=total, desc="predict", unit="query")
    with bar, beside(target) as file, write(file) as put:
        for part in in_batches(texts, batch_size):
            put(bundle.predict_table(part, k, first_row=row, batch_size=batch_size))
            row += len(part)
            bar.update(len(part))
    return row


def check_request(source: Path, target: Path, k: int) -> None:
    """Refuses an output that is the input, and k below 1.

    Raises:
        DataError: saying which.
    """
    if target.exists() and source.exists() and os.path.samefile(source, target):
        raise DataError("input and output are the same file", where=str(source), fix="choose another output")
    if k < 1:
        raise DataError("k is out of range", got=k, expected="at least 1")


Put = Callable[[pa.Table], None]
Open = Callable[[IO[bytes]], contextlib.AbstractContextManager[Put]]


def writer_of(path: Path) -> Open:
    """What writes tables of `PREDICTION_SCHEMA` in the format that a name says; the same rows give the same bytes.

    Raises:
        DataError: an unknown ending.
    """
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
        num_waiting = 0

        def put(table: pa.Table) -> None:
            """Row groups of one size, each of one piece: the bytes do not tell how the rows came."""
            nonlocal waiting, num_waiting
            waiting.append(table)
            num_waiting += table.num_rows
            while num_waiting >= GROUP_ROWS:  # small row groups are slow to read
                joined = pa.concat_tables(waiting)
                writer.write_table(joined.slice(0, GROUP_ROWS).combine_chunks())
                waiting, num_waiting = [joined.slice(GROUP_ROWS)], num_waiting - GROUP_ROWS

        yield put
        if num_waiting:
            writer.write_table(pa.concat_tables(waiting).combine_chunks())


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
    """A file beside `path`, flushed and renamed to it at the end, removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(temporary, "wb")  # noqa: SIM115
    except OSError as error:
        raise DataError("the output cannot be written", where=str(path), got=error.strerror) from error
    try:
        with file:
            yield file
            if not file.closed:  # Arrow's writers may close it
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise DataError("the output cannot be written", where=str(path), got=error.strerror or str(error)) from error
    finally:
        temporary.unlink(missing_ok=True)
