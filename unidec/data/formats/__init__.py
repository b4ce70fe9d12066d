"""Reads raw data in any supported layout (docs/data.md describes them)."""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.config import Data, RawBounds
from unidec.data.formats import folder, tables, xmc
from unidec.data.formats.files import Lines, Source, rows_of
from unidec.data.raw import RawData, hold_out, make_slice
from unidec.data.raw_lines import DEFAULT_BOUNDS
from unidec.data.storage import file_sha256
from unidec.errors import DataError

__all__ = [
    "LAYOUTS",
    "RawData",
    "check_folder",
    "find_rows",
    "from_memory",
    "make_slice",
    "read_raw",
    "read_section",
]

LAYOUTS = xmc.LAYOUTS | tables.LAYOUTS


def read_raw(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    test_share: float = 0.2,
    split_seed: int = 0,
    bounds: RawBounds = DEFAULT_BOUNDS,
) -> RawData:
    """Read a folder of raw files.

    Args:
        format: a name in LAYOUTS, or "auto" to recognise the layout by the files in the folder.
        test_share, split_seed: share of the queries held out as test split if the data has none,
            and its seed (`hold_out`).
        bounds: limits for rows, texts and compressed files.

    Raises:
        DataError: the layout is unknown; files are missing, damaged or exceed a limit; or pairs,
            uids or texts are invalid (see docs/data.md). All kinds of errors are reported together,
            with at most 20 samples as `file:line`.
    """
    source, raw = _read(path, format, bounds)
    if "test" not in raw.queries:
        is_test = hold_out(raw.queries["train"], raw.filter_pairs["train"], test_share, split_seed)
        raw = raw.take({"test": np.flatnonzero(is_test), "train": np.flatnonzero(~is_test)})
    files = {name: file_sha256(file) for name, file in sorted(source.read.items())}
    return replace(raw, name=source.root.resolve().name, files=files)


def read_section(data: Data, bounds: RawBounds) -> RawData:
    """`read_raw` with the settings of section `data`."""
    return read_raw(
        data.path,
        data.format,
        test_share=data.test_share,
        split_seed=data.split_seed,
        bounds=bounds,
    )


def from_memory(
    queries: Any, labels: Any, pairs: Any, bounds: RawBounds = DEFAULT_BOUNDS
) -> RawData:
    """A data set given in Python, after the checks of raw files; arguments as for
    `memory.read_given`.

    Raises:
        DataError: as `read_raw`, with positions in place of lines; or no training query has a
        label.
    """
    from unidec.data.formats import memory  # imports pandas

    source = memory.Given(bounds)
    raw = memory.read_given(source, queries, labels, pairs)
    _check(source, raw)
    source.stop()
    if not raw.relevance["train"].nnz:
        raise DataError(
            "no training query has a label", where="pairs", expected="a pair of a training query"
        )
    return raw


def find_rows(
    data: Data,
    bounds: RawBounds,
    files: Mapping[str, str],
    queries: Sequence[str],
    labels: Sequence[str],
) -> tuple[dict[str, str], dict[str, str]]:
    """`file:line` by uid of these queries and of these labels in raw files that were read before.

    Args:
        files: sha256 of the raw files by relative path (`RawData.files`); if one has changed, both
        results are empty.
    """
    root = Path(data.path)
    if not all(
        (root / name).is_file() and file_sha256(root / name) == sha256
        for name, sha256 in files.items()
    ):
        return {}, {}
    source, raw = _read(root, data.format, bounds)
    query_places: dict[str, str] = {}
    for split, table in raw.queries.items():
        query_places |= _places(table, queries, *source.queries_at[split])
    return query_places, _places(raw.labels, labels, *source.labels_at)


