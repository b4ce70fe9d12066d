"""`unidec labels`: change the labels of a bundle, without training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

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
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="the new bundle; default outputs/refreshed")]
Register = Annotated[bool, typer.Option("--register", help="register the new bundle as challenger")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would change, write nothing")]


def _takes_texts(kind: Literal["add", "update"], about: str, *examples: str) -> None:
    """`add` and `update`: one label on the command line, or those of a file."""

    def run(
        params: Params, uid: Uid = None, text: Text = None, title: Title = None, file: File = None,
        bundle: BundleAddress = str(DEFAULT_BUNDLE), out: Out = None, register: Register = False,
        dry_run: DryRun = False,
    ) -> dict[str, Any]:  # fmt: skip
        by_hand = uid is not None and text is not None
        if by_hand == (file is not None) or (file is not None and (uid or title)):
            raise ConfigError(
                "either a uid and a text, or --file are needed", where=f"unidec labels {kind}",
                fix=f'unidec labels {kind} UID "TEXT", or unidec labels {kind} --file labels.csv',
            )  # fmt: skip
        from unidec.retrieval.label_change import LabelText

        given = _read(file) if file is not None else [LabelText(str(uid), str(text), title or "")]
        return _change(params, bundle, out, register, dry_run, **{kind: given})

    run.__doc__ = about
    command(labels_app, *examples, name=kind, title=f"labels {kind}", loads=load_if_there)(run)


_takes_texts(
    "add", "Add labels, answered from now on by their text; the others answer as they did.",
    'unidec labels add zed "editor for code, shared"',
    "unidec labels add --file new.csv --bundle models:/unidec@champion --register",
)  # fmt: skip
_takes_texts(
    "update", "Change the texts of labels: they are encoded again; what was trained of them stays.",
    'unidec labels update kate "editor for KDE"', "unidec labels update --file changed.csv",
)  # fmt: skip


@command(
    labels_app, "unidec labels remove kate gedit", "unidec labels remove --file gone.csv --dry-run",
    title="labels remove", loads=load_if_there,
)  # fmt: skip
def remove(
    params: Params,
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="labels")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_UIDS)] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
) -> dict[str, Any]:
    """Remove labels: they are never answered again, and get no votes."""
    if bool(uids) == (file is not None):
        raise ConfigError(
            "either uids or --file are needed", where="unidec labels remove",
            fix="unidec labels remove UID, or unidec labels remove --file gone.csv",
        )  # fmt: skip
    return _change(params, bundle, out, register, dry_run, remove=uids or _uids(file))


@command(
    labels_app, "unidec labels apply --add new.csv --remove gone.csv --update changed.csv --register",
    title="labels apply", loads=load_if_there,
)  # fmt: skip
def apply(
    params: Params,
    added: Annotated[Path | None, typer.Option("--add", metavar="FILE", help=_ABOUT_FILE)] = None,
    removed: Annotated[Path | None, typer.Option("--remove", metavar="FILE", help=_ABOUT_UIDS)] = None,
    updated: Annotated[Path | None, typer.Option("--update", metavar="FILE", help=_ABOUT_FILE)] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
) -> dict[str, Any]:
    """Add, remove and update at once: one new bundle, one new version."""
    if not (added or removed or updated):
        raise ConfigError("nothing to do", where="unidec labels apply", fix="name a file: --add, --remove or --update")
    texts = {"add": _read(added), "update": _read(updated)}
    return _change(params, bundle, out, register, dry_run, remove=_uids(removed), **texts)


@command(
    labels_app, "unidec labels refresh", "unidec labels refresh --version 7 --register", title="labels refresh"
)  # fmt: skip
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


def _change(
    params: Params, bundle: str, out: Path | None, register: bool, dry_run: bool, **edit: list[Any]
) -> dict[str, Any]:
    from unidec.pipeline.labels import change_labels

    return change_labels(params, bundle, out=out, register=register, dry_run=dry_run, **edit)


def _read(file: Path | None) -> list[LabelText]:
    from unidec.retrieval.label_change import read_labels

    return [] if file is None else read_labels(file)


def _uids(file: Path | None) -> list[str]:
    return [item.uid for item in _read(file)]
