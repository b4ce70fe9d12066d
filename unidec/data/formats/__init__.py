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
from unidec.data.formats.files import Places, Source
from unidec.data.raw import RawData, hold_out
from unidec.data.raw_lines import DEFAULT_BOUNDS
from unidec.data.storage import file_sha256
from unidec.errors import DataError

LAYOUTS = xmc.LAYOUTS | tables.LAYOUTS


def read_raw(
    path: str | os.PathLike[str],
    format: str = "auto",
    *,
    test_share: float = 0.2,
    split_seed: int = 0,
    bounds: RawBounds = DEFAULT_BOUNDS,
    scratch: Path | None = None,
) -> RawData:
    """Read a folder of raw files.

    Large tables and pairs are stored in unnamed temporary files, which are memory-mapped.

    Args:
        format: a name in LAYOUTS, or "auto" to recognise the layout by the files in the folder.
        test_share, split_seed: share of the queries held out as test split if the data has none,
            and its seed (`hold_out`).
        bounds: limits for rows, texts and compressed files.
        scratch: folder for temporary files; None: the system's.

    Raises:
        OSError: there is no space for temporary files.
        DataError: the layout is unknown; files are missing, damaged or exceed a limit; or pairs,
            uids or texts are invalid (see docs/data.md). All kinds of errors are reported together,
            with at most 20 samples as `file:line`.
    """
    source, raw = _read(path, format, bounds, scratch)
    if "test" not in raw.queries:
        train = raw.queries["train"]
        is_test = hold_out(train, raw.filter_pairs["train"], test_share, split_seed, scratch)
        rows = {"test": np.flatnonzero(is_test), "train": np.flatnonzero(~is_test)}
        raw = raw.take(rows, scratch)
    files = {name: file_sha256(file) for name, file in sorted(source.read.items())}
    return replace(raw, name=source.root.resolve().name, files=files)


def read_section(data: Data, bounds: RawBounds, scratch: Path | None = None) -> RawData:
    """`read_raw` with the settings of section `data`."""
    return read_raw(
        data.path,
        data.format,
        test_share=data.test_share,
        split_seed=data.split_seed,
        bounds=bounds,
        scratch=scratch,
    )


def from_memory(
    queries: Any, labels: Any, pairs: Any, bounds: RawBounds = DEFAULT_BOUNDS
) -> RawData:
    """A data set from Python objects, checked like raw files; arguments as for
    `memory.read_given`.

    Raises:
        DataError: as for `read_raw`, with positions instead of lines; or no training query has a
        label.
    """
    from unidec.data.formats import memory  # imports pandas

    source = memory.Given(Path("memory"), bounds)
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
    """`file:line` of these queries and of these labels, by uid, in raw files read earlier.

    Args:
        files: sha256 of the raw files by relative path (`RawData.files`); if one has changed, both
        results are empty.
    """
    root = Path(data.path)
    for name, sha256 in files.items():
        path = root / name
        if not path.is_file() or file_sha256(path) != sha256:
            return {}, {}
    source, raw = _read(root, data.format, bounds)
    query_places: dict[str, str] = {}
    for split, table in raw.queries.items():
        query_places |= _places(source, table, queries, source.queries_at[split])
    return query_places, _places(source, raw.labels, labels, source.labels_at)


def _places(source: Source, table: pa.Table, uids: Sequence[str], at: Places) -> dict[str, str]:
    """`file:line` of the uids that are in a table."""
    given = pa.chunked_array([uids], pa.large_string())
    rows = source.rows_of(given, table["uid"])
    known = np.flatnonzero(rows >= 0)
    return dict(zip(given.take(known).to_pylist(), at(rows[known]), strict=True))


def check_folder(path: str | os.PathLike[str]) -> Path:
    """The folder of `data.path`. Raises DataError: there is no such folder, or this user cannot
    read it.
    """
    root = Path(path)
    what = "no such folder"
    fix = "set data.path to the folder with the raw files"
    if root.is_dir():
        if os.access(root, os.R_OK | os.X_OK):
            return root
        what = "the folder cannot be read"
        fix = "run as its owner, or give it to this user (chown -R)"
    elif root.exists():
        what = "not a folder"
    elif Path(f"{root}.dvc").is_file():
        fix = f"dvc pull {root}.dvc"
    else:
        siblings = [path.name for path in root.parent.glob("*/")]
        if nearest := difflib.get_close_matches(root.name, siblings, n=1):
            fix += f"; nearest: {root.parent / nearest[0]}"
    raise DataError(what, where=root, fix=fix)


def _read(
    path: str | os.PathLike[str], format: str, bounds: RawBounds, scratch: Path | None = None
) -> tuple[Source, RawData]:
    """Read and check all files of a folder."""
    root = check_folder(path)
    layout = _detect(root) if format == "auto" else format
    if layout not in LAYOUTS:
        raise DataError(
            "unknown layout",
            where=root,
            got=layout,
            expected=", ".join(["auto", *LAYOUTS]),
            fix="a folder of .csv, .tsv, .jsonl or .parquet tables has the layout tables",
        )
    source = Source(root, bounds, scratch)
    raw = LAYOUTS[layout].read(source)
    _check(source, raw)
    source.stop()
    return source, replace(raw, format=layout)


def _detect(root: Path) -> str:
    """The layout of the files in a folder."""
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
            where=root,
            got=", ".join(fitting),
            fix="set data.format",
        )
    for layout in LAYOUTS.values():
        for part in layout.needs:
            folder.find(root, part)  # raises an error if the file exists in another form
    files = sorted(os.listdir(root))
    layouts = "".join(f"\n    {name}: {layout.expected}" for name, layout in LAYOUTS.items())
    raise DataError(
        "no layout fits the files of this folder",
        where=root,
        got=", ".join(files[:12]) or "an empty folder",
        expected=f"the files (also compressed, with .gz) of one of these layouts:{layouts}",
        fix="docs/data.md has examples of each layout, and of a file with a column of labels",
    )


def _check(source: Source, raw: RawData) -> None:
    """Checks for every layout: there are labels and training queries, no text is too long, and no
    query is in two splits.
    """
    _check_lengths(source, raw.labels, source.labels_at)
    for split, table in raw.queries.items():
        _check_lengths(source, table, source.queries_at[split])
    if not raw.num_labels:
        source.note("no labels", "labels")
    if not raw.queries["train"].num_rows:
        source.note("no training queries", "train")
        source.advise("name the split `train` for the queries to learn from, or no splits at all")
    for (other_split, other), (split, table) in itertools.combinations(raw.queries.items(), 2):
        shared = np.flatnonzero(source.rows_of(table["uid"], other["uid"]) >= 0)
        kind = f"query of another split again in {split} (leak)"
        detail = f"uid {{}} is in {other_split}"
        source.note_rows(kind, source.queries_at[split], shared, detail, table["uid"])


def _check_lengths(source: Source, texts: pa.Table, at: Places) -> None:
    limit = source.bounds.max_text_chars
    kind = f"text of more than raw.max_text_chars = {limit:,} characters"
    for column in ("title", "content"):
        length_N = pc.utf8_length(texts[column])
        too_long = np.flatnonzero(pc.greater(length_N, limit))
        source.note_rows(kind, at, too_long, f"{column}: {{}}", length_N)
