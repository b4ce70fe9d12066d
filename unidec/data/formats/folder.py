"""Finds the files of a layout in a folder, and refuses forms of a file that cannot be read.

These are dangling links, pipes and folders without data, files compressed with a method other than
gzip, and two files for one table.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from unidec.data.raw_lines import check_file
from unidec.errors import DataError

_PACKED = (".bz2", ".xz", ".zst", ".zip", ".lz4", ".br", ".7z", ".Z")
_PART = r"[-_.]?(part)?[-_.]?\d+([-_.]of[-_.]\d+)?"
_NUMBER_OF_PARTS = re.compile(r"\d+[-_.]of[-_.](\d+)\.")


def find(root: Path, names: Sequence[str]) -> list[Path]:
    """The file with one of these names, with or without .gz, or its part files in order; [] if
    there is none.

    Raises:
        DataError: there are two files, or a file is in a form that cannot be read.
    """
    for folder in {(root / name).parent for name in names} - {root}:
        if os.path.lexists(folder) and not folder.is_dir():
            raise DataError(
                "a dangling link or a file instead of a folder",
                where=folder,
                fix="correct or remove it",
            )
    found = present(root, names)
    if len(found) > 1:
        raise DataError(
            "two files for the same table",
            where=root,
            got=", ".join(files[0].relative_to(root).as_posix() for files in found),
            fix="keep one of them",
        )
    files = found[0] if found else []
    packed = (root / f"{name}{suffix}" for name in names for suffix in _PACKED)
    for path in files or packed:
        if path.suffix in _PACKED and os.path.lexists(path):
            raise DataError(
                "packed with a method that is not supported",
                where=path,
                expected=".gz",
                fix=f"unpack it, or pack it with gzip: {path.stem}.gz",
            )
    for file in files:
        check_file(file)
    _check_complete(files)
    return files


def _check_complete(files: Sequence[Path]) -> None:
    """Raise a DataError if a program is still writing these parts, or not all are there."""
    for file in files:
        number = _NUMBER_OF_PARTS.search(file.name)
        if number and int(number[1]) != len(files):
            raise DataError(
                "parts of a table are missing, or there are those of two exports",
                where=file.parent,
                got=f"{len(files):,} parts",
                expected=f"{int(number[1]):,}, as the name {file.name} says",
                fix="copy them again",
            )
        if (file.parent / "_temporary").is_dir():
            raise DataError(
                "a program is writing the parts of this table, or it was stopped",
                where=file.parent,
                got="_temporary",
                fix="wait until it has finished, or run it again",
            )


def present(root: Path, names: Sequence[str]) -> list[list[Path]]:
    """Files with these names in the folder, with or without .gz, of any file type; and the lists of
    their part files.
    """
    paths = [root / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    found = [_files_in(path) or [path] for path in paths if os.path.lexists(path)]
    found += [_parts(root / name) for name in names]
    return [files for files in found if files]


def _parts(path: Path) -> list[Path]:
    """Part files of a file: in the folder `queries`, or beside it as `queries-00000-of-00002`."""
    suffix = re.escape(path.suffix).replace("jsonl", "jsonl?")
    inside = _files_in(path.with_suffix(""), rf".*{suffix}(\..*)?")
    return inside or _files_in(path.parent, rf"{re.escape(path.stem)}{_PART}{suffix}(\.gz)?")


def parts_in(folder: Path) -> list[Path]:
    """The part files of one table in its folder, in order; [] if it is no folder. Raises DataError:
    they are not complete.
    """
    files = _files_in(folder)
    _check_complete(files)
    return files


def _files_in(folder: Path, pattern: str = ".*") -> list[Path]:
    """The files of a folder with such names, sorted, without those whose names begin with "." or
    "_"; [] if it is no folder.
    """
    if not folder.is_dir():
        return []
    files = (file for file in folder.iterdir() if file.is_file())
    return sorted(file for file in files if re.fullmatch(rf"(?![._]){pattern}", file.name))
