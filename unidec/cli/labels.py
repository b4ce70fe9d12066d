"""`unidec labels`: change the labels of a bundle, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from unidec.cli.options import (
    DEFAULT_BUNDLE,
    DEFAULT_PARAMS,
    AsJson,
    Assignments,
    BundleAddress,
    ParamsFile,
    load,
    load_if_there,
)
from unidec.cli.output import show
from unidec.errors import ConfigError

if TYPE_CHECKING:
    from unidec.retrieval.label_change import LabelText

labels_app = typer.Typer(
    help="Add, remove and change the labels of a bundle without training: a new bundle, the old one stays.",
    no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip

_ABOUT_FILE = "labels: .csv, .tsv, .jsonl or .parquet with the columns uid, text [, title]"
_ABOUT_UIDS = "the same with a column uid"
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="the new bundle; default outputs/refreshed")]
Register = Annotated[bool, typer.Option("--register", help="register the new bundle as challenger")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print what would change, write nothing")]


def _with_texts(kind: Literal["add", "update"]) -> Callable[..., None]:
    """`add` and `update`: one label on the command line, or those of a file."""

    def command(
        uid: Annotated[str | None, typer.Argument(metavar="[UID]", help="one label")] = None,
        text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="its text: encoded, and shown")] = None,
        title: Annotated[str | None, typer.Option("--title", help="what is shown, if not the text")] = None,
        file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_FILE)] = None,
        bundle: BundleAddress = str(DEFAULT_BUNDLE),
        out: Out = None,
        register: Register = False,
        dry_run: DryRun = False,
        params: ParamsFile = DEFAULT_PARAMS,
        assignments: Assignments = None,
        as_json: AsJson = False,
    ) -> None:
        by_hand = uid is not None and text is not None
        if by_hand == (file is not None) or (file is not None and (uid or title)):
            raise ConfigError(
                "either a uid and a text, or --file are needed", where=f"unidec labels {kind}",
                fix=f'unidec labels {kind} UID "TEXT", or unidec labels {kind} --file labels.csv',
            )  # fmt: skip
        from unidec.pipeline.labels import LabelEdit, change_labels
        from unidec.retrieval.label_change import LabelText

        given = _read(file) if file is not None else [LabelText(str(uid), str(text), title or "")]
        edit = LabelEdit(add=given) if kind == "add" else LabelEdit(update=given)
        loaded = load_if_there(params, assignments)
        result = change_labels(loaded, bundle, edit, out=out, register=register, dry_run=dry_run)
        show(f"labels {kind}", result, as_json)

    return command


labels_app.command(
    "add", help="Add labels, answered from now on by their text; the others answer as they did.",
    epilog='Examples: unidec labels add zed "editor for code, shared"  |  unidec labels add --file new.csv '
    "--bundle models:/unidec@champion --register",
)(_with_texts("add"))  # fmt: skip
labels_app.command(
    "update", help="Change the texts of labels: they are encoded again; what was trained of them stays.",
    epilog='Examples: unidec labels update kate "editor for KDE"  |  unidec labels update --file changed.csv',
)(_with_texts("update"))  # fmt: skip


@labels_app.command(
    epilog="Examples: unidec labels remove kate gedit  |  unidec labels remove --file gone.csv --dry-run"
)
def remove(
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="labels")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_UIDS)] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Remove labels: they are never answered again, and get no votes."""
    if bool(uids) == (file is not None):
        raise ConfigError(
            "either uids or --file are needed", where="unidec labels remove",
            fix="unidec labels remove UID, or unidec labels remove --file gone.csv",
        )  # fmt: skip
    from unidec.pipeline.labels import LabelEdit, change_labels

    edit = LabelEdit(remove=uids or [item.uid for item in _read(file, texts=False)])
    loaded = load_if_there(params, assignments)
    show("labels remove", change_labels(loaded, bundle, edit, out=out, register=register, dry_run=dry_run), as_json)


@labels_app.command(
    epilog="Example: unidec labels apply --add new.csv --remove gone.csv --update changed.csv --register"
)
def apply(
    added: Annotated[Path | None, typer.Option("--add", metavar="FILE", help=_ABOUT_FILE)] = None,
    removed: Annotated[Path | None, typer.Option("--remove", metavar="FILE", help=_ABOUT_UIDS)] = None,
    updated: Annotated[Path | None, typer.Option("--update", metavar="FILE", help=_ABOUT_FILE)] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Add, remove and update at once: one new bundle, one new version."""
    if not (added or removed or updated):
        raise ConfigError("nothing to do", where="unidec labels apply", fix="name a file: --add, --remove or --update")
    from unidec.pipeline.labels import LabelEdit, change_labels

    edit = LabelEdit(_read(added), [item.uid for item in _read(removed, texts=False)], _read(updated))
    loaded = load_if_there(params, assignments)
    show("labels apply", change_labels(loaded, bundle, edit, out=out, register=register, dry_run=dry_run), as_json)


@labels_app.command(epilog="Examples: unidec labels refresh  |  unidec labels refresh --version 7 --register")
def refresh(
    version: Annotated[str, typer.Option("--version", metavar="VERSION", help="number or alias")] = "champion",
    register: Register = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Give a registered model the labels of data/dataset, without training: outputs/refreshed."""
    loaded = load(params, assignments)
    from unidec import pipeline

    result = pipeline.refresh_labels(loaded, version)
    if register and result["changed"]:
        result |= pipeline.register(loaded, result["bundle"])
    show("labels refresh", result, as_json)


def _read(file: Path | None, texts: bool = True) -> list[LabelText]:
    from unidec.retrieval.label_change import read_labels

    return [] if file is None else read_labels(file, texts)
