"""`unidec labels`: labels come, go and say something else, and nothing is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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

labels_app = typer.Typer(
    help="Add, remove and change the labels of a bundle without training: a new bundle, the old one stays.",
    no_args_is_help=True, rich_markup_mode=None,
)  # fmt: skip

_ABOUT_FILE = "labels: .csv, .tsv, .jsonl or .parquet with the columns uid, text [, title]"
Uid = Annotated[str | None, typer.Argument(metavar="[UID]", help="one label, by hand")]
Text = Annotated[str | None, typer.Argument(metavar="[TEXT]", help="what it says; with --title, what is encoded")]
Title = Annotated[str | None, typer.Option("--title", help="what is shown, if not the text")]
File = Annotated[Path | None, typer.Option("--file", metavar="FILE", help=_ABOUT_FILE)]
Out = Annotated[Path | None, typer.Option("--out", metavar="FOLDER", help="the new bundle; default outputs/refreshed")]
Register = Annotated[bool, typer.Option("--register", help="register the new bundle as challenger")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would change, write nothing")]


@labels_app.command(
    epilog='Examples: unidec labels add zed "editor for code, shared"  |  unidec labels add --file new.csv '
    "--bundle models:/unidec@champion --register"
)
def add(
    uid: Uid = None,
    text: Text = None,
    title: Title = None,
    file: File = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """New labels, answered from now on by their text; the others answer as they did."""
    given = _given("add", uid, text, title, file)
    _run("add", bundle, out, register, dry_run, params, assignments, as_json, add=given)


@labels_app.command(
    epilog="Examples: unidec labels remove kate gedit  |  unidec labels remove --file gone.csv --dry-run"
)
def remove(
    uids: Annotated[list[str] | None, typer.Argument(metavar="[UID]...", help="labels, by hand")] = None,
    file: Annotated[Path | None, typer.Option("--file", metavar="FILE", help="the same with a column uid")] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Labels that are never answered again, and no longer vote."""
    if bool(uids) == (file is not None):
        raise ConfigError(
            "either uids or --file are needed", where="unidec labels remove",
            fix="unidec labels remove UID, or unidec labels remove --file gone.csv",
        )  # fmt: skip
    _run("remove", bundle, out, register, dry_run, params, assignments, as_json, remove=uids or _uids(file))


@labels_app.command(
    epilog='Examples: unidec labels update kate "editor for KDE"  |  unidec labels update --file said.csv'
)
def update(
    uid: Uid = None,
    text: Text = None,
    title: Title = None,
    file: File = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Labels that say something else: encoded anew; what was trained of them stays."""
    given = _given("update", uid, text, title, file)
    _run("update", bundle, out, register, dry_run, params, assignments, as_json, update=given)


@labels_app.command(epilog="Example: unidec labels apply --add new.csv --remove gone.csv --update said.csv --register")
def apply(
    added: Annotated[Path | None, typer.Option("--add", metavar="FILE", help=_ABOUT_FILE)] = None,
    removed: Annotated[Path | None, typer.Option("--remove", metavar="FILE", help="the same with a column uid")] = None,
    updated: Annotated[Path | None, typer.Option("--update", metavar="FILE", help=_ABOUT_FILE)] = None,
    bundle: BundleAddress = str(DEFAULT_BUNDLE),
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """All three at once: one new bundle, one new version."""
    if not (added or removed or updated):
        raise ConfigError("nothing to do", where="unidec labels apply", fix="name a file: --add, --remove or --update")
    from unidec.retrieval.label_file import read_labels

    _run(
        "apply", bundle, out, register, dry_run, params, assignments, as_json,
        add=read_labels(added) if added else (), remove=_uids(removed), update=read_labels(updated) if updated else (),
    )  # fmt: skip


@labels_app.command(epilog="Examples: unidec labels refresh  |  unidec labels refresh --version 7 --register")
def refresh(
    version: Annotated[str, typer.Option("--version", metavar="VERSION", help="number or alias")] = "champion",
    register: Annotated[bool, typer.Option("--register", help="register the result as challenger")] = False,
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


def _given(command: str, uid: str | None, text: str | None, title: str | None, file: Path | None) -> list[Any]:
    """One label by hand, or those of a file."""
    from unidec.retrieval.label_change import LabelText
    from unidec.retrieval.label_file import read_labels

    if (uid is None or text is None) == (file is None) or (file is not None and (uid or title)):
        raise ConfigError(
            "either a uid and a text, or --file are needed", where=f"unidec labels {command}",
            fix=f'unidec labels {command} UID "TEXT", or unidec labels {command} --file labels.csv',
        )  # fmt: skip
    return read_labels(file) if file is not None else [LabelText(str(uid), str(text), title or "")]


def _uids(file: Path | None) -> list[str]:
    from unidec.retrieval.label_file import read_labels

    return [] if file is None else [item.uid for item in read_labels(file, texts=False)]


def _run(
    command: str, bundle: str, out: Path | None, register: bool, dry_run: bool, params: Path,
    assignments: list[str] | None, as_json: bool, **change: Any,
) -> None:  # fmt: skip
    loaded = load_if_there(params, assignments)
    from unidec.pipeline.labels import change_labels

    result = change_labels(loaded, bundle, out=out, register=register, dry_run=dry_run, **change)
    show(f"labels {command}", result, as_json)
