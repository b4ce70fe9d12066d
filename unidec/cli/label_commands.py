"""`unidec labels`: change the labels of a bundle without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from unidec import pipeline
from unidec.cli.commands import DEFAULT_BUNDLE, BundleAddress, command, group, load_if_there
from unidec.config import Params
from unidec.errors import ConfigError

if TYPE_CHECKING:
    from unidec.bundle.label_file import LabelText
    from unidec.pipeline.label_stages import ChangedLabels

labels_app = group(
    "labels",
    "Add, remove and update the labels of a bundle without training; the result is a new bundle.",
)

_ABOUT_FILE = "labels: .csv, .tsv, .jsonl or .parquet with the columns id, text [, title]"
_ABOUT_QUERIES = (
    "example queries for the added labels, one per row: .csv, .tsv, .jsonl or .parquet with the "
    "columns label_id, text"
)
_ABOUT_UIDS = "labels: .csv, .tsv, .jsonl or .parquet with the column id"
File = Annotated[Path | None, Option(metavar="FILE", help=_ABOUT_FILE)]
Register = Annotated[bool, Option("--register", help="register the new bundle as challenger")]
Out = Annotated[
    Path | None, Option(metavar="FOLDER", help="the new bundle; default outputs/refreshed")
]
DryRun = Annotated[bool, Option("--dry-run", help="print what would change, write nothing")]


Uid = Annotated[str | None, Argument(metavar="[UID]", help="uid of the label")]
ShownText = Annotated[
    str | None, Argument(metavar="[TEXT]", help="text of the label, which is encoded and shown")
]
Title = Annotated[str | None, Option(help="shown instead of the text")]


@command(
    labels_app,
    'zed "editor for code, shared"',
    'zed "editor for code, shared" --query "fast code editor" --query "pair programming"',
    "--file new.csv --queries examples.csv --bundle models:/unidec@champion --register",
    loads=load_if_there,
)
def add(
    params: Params,
    uid: Uid = None,
    text: ShownText = None,
    title: Title = None,
    file: File = None,
    query: Annotated[
        list[str] | None, Option(metavar="TEXT", help="example query for the label; repeatable")
    ] = None,
    queries: Annotated[Path | None, Option(metavar="FILE", help=_ABOUT_QUERIES)] = None,
    bundle: BundleAddress = DEFAULT_BUNDLE,
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
) -> Any:
    """Add labels, which are ranked by their text and, if given, by example queries; other labels
    keep their vectors.
    """
    if query and uid is None:
        raise ConfigError(
            "--query requires a single label",
            where="unidec labels add",
            fix="give UID and TEXT; with --file, use --queries examples.csv",
        )
    texts = _texts(uid, text, title, file, params)
    from unidec.bundle.label_file import LabelText
    from unidec.pipeline.label_stages import change_labels

    examples = [LabelText(str(uid), one) for one in query or []]
    return _flat(
        change_labels(
            params,
            bundle,
            add=texts,
            examples=[*examples, *_read(queries, params)],
            out=out,
            register=register,
            dry_run=dry_run,
        )
    )


@command(labels_app, 'kate "editor for KDE"', "--file changed.csv", loads=load_if_there)
def update(
    params: Params,
    uid: Uid = None,
    text: ShownText = None,
    title: Title = None,
    file: File = None,
    bundle: BundleAddress = DEFAULT_BUNDLE,
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
) -> Any:
    """Change the texts of labels; the texts are re-encoded, trained classifier rows are kept."""
    texts = _texts(uid, text, title, file, params)
    from unidec.pipeline.label_stages import change_labels

    return _flat(
        change_labels(params, bundle, update=texts, out=out, register=register, dry_run=dry_run)
    )


@command(labels_app, "kate gedit", "--file gone.csv --dry-run", loads=load_if_there)
def remove(
    params: Params,
    uids: Annotated[list[str] | None, Argument(metavar="[UID]...", help="uids of labels")] = None,
    file: Annotated[Path | None, Option(metavar="FILE", help=_ABOUT_UIDS)] = None,
    bundle: BundleAddress = DEFAULT_BUNDLE,
    out: Out = None,
    register: Register = False,
    dry_run: DryRun = False,
) -> Any:
    """Remove labels: they are no longer predicted."""
    if bool(uids) == (file is not None):
        raise ConfigError(
            "requires either uids or --file",
            where="unidec labels remove",
            fix="unidec labels remove UID, or unidec labels remove --file gone.csv",
        )
    from unidec.pipeline.label_stages import change_labels

    uids = uids or [label.uid for label in _read(file, params)]
    return _flat(
        change_labels(params, bundle, remove=uids, out=out, register=register, dry_run=dry_run)
    )


@command(labels_app, "", "--version 7 --register")
def refresh(
    params: Params,
    version: Annotated[str, Option(metavar="VERSION", help="number or alias")] = "champion",
    register: Register = False,
) -> Any:
    """Give a registered model the labels of data/dataset, without training; writes
    outputs/refreshed.
    """
    result = pipeline.refresh_labels(params, version)
    if register and result.bundle:
        result = replace(result, registered=pipeline.register(params, result.bundle))
    return _flat(result)


def _flat(result: ChangedLabels) -> dict[str, Any]:
    """The fields of the change, then those of its registration."""
    found = pipeline.plain(result)
    return found | found.pop("registered", {})


def _texts(
    uid: str | None, text: str | None, title: str | None, file: Path | None, params: Params
) -> list[LabelText]:
    """The one label on the command line, or those of the file."""
    if (uid is None or text is None) == (file is None) or (file and (uid or title)):
        raise ConfigError(
            "requires either a uid and a text, or --file",
            where="unidec labels",
            fix='unidec labels add UID "TEXT", or unidec labels add --file labels.csv; update '
            "likewise",
        )
    from unidec.bundle.label_file import LabelText

    return _read(file, params) or [LabelText(str(uid), str(text), title or "")]


def _read(file: Path | None, params: Params) -> list[LabelText]:
    from unidec.bundle.label_file import read_labels

    return [] if file is None else read_labels(file, params.raw)
