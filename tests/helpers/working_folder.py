"""Functions that speak of the working folder, asked in another one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def at(folder: Path, ask: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What a function returns in a folder."""
    with contextlib.chdir(folder):
        return ask(*given, **named)
