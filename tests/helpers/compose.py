"""mlflow/compose.yaml read as Docker reads it, so that tests start its very commands without a
container.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "mlflow" / "compose.yaml"


def resolved(value: Any, settings: dict[str, str]) -> Any:
    """`${NAME:-default}` filled in, `$$` a dollar."""
    if isinstance(value, dict):
        return {key: resolved(entry, settings) for key, entry in value.items()}
    if isinstance(value, list):
        return [resolved(entry, settings) for entry in value]
    if not isinstance(value, str):
        return value
    filled = re.sub(
        r"\$\$|\$\{(\w+):-([^}]*)\}",
        lambda found: "$" if found[0] == "$$" else settings.get(found[1]) or found[2],
        value,
    )
    assert "${" not in filled, value
    return filled


def compose(settings: dict[str, str] | None = None) -> dict[str, Any]:
    """The file; settings: what mlflow/.env would say."""
    return resolved(yaml.safe_load(FILE.read_text()), settings or {})


def outside(value: Any, places: dict[str, str]) -> Any:
    """A command or environment as it runs without a container: hosts and folders replaced by those
    of this machine.
    """
    if isinstance(value, dict):
        return {key: outside(entry, places) for key, entry in value.items()}
    if isinstance(value, list):
        return [outside(entry, places) for entry in value]
    if not isinstance(value, str):
        return value
    for before, after in places.items():
        value = value.replace(before, after)
    return value
