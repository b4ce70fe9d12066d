"""Texts that shards are cut from, and models that workers keep open between shards.

A source is described by a few JSON values, so that a worker that is told them opens the same rows: a Parquet file as it
is, or the copy that `text_file.copy_texts` makes of any other format.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from unidec.data.storage import file_sha256, read_manifest, write_folder
from unidec.data.table_file import ending
from unidec.errors import ArtifactError, DataError
from unidec.retrieval.text_file import copy_texts, parquet_rows, read_copy, read_parquet, read_texts

KIND, VERSION = "text-copy", 1
T = TypeVar("T")


def prepare_texts(path: Path, column: str | None, folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Makes the rows of a text file addressable: its hash is taken, and what is no Parquet is copied into `folder`.

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
        num_rows = parquet_rows(source)
        return {"texts": str(source), "size": source.stat().st_size, "column": column}, facts, num_rows
    copy = folder / "texts"
    try:
        meta = read_manifest(copy, KIND, VERSION)["meta"]
    except ArtifactError:
        meta = {}
    if meta.get("facts") != facts:
        with write_folder(copy, KIND, VERSION, {"facts": facts}) as out:
            out.meta["num_rows"] = copy_texts(source, column, out.path / "texts.arrow")
        meta = read_manifest(copy, KIND, VERSION, verify=False)["meta"]
    file = copy / "texts.arrow"
    return {"texts": str(file), "size": file.stat().st_size, "column": column}, facts, int(meta["num_rows"])


def read_rows(settings: Mapping[str, Any], rows: tuple[int, int]) -> Iterator[list[str]]:
    """Texts of rows[0] to rows[1] - 1, some at a time.

    Raises:
        DataError: the file is not the one that was prepared, or cannot be read.
        ArtifactError: the copy cannot be read.
    """
    path = Path(settings["texts"])
    size = path.stat().st_size if path.is_file() else None
    if size != settings["size"]:
        fix = "run the same command again: shards of another input are made anew; all machines must see the same folder"
        raise DataError(
            "the input changed or is gone", where=str(path), got=size, expected=f"{settings['size']} bytes", fix=fix
        )
    if ending(path) == ".parquet":
        return read_parquet(path, settings["column"], rows)
    return read_copy(path, rows)


class Opened:
    """The last thing that was opened, kept: a worker loads a bundle once, not once a shard. Safe between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[Any, ...] | None = None
        self._value: Any = None

    def get(self, key: tuple[Any, ...], load: Callable[[], T]) -> T:
        """What `load` gives, loaded when `key` is another than last time."""
        with self._lock:
            if self._key != key:
                self._key, self._value = None, None  # let go of the old one first
                self._value = load()
                self._key = key
            return self._value
