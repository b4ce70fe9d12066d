"""Records in JSON that may be missing, or damaged by a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from unidec.data.storage import write_bytes_atomic
from unidec.errors import ArtifactError


def json_object(text: str | bytes) -> dict[str, Any]:
    """The JSON object in a text; {} if it holds none."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none, or it cannot be read."""
    try:
        return json_object(Path(path).read_bytes())
    except OSError:
        return {}


def read_json_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read a file with one JSON object per line; [] if there is no such file.

    A damaged last line is skipped: its writer was killed.

    Raises:
        ArtifactError: another line is damaged.
    """
    file = Path(path)
    lines = file.read_bytes().splitlines() if file.is_file() else []
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line.decode("utf-8")))
        except ValueError as error:
            if number < len(lines):
                raise ArtifactError(
                    "a damaged line",
                    where=f"{path}:{number}",
                    got=repr(line[:200]),
                    fix="remove this line: it is a record of a past event, not an input",
                ) from error
    return records


def time_now() -> str:
    """The current time, as records state it: UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def write_json_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by one JSON object per line."""
    lines = [json.dumps(record) + "\n" for record in records]
    write_bytes_atomic(path, "".join(lines).encode())
