"""`unidec labels`: change the labels of a bundle, without training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from unidec.cli.commands import DEFAULT_BUNDLE, BundleAddress, command, group, load_if_there
from unidec.config import Params
from unidec.errors import ConfigError

if TYPE_CHECKING:
    from unidec.retrieval.label_change import LabelText

labels_app = group("Add, remove and change the labels of a bundle without training: a new bundle, the old one stays.")

_ABOUT_FILE = "labels: .csv, .tsv, .jsonl or .parquet with the columns uid, text [, title]"
_ABOUT_UIDS = "the same with a column uid"
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_FILE)]
Uid = Annotated[str | None, typer.Argument(metavar="[UID]", help="one label")]
Text = Annotated[str | None, typer.Argument(metavar="[TEXT]", help="its text: encoded, and shown")]
Title = Annotated[str | None, typer.Option("--title", help="what is shown, if not the text")]
Register = Annotated[bool, typer.Option("--register", help="register the new bundle as challenger")]


@dataclass(frozen=True)
class Change:
    """Options of every change."""

    bundle: BundleAddress = str(DEFAULT_BUNDLE)
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="the new bundle; default outputs/refreshed")
    ] = None
    register: Register = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print what would change, write nothing")] = False

    def make(self, params: Params, **edit: list[Any]) -> dict[str, Any]:
        """The change itself; `edit` as `change_labels` takes it."""
        from unidec.pipeline.labels import change_labels

        options: dict[str, Any] = asdict(self) | edit
        return change_labels(params, options.pop("bundle"), **options)


@command(
    labels_app, 'unidec labels add zed "editor for code, shared"',
    "unidec labels add --file new.csv --bundle models:/unidec@champion --register", loads=load_if_there,
)  # fmt: skip
def add(
    params: Params, change: Change, uid: Uid = None, text: Text = None, title: Title = None, file: File = None
) -> dict[str, Any]:
    """Add labels, answered from now on by their text; the others answer as they did."""
    return change.make(params, add=_texts(uid, text, title, file))


@command(
    labels_app, 'unidec labels update kate "editor for KDE"', "unidec labels update --file changed.csv",
    loads=load_if_there,
)  # fmt: skip
def update(
    params: Params, change: Change, uid: Uid = None, text: Text = None, title: Title = None, file: File = None
) -> dict[str, Any]:
    """Change the texts of labels: they are encoded again; what was trained of them stays."""
    return change.make(params, update=_texts(uid, text, title, file))


@command(
    labels_app, "unidec labels remove kate gedit", "unidec labels remove --file gone.csv --dry-run",
    loads=load_if_there,
)  # fmt: skip
def remove(
    params: Params,
    change: Change,
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="labels")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_UIDS)] = None,
) -> dict[str, Any]:
    """Remove labels: they are never answered again, and get no votes."""
    if bool(uids) == (file is not None):
        fix = "unidec labels remove UID, or unidec labels remove --file gone.csv"
        raise ConfigError("either uids or --file are needed", where="unidec labels remove", fix=fix)
    return change.make(params, remove=uids or [label.uid for label in _read(file)])


@command(
    labels_app, "unidec labels apply --add new.csv --remove gone.csv --update changed.csv --register",
    loads=load_if_there,
)  # fmt: skip
def apply(
    params: Params,
    change: Change,
    added: Annotated[Path | None, typer.Option("--add", metavar="FILE", help=_ABOUT_FILE)] = None,
    removed: Annotated[Path | None, typer.Option("--remove", metavar="FILE", help=_ABOUT_UIDS)] = None,
    updated: Annotated[Path | None, typer.Option("--update", metavar="FILE", help=_ABOUT_FILE)] = None,
) -> dict[str, Any]:
    """Add, remove and update at once: one new bundle, one new version."""
    if not (added or removed or updated):
        raise ConfigError("nothing to do", where="unidec labels apply", fix="name a file: --add, --remove or --update")
    uids = [label.uid for label in _read(removed)]
    return change.make(params, add=_read(added), remove=uids, update=_read(updated))


@command(labels_app, "unidec labels refresh", "unidec labels refresh --version 7 --register")
def refresh(
    params: Params,
    version: Annotated[str, typer.Option("--version", metavar="VERSION", help="number or alias")] = "champion",
    register: Register = False,
) -> dict[str, Any]:
    """Give a registered model the labels of data/dataset, without training: outputs/refreshed."""
    from unidec import pipeline

    result = pipeline.refresh_labels(params, version)
    if register and result["changed"]:
        result |= pipeline.register(params, result["bundle"])
    return result


def _texts(uid: str | None, text: str | None, title: str | None, file: Path | None) -> list[LabelText]:
    if (uid is None or text is None) == (file is None) or (file and (uid or title)):
        fix = 'unidec labels add UID "TEXT", or unidec labels add --file labels.csv; update likewise'
        raise ConfigError("either a uid and a text, or --file are needed", where="unidec labels", fix=fix)
    from unidec.retrieval.label_change import LabelText

    return _read(file) or [LabelText(str(uid), str(text), title or "")]


def _read(file: Path | None) -> list[LabelText]:
    from unidec.retrieval.label_change import read_labels

    return [] if file is None else read_labels(file)
