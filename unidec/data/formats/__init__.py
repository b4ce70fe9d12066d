"""Raw data in: one reader for every layout (docs/data.md shows each)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.formats import tables, xmc
from unidec.data.formats.files import Lines, Source, rows_of
from unidec.data.raw import RawData, hold_out, make_slice
from unidec.data.storage import file_sha256
from unidec.data.table_file import DEFAULT_BOUNDS
from unidec.errors import DataError
from unidec.sections import Data, RawBounds

__all__ = ["LAYOUTS", "RawData", "find_rows", "make_slice", "read_raw", "read_section"]

LAYOUTS = xmc.LAYOUTS | tables.LAYOUTS


def read_raw(
    path: str | os.PathLike[str], format: str = "auto", *, test_share: float = 0.2, split_seed: int = 0,
    bounds: RawBounds = DEFAULT_BOUNDS,
) -> RawData:  # fmt: skip
    """Read a folder of raw files.

    Args:
        format: a name in LAYOUTS, or "auto" to tell by the files in the folder.
        test_share, split_seed: if the data names no test split, this share of its queries becomes one (`hold_out`).
        bounds: of rows, texts and compressed files.

    Raises:
        DataError: an unknown layout; files that are missing, damaged or beyond a bound; or pairs, uids and texts with
            faults (see docs/data.md), all kinds at once with at most 20 samples as `file:line`.
    """
    source, raw = _read(path, format, bounds)
    if "test" not in raw.queries:
        held = hold_out(raw.queries["train"]["uid"], raw.filter_pairs["train"], test_share, split_seed)
        raw = raw.take({"test": np.flatnonzero(held), "train": np.flatnonzero(~held)})
    files = {name: file_sha256(file) for name, file in sorted(source.read.items())}
    return replace(raw, name=source.root.resolve().name, files=files)


def read_section(data: Data, bounds: RawBounds) -> RawData:
    """`read_raw` with the settings of section `data`."""
    return read_raw(data.path, data.format, test_share=data.test_share, split_seed=data.split_seed, bounds=bounds)


def find_rows(
    data: Data, bounds: RawBounds, files: Mapping[str, str], queries: Sequence[str], labels: Sequence[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """`file:line` by uid of some queries and of some labels in raw files that were read before.

    `files` are their sha256 by relative path (`RawData.files`); if one has changed since, nothing is found.
    """
    root = Path(data.path)
    if not all((root / name).is_file() and file_sha256(root / name) == sha256 for name, sha256 in files.items()):
        return {}, {}
    source, raw = _read(root, data.format, bounds)
    found: dict[str, str] = {}
    for split, table in raw.queries.items():
        found |= _places(table, queries, *source.queries_at[split])
    return found, _places(raw.labels, labels, *source.labels_at)


def _places(table: pa.Table, uids: Sequence[str], file: str, lines: Lines) -> dict[str, str]:
    rows = rows_of(pa.array(uids, pa.large_string()), table["uid"])
    known = [(uid, row) for uid, row in zip(uids, rows.tolist(), strict=True) if row >= 0]
    at = lines(np.asarray([row for _, row in known], dtype=np.int64))
    return {uid: f"{file}:{line}" for (uid, _), line in zip(known, at.tolist(), strict=True)}


def _read(path: str | os.PathLike[str], format: str, bounds: RawBounds) -> tuple[Source, RawData]:
    """All that the files hold, checked."""
    root = Path(path)
    if not root.is_dir():
        raise DataError("no such folder", where=str(root), fix="set data.path to the folder with the raw files")
    layout = _detect(root) if format == "auto" else format
    if layout not in LAYOUTS:
        raise DataError("an unknown layout", where=str(root), got=layout, expected=", ".join(["auto", *LAYOUTS]))
    source = Source(root, bounds)
    raw = LAYOUTS[layout].read(source)
    _check(source, raw)
    source.stop()
    return source, replace(raw, format=layout)


def _detect(root: Path) -> str:
    source = Source(root)
    fitting = [name for name, layout in LAYOUTS.items() if all(source.find(*names) for names in layout.needs)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise DataError("files of more than one layout", where=str(root), got=", ".join(fitting), fix="set data.format")
    found = ", ".join(sorted(path.name for path in root.iterdir())[:12]) or "an empty folder"
    looked_for = "".join(f"\n    {name}: {layout.expected}" for name, layout in LAYOUTS.items())
    raise DataError(
        "no layout fits the files of this folder",
        where=str(root),
        got=found,
        expected=f"the files (as they are or with .gz) of one of:{looked_for}",
        fix="see docs/data.md for an example of each layout",
    )


def _check(source: Source, raw: RawData) -> None:
    """What every layout must give: labels, training queries, texts within bounds, no uid on both sides of a split."""
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
        source.note("no labels at all", "labels", 0)
    if not raw.queries["train"].num_rows:
        source.note("no training queries at all", "train", 0)
    for (earlier, before), (split, table) in itertools.combinations(raw.queries.items(), 2):
        both = np.flatnonzero(pc.is_in(table["uid"], value_set=before["uid"].combine_chunks()).to_numpy())
        kind = f"query of another split again in {split} (leak)"
        source.note_rows(kind, source.queries_at[split], both, f"uid {{}} is in {earlier}", table["uid"])
