"""Processes of this machine, found by their environment (Linux)."""

from __future__ import annotations

from pathlib import Path


def processes_with(variable: str, value: str | Path) -> list[int]:
    """Numbers of the processes whose environment has this variable with this value."""
    mark = f"{variable}={value}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # gone, or not ours
            continue
    return found