def _places(table: pa.Table, uids: Sequence[str], file: str, lines: Lines) -> dict[str, str]:
    rows = rows_of(pa.array(uids, pa.large_string()), table["uid"])
    known = [(uid, row) for uid, row in zip(uids, rows.tolist(), strict=True) if row >= 0]
    at = lines(np.asarray([row for _, row in known], dtype=np.int64))
    return {uid: f"{file}:{line}" for (uid, _), line in zip(known, at.tolist(), strict=True)}


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of `data.path`. Raises DataError: there is no such folder, or this user cannot
    read it.
    """
    root = Path(path)
    fix = "set data.path to the folder with the raw files"
    if root.is_dir() and os.access(root, os.R_OK | os.X_OK):
        return root
    if root.is_dir():
        what = "the folder cannot be read"
        got = f"user id {os.getuid()}"
        fix = "run as its owner, or give it to this user (chown -R)"
    elif root.exists():
        what = "not a folder"
        got = None
    else:
        what = "no such folder"
        got = None
        if Path(f"{root}.dvc").is_file():
            fix = f"dvc pull {root}.dvc"
        elif siblings := difflib.get_close_matches(root.name, _folders(root.parent), n=1):
            fix += f"; nearest: {root.parent / siblings[0]}"
    raise DataError(what, where=str(root), got=got, fix=fix)


def _folders(parent: Path) -> list[str]:
    try:
        return [path.name for path in parent.iterdir() if path.is_dir()]
    except OSError:
        return []


def _read(path: str | os.PathLike[str], format: str, bounds: RawBounds) -> tuple[Source, RawData]:
    """Read and check all files of a folder."""
    root = check_folder(path)
    layout = _detect(root) if format == "auto" else format
    if layout not in LAYOUTS:
        fix = "a folder of .csv, .tsv, .jsonl or .parquet tables has the layout tables"
        raise DataError(
            "unknown layout",
            where=str(root),
            got=layout,
            expected=", ".join(["auto", *LAYOUTS]),
            fix=fix,
        )
    source = Source(root, bounds)
    raw = LAYOUTS[layout].read(source)
    _check(source, raw)
    source.stop()
    return source, replace(raw, format=layout)


def _detect(root: Path) -> str:
    try:
        files = sorted(path.name for path in root.iterdir())
    except OSError as error:
        fix = "grant the permission to read it"
        raise DataError(
            "the folder cannot be read", where=str(root), got=error.strerror, fix=fix
        ) from error
    fitting = [
        name
        for name, layout in LAYOUTS.items()
        if all(folder.present(root, part) for part in layout.needs)
    ]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError(
            "files of more than one layout",
            where=str(root),
            got=", ".join(fitting),
            fix="set data.format",
        )
    for part in itertools.chain.from_iterable(layout.needs for layout in LAYOUTS.values()):
        folder.find(root, part)  # raises an error if the file is there in another form
    names = ", ".join(files[:12]) or "an empty folder"
    layouts = "".join(f"\n    {name}: {layout.expected}" for name, layout in LAYOUTS.items())
    raise DataError(
        "no layout fits the files of this folder",
        where=str(root),
        got=names,
        expected=f"the files (also compressed, with .gz) of one of these layouts:{layouts}",
        fix="see docs/data.md for an example of each layout",
    )


def _check(source: Source, raw: RawData) -> None:
    """Check any layout: there are labels and training queries, no text is too long, and no query is
    in two splits.
    """
    limit = source.bounds.max_text_chars
    places = [
        (raw.labels, source.labels_at),
        *((raw.queries[split], source.queries_at[split]) for split in raw.queries),
    ]
    for (table, at), column in itertools.product(places, ("title", "content")):
        lengths = pc.utf8_length(table[column]).to_numpy()
        kind = f"text of more than raw.max_text_chars = {limit:,} characters"
        source.note_rows(kind, at, np.flatnonzero(lengths > limit), f"{column}: {{}}", lengths)
    if not raw.num_labels:
        source.note("no labels", "labels", 0)
    if not raw.queries["train"].num_rows:
        source.note("no training queries", "train", 0)
    for (other_split, other), (split, table) in itertools.combinations(raw.queries.items(), 2):
        shared = np.flatnonzero(
            pc.is_in(table["uid"], value_set=other["uid"].combine_chunks()).to_numpy()
        )
        kind = f"query of another split again in {split} (leak)"
        source.note_rows(
            kind, source.queries_at[split], shared, f"uid {{}} is in {other_split}", table["uid"]
        )
