"""`unidec init`: a params.yaml for your own data, and with --project the files that DVC and Prefect
need.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

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
_DVC_SETTINGS = ("config", "config.local")
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
        files = ", ".join(write_project(folder)) or "nothing, all files exist"
        print(f"project {folder.resolve()}: wrote {files}")
    path = folder / "params.yaml"
    given = {"recipe": recipe, "data.path": data_path, "data.format": data_format}
    values = {key: value for key, value in given.items() if value is not None}
    before = path.read_text(encoding="utf-8") if path.exists() else None
    if before is not None and not values:
        if project:
            return
        raise ConfigError(
            "exists already, and no option to change is given",
            where=path,
            fix="unidec init --data-path FOLDER, or another folder for params.yaml",
        )
    load_params(None if before is None else path, values)  # refuses values that are not valid
    folder.mkdir(parents=True, exist_ok=True)
    text = _new(DEFAULTS | values) if before is None else _changed(before, values, path)
    path.write_text(text, encoding="utf-8")
    written = ", ".join(f"{key}: {value}" for key, value in values.items()) or "written"
    if data_path is not None:
        _warn_of_missing(folder / data_path)
    is_elsewhere = folder.resolve() != Path.cwd()
    enter = f"cd {shlex.quote(str(folder))} && " if is_elsewhere else ""
    train = "python -m flows.train" if project else "make train"
    print(f"{path}: {written}; next: {enter}{train} (only the data: {enter}unidec data ingest)")


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
    params = Params()
    sections = ""
    for name, section in params:
        if name not in ("recipe", "seed", "device", "data"):
            sections += f"{name}: {{{', '.join(key for key, _ in section)}}}\n"
    data = ""
    for key, default in params.data:
        data += f"  {key}: {json.dumps(values.get(f'data.{key}', default))}\n"
    return (
        "# `unidec config keys` explains every key; keys here override the recipe.\n"
        f"recipe: {values['recipe']}\nseed: 0\ndevice: auto\n\ndata:\n{data}\n{sections}"
    )


def _changed(text: str, values: dict[str, str], path: Path) -> str:
    """The text with new values at these keys, and nothing else changed. Raises ConfigError if a key
    is missing.
    """
    for key, value in values.items():
        shown = json.dumps(value)
        node = YAML().compose(text)
        for name in key.split("."):
            found = node.value if isinstance(node, MappingNode) else ()
            node = next((child for own, child in found if own.value == name), None)
        if node is None:
            raise ConfigError(
                f"no key {key} to change",
                where=path,
                fix=f"add it by hand, with the value {shown}",
            )
        before = text[: node.start_mark.index]
        after = text[node.end_mark.index :]
        if not node.value:  # a key without a value
            before = before.rstrip(" ").removesuffix(":") + ": "
        text = f"{before}{shown}{after}"
    return text


def write_project(folder: Path) -> list[str]:
    """Write the project files that are missing; existing files are not changed.

    Returns:
        names of the files that were written.

    Raises:
        ConfigError: this installation does not have these files.
    """
    packaged = PACKAGE / "project_template"
    # a checkout is itself a project
    template = packaged if packaged.is_dir() else packaged.parents[1]
    if not (template / "dvc.yaml").is_file():
        raise ConfigError(
            "this installation lacks the files of a project",
            where=template,
            fix="run it in a checkout, or where pip installed unidec-xmc[pipeline]; the serving "
            "image only serves",
        )
    files = {
        ".dvc/config": _DVC_CONFIG,
        ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
        "data/start.json": '{\n  "kind": "cold"\n}\n',
    }
    for pattern in _FILES:
        for file in sorted(template.glob(pattern)):
            name = file.relative_to(template).as_posix()
            files[name] = _adapted(name, file.read_text(encoding="utf-8"))
    missing = [name for name in files if not (folder / name).exists()]
    for name in missing:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[name], encoding="utf-8")
    (folder / "bin" / "python").chmod(0o755)
    (folder / ".dvcstore").mkdir(exist_ok=True)
    return sorted([*missing, *_match_git(folder)])


def matches_git(folder: Path) -> bool:
    """Whether DVC's setting core.no_scm says that there is no git repository exactly if there is
    none.
    """
    says_none = any(map(_says_no_git, _dvc_settings(folder)))
    return says_none != is_inside(folder)


def _dvc_settings(folder: Path) -> list[Any]:
    """DVC's shared and local settings; empty if there is no such file."""
    from configobj import ConfigObj  # with which DVC reads and writes them

    return [ConfigObj(str(folder / ".dvc" / name)) for name in _DVC_SETTINGS]


def _says_no_git(settings: Any) -> bool:
    return settings.get("core", {}).get("no_scm", "").lower() == "true"


def _match_git(folder: Path) -> list[str]:
    """Add core.no_scm to DVC's local settings, without which DVC requires git, or remove it; other
    settings are kept.

    Returns:
        names of the files that were changed.
    """
    if matches_git(folder):
        return []
    shared, local = _dvc_settings(folder)
    changed = [local]
    if is_inside(folder):
        changed = list(filter(_says_no_git, (shared, local)))
        for settings in changed:
            del settings["core"]["no_scm"]
    else:
        local.setdefault("core", {})["no_scm"] = "true"
    for settings in changed:
        settings.write()
    return [f".dvc/{Path(settings.filename).name}" for settings in changed]


def _adapted(name: str, text: str) -> str:
    """A template's text: without dependencies on a checkout's code; bin/python falls back to the
    running Python.
    """
    if name == "bin/python":
        return text.replace("exec python3 ", f'exec "{sys.executable}" ')
    if name == "dvc.yaml":
        note = (
            "# unidec-xmc's code is not a dependency here: after an upgrade run "
            "`dvc repro --force inputs`.\n"
        )
        return note + text.replace("[params.yaml, unidec]", "[params.yaml]")
    return text
