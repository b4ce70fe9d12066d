"""`unidec init`: a params.yaml for your own data, and with --project the files that DVC and Prefect
need.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode
from typer import Argument, Option

from unidec.cli.commands import app, command
from unidec.config import Params, load_params, recipe_names
from unidec.errors import ConfigError, DataError
from unidec.tracking.repository import is_inside
from unidec.version import PACKAGE

_DVC_CONFIG = """[core]
    remote = local
    analytics = false
    check_update = false
    autostage = false
['remote "local"']
    url = ../.dvcstore
    verify = true
"""
_FILES = (
    "dvc.yaml",
    "prefect.yaml",
    "prefect.toml",
    ".gitignore",
    ".dvcignore",
    "bin/python",
    "flows/*.*",
)
_LOCAL = "config.local"
_DVC_SETTINGS = ("config", _LOCAL)
_NO_SCM = re.compile(r"^[ \t]*no_scm[ \t]*=[ \t]*true[ \t]*\n", re.MULTILINE | re.IGNORECASE)
DEFAULTS = {"recipe": "unidec", "data.path": "data/raw/mine", "data.format": "auto"}


@command(app, "--data-path data/raw/shop", "my-project --format tables")
def init(
    folder: Annotated[
        Path, Argument(help="folder of params.yaml; default: the current one")
    ] = Path("."),
    data_path: Annotated[
        str | None,
        Option(help=f"folder of raw files; default in a new params.yaml: {DEFAULTS['data.path']}"),
    ] = None,
    data_format: Annotated[
        str | None,
        Option(
            "--format",
            help="layout of the files (docs/data.md); default in a new params.yaml: auto",
        ),
    ] = None,
    recipe: Annotated[str | None, Option(help=f"one of {', '.join(recipe_names())}")] = None,
    project: Annotated[
        bool,
        Option(
            "--project", help="also write the files that DVC and Prefect need outside a checkout"
        ),
    ] = False,
) -> None:
    """Write a params.yaml for your own data; in an existing one, change these keys and keep all
    other lines.

    With --project, DVC's setting core.no_scm is also set to whether there is a git repository:
    after `git init`, run it again."""
    if project:
        folder.mkdir(parents=True, exist_ok=True)
        print(
            f"project {folder.resolve()}: wrote "
            f"{', '.join(write_project(folder)) or 'nothing, all files exist'}"
        )
    path = folder / "params.yaml"
    given = {"recipe": recipe, "data.path": data_path, "data.format": data_format}
    values = {key: value for key, value in given.items() if value is not None}
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before is not None and not values:
        if project:
            return
        raise ConfigError(
            "exists already, and no option to change is given",
            where=str(path),
            fix="unidec init --data-path FOLDER, or another folder for params.yaml",
        )
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        _new(DEFAULTS | values) if before is None else _changed(before, values, path),
        encoding="utf-8",
    )
    try:
        load_params(path)
    except ConfigError:
        if before is None:
            path.unlink()
        else:
            path.write_text(before, encoding="utf-8")
        raise
    written = ", ".join(f"{key}: {value}" for key, value in values.items())
    if data_path is not None:
        _warn_of_missing(folder / data_path)
    enter = f"cd {shlex.quote(str(folder))} && " if folder.resolve() != Path.cwd() else ""
    train = "python -m flows.train" if project else "make train"
    print(
        f"{path}: {written or 'written'}; next: {enter}{train} (only the data: {enter}unidec "
        "data ingest)"
    )


def _warn_of_missing(data: Path) -> None:
    """Warn if the raw files are not there, or cannot be read: they may come later, or the path has
    a typo.
    """
    from unidec.data.formats import check_folder  # imports pyarrow

    try:
        check_folder(data)
    except DataError as error:
        print(f"warning: {error}", file=sys.stderr)


def _new(values: dict[str, str]) -> str:
    """A new params.yaml. `dvc exp run -S KEY` requires every key, with or without a value."""
    own = ("recipe", "seed", "device", "data")
    keys = {
        name: ", ".join(getattr(Params(), name).model_dump())
        for name in Params.model_fields
        if name not in own
    }
    sections = "".join(f"{name}: {{{listed}}}\n" for name, listed in keys.items())
    defaults = Params().data.model_dump()
    data = "".join(
        f"  {key}: {json.dumps(values.get(f'data.{key}', value))}\n"
        for key, value in defaults.items()
    )
    return (
        "# `unidec config keys` explains every key; keys here override the recipe.\n"
        f"recipe: {values['recipe']}\nseed: 0\ndevice: auto\n\ndata:\n{data}\n{sections}"
    )


def _changed(text: str, values: dict[str, str], path: Path) -> str:
    """The text with new values at these keys, and nothing else changed. Raises ConfigError if a key
    is missing.
    """
    for key, value in values.items():
        node = YAML().compose(text)
        for name in key.split("."):
            found = node.value if isinstance(node, MappingNode) else ()
            node = next((child for own, child in found if own.value == name), None)
        if node is None:
            fix = f"add it by hand, with the value {json.dumps(value)}"
            raise ConfigError(f"no key {key} to change", where=str(path), fix=fix)
        before = text[: node.start_mark.index]
        after = text[node.end_mark.index :]
        if not node.value:  # a key without a value
            before = (
                before
                if before.endswith(" ")
                else f"{before} "
                if before.endswith(":")
                else f"{before}: "
            )
        text = f"{before}{json.dumps(value)}{after}"
    return text


def write_project(folder: Path) -> list[str]:
    """Write the project files that are missing; existing files are not changed.

    Returns:
        names of the files that were written.
    """
    packaged = PACKAGE / "project_template"
    # a checkout is itself a project
    template = packaged if packaged.is_dir() else packaged.parents[1]
    files = {
        str(file.relative_to(template)): _adapted(file, template)
        for pattern in _FILES
        for file in sorted(template.glob(pattern))
    }
    files |= {".dvc/config": _DVC_CONFIG, ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n"}
    files["data/start.json"] = '{\n  "kind": "cold"\n}\n'
    missing = {name: text for name, text in files.items() if not (folder / name).exists()}
    for name, text in missing.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".dvcstore").mkdir(exist_ok=True)
    return sorted([*missing, *_match_git(folder)])


def matches_git(folder: Path) -> bool:
    """Whether DVC's setting core.no_scm says that there is no git repository exactly if there is
    none.
    """
    says_none = any(_NO_SCM.search(_settings(folder, name)) for name in _DVC_SETTINGS)
    return says_none != is_inside(folder)


def _settings(folder: Path, name: str) -> str:
    file = folder / ".dvc" / name
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _match_git(folder: Path) -> list[str]:
    """Add core.no_scm to DVC's local settings, without which DVC requires git, or remove it; other
    lines are kept.

    Returns:
        names of the files that were changed.
    """
    if matches_git(folder):
        return []
    before = {name: _settings(folder, name) for name in _DVC_SETTINGS}
    if is_inside(folder):
        after = {name: _NO_SCM.sub("", text) for name, text in before.items()}
    else:
        after = before | {_LOCAL: f"[core]\n    no_scm = true\n{before[_LOCAL]}"}
    changed = [name for name in _DVC_SETTINGS if after[name] != before[name]]
    for name in changed:
        # DVC refuses a section that is there twice
        text = re.sub(r"(\[core\]\n[^\[]*)\[core\]\n", r"\1", after[name])
        text = re.sub(r"\[core\]\n(?=\[|\s*\Z)", "", text)  # a section without settings
        (folder / ".dvc" / name).write_text(text, encoding="utf-8")
    return [f".dvc/{name}" for name in changed]


def _adapted(file: Path, template: Path) -> str:
    """A template's text: without dependencies on a checkout's code; bin/python falls back to the
    running Python.
    """
    text = file.read_text(encoding="utf-8")
    name = str(file.relative_to(template))
    if name == "bin/python":
        return text.replace("exec python3 ", f'exec "{sys.executable}" ')
    if name == "dvc.yaml":
        text = text.replace("[params.yaml, unidec]", "[params.yaml]")
        return (
            "# unidec-xmc's code is not a dependency here: after an upgrade run `dvc repro "
            f"--force inputs`.\n{text}"
        )
    return text
