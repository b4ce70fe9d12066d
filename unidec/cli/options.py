"""Options that several commands have, and how they become parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unidec.config import Params, load_params, parse_overrides

ParamsFile = Annotated[Path, typer.Option("--params", metavar="FILE", help="parameter file")]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="another value for one parameter; repeatable")
]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]
BundleFolder = Annotated[Path, typer.Option("--bundle", metavar="FOLDER", help="the bundle")]
BundleAddress = Annotated[
    str, typer.Option("--bundle", metavar="WHERE", help="a folder, models:/name@alias or models:/name/version")
]

DEFAULT_PARAMS = Path("params.yaml")
DEFAULT_BUNDLE = Path("outputs/bundle")


def load(path: Path, assignments: list[str] | None) -> Params:
    return load_params(path, parse_overrides(assignments or []))


def load_if_there(path: Path, assignments: list[str] | None) -> Params:
    """As `load`, for commands that a bundle alone is enough for: without params.yaml every key has its default."""
    missing = path == DEFAULT_PARAMS and not path.exists()
    return load_params(None if missing else path, parse_overrides(assignments or []))


def bundle_folder(address: str) -> Path:
    """The folder of a bundle: itself, or the copy of a registered one, fetched if it is not there."""
    if not address.startswith("models:"):
        return Path(address)
    from unidec.tracking import fetch

    return fetch.bundle_folder(address)
