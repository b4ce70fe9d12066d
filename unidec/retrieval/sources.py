"""Texts that shards are cut from, described by a few JSON values, so that any worker opens the same rows: a Parquet
file as it is, or the copy that `text_file.copy_texts` makes of any other format.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from unidec.data.storage import file_sha256, read_manifest, write_folder
from unidec.data.table_file import ending
from unidec.errors import ArtifactError, DataError
from unidec.retrieval.text_file import copy_texts, parquet_rows, read_parquet, read_texts

KIND, VERSION = "text-copy", 2


def prepare_texts(path: Path, column: str | None, folder: Path) -> tuple[dict[str, Any], dict[str, Any], int]:
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
        meta = read_manifest(copy, KIND, VERSION)["meta"]
    except ArtifactError:
        meta = {}
    if meta.get("facts") == facts:
        return int(meta["num_rows"])
    with write_folder(copy, KIND, VERSION, {"facts": facts}) as out:
        num_rows = out.meta["num_rows"] = copy_texts(source, column, out.path / "texts.parquet")
    return num_rows


def read_rows(settings: Mapping[str, Any], rows: tuple[int, int]) -> Iterator[list[str]]:
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
