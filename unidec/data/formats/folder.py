"""Finds the files of a layout in a folder, and refuses forms of a file that cannot be read.

These are dangling links, pipes and folders, tables in several part files or compressed with a
method other than gzip, and two files for one table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from unidec.data.raw_lines import check_file
from unidec.errors import DataError

_PACKED = (".bz2", ".xz", ".zst", ".zip", ".lz4", ".br", ".7z", ".Z")
_PART = r"[-_.]?(part)?[-_.]?\d+([-_.]of[-_.]\d+)?"


def present(root: Path, names: Sequence[str]) -> list[Path]:
    """All existing paths with these names in the folder, with or without .gz, of any file type."""
    paths = (root / f"{name}{suffix}" for name in names for suffix in ("", ".gz"))
    return [path for path in paths if os.path.lexists(path)]


def find(root: Path, names: Sequence[str]) -> Path | None:
    """The file with one of these names, with or without .gz; None if there is none.

    Raises:
        DataError: there are two files, or the file is in a form that cannot be read.
    """
    for folder in {(root / name).parent for name in names} - {root}:
        if os.path.lexists(folder) and not folder.is_dir():
            raise DataError(
                "a dangling link or a file instead of a folder",
                where=folder,
                fix="correct or remove it",
            )
    paths = present(root, names)
    for path in paths:
        if path.is_dir() and (parts := _files_in(path)):
            raise _in_parts(path, parts)
        check_file(path)
    if len(paths) > 1:
        raise DataError(
            "two files for the same table",
            where=root,
            got=", ".join(path.relative_to(root).as_posix() for path in paths),
            fix="keep one of them",
        )
    if not paths:
        check_other_forms(root, names)
    return paths[0] if paths else None


def check_other_forms(root: Path, names: Sequence[str]) -> None:
    """Raise a DataError if the folder has one of these files in parts, or compressed with a method
    other than gzip.
    """
    for name in names:
        path = root / name
        packed = [path.with_name(path.name + suffix) for suffix in _PACKED]
        for other in filter(os.path.lexists, packed):
            raise DataError(
                "packed with a method that is not supported",
                where=other,
                expected=".gz",
                fix=f"unpack it, or pack it with gzip: {path.name}.gz",
            )
        parts = list(_parts(path))
        if parts:
            raise _in_parts(path, parts)


def _parts(path: Path) -> Iterator[Path]:
    """Part files of a file that does not exist: in the folder `queries`, or beside it as
    `queries-00000-of-00002`.
    """
    stem = re.escape(path.stem)
    suffix = re.escape(path.suffix).replace("jsonl", "jsonl?")
    inside = re.compile(rf".*{suffix}(\..*)?")
    beside = re.compile(rf"{stem}{_PART}{suffix}(\.gz)?")
    for folder, pattern in ((path.with_suffix(""), inside), (path.parent, beside)):
        if folder.is_dir():
            yield from (file for file in _files_in(folder) if pattern.fullmatch(file.name))


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder, sorted, without those whose names begin with "." or "_"."""
    return sorted(
        file for file in folder.iterdir() if file.is_file() and not file.name.startswith((".", "_"))
    )


def _in_parts(path: Path, parts: list[Path]) -> DataError:
    return DataError(
        "a table in several part files",
        where=parts[0].parent,
        got=f"{parts[0].name} and others",
        expected=f"one file {path.name}",
        fix=f"join them{_JOIN.get(path.suffix, '')}",
    )


_HEADERS = ", with one header (unpack .gz first): awk 'FNR > 1 || NR == 1' PART... > FILE"
_JOIN = {
    ".csv": _HEADERS,
    ".tsv": _HEADERS,
    ".jsonl": ": gunzip -cf PART... > FILE",
    ".parquet": ": pyarrow.parquet.write_table(pyarrow.dataset.dataset(PARTS).to_table(), FILE)",
}
