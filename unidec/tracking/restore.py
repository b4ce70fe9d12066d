"""An old version's code, parameters and lock file in a folder of their own, from which its data and model come back.

The folder is a clone of this repository at the version's commit. dvc.lock, params.yaml and data/start.json are those
that the version's MLflow run keeps (they are committed after the model was made, or not at all); DVC finds what the
lock file names in this project's cache and remotes. Nothing of this project changes, and the folder can be deleted.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unidec.errors import ArtifactError, ConfigError, without_credentials
from unidec.tracking.provenance import RECORDS, RECORDS_FOLDER, git
from unidec.tracking.registry import tracking_to
from unidec.tracking.store import tracking_uri

_AGAIN = "train,index,evaluate"


def restore(
    found: Mapping[str, Any], folder: str | os.PathLike[str], *, uri: str | None = None, root: Path | str = "."
) -> dict[str, Any]:
    """Write a version's code, parameters, lock file and start into a new folder, and say how to go on.

    Args:
        found: of `lineage.lineage`.
        folder: is not there yet, or empty.
        uri: registry; default: see `tracking_store.tracking_uri`.
        root: of this project.

    Returns:
        {"folder", "commit", "lock_sha256", "warnings": [...], "commands": [...]}: `dvc` brings back what the lock file
        names, the last command trains, indexes and evaluates anew.

    Raises:
        ConfigError: the folder is not empty, no commit is known, git does not have it, or the version is one whose
            labels alone were changed.
        ArtifactError: the lock file that made the version is nowhere.
    """
    target, code = Path(folder).absolute(), found["code"]
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("exists already", where=str(target), fix="name a folder that is not there")
    if found["start"]["kind"] == "refresh":
        raise ConfigError(
            "nothing was trained for this version: its model is that of another", where=f"version {found['version']}",
            fix=f"restore models:/{found['model']}/{found['start'].get('version')}",
        )  # fmt: skip
    top, prefix = git(root, "rev-parse", "--show-toplevel"), git(root, "rev-parse", "--show-prefix")
    commit = code["commit"]
    if not commit or top is None or git(root, "cat-file", "-e", f"{commit}^{{commit}}") is None:
        raise ConfigError(
            "git does not have the version's commit", where=str(Path(root).absolute()), got=commit,
            fix="git fetch --all, in a clone of the repository that it was made in",
        )  # fmt: skip
    uri = uri or tracking_uri(root)
    with tempfile.TemporaryDirectory(prefix="unidec-restore-") as scratch:
        records = _records(found, uri, root, Path(scratch))
        _clone(top, commit, target)
        project = target / (prefix or "")
        for name, file in records.items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, project / name)
    _write_dvc_config(Path(root).absolute(), project)
    return {
        "folder": str(project), "commit": commit, "lock_sha256": found["lock_sha256"],
        "warnings": _warnings(found, records), "commands": _commands(project, uri),
    }  # fmt: skip


def _records(found: Mapping[str, Any], uri: str, root: Path | str, scratch: Path) -> dict[str, Path]:
    """The run's files, else those of the commit that has the lock file; the lock file is the version's, by its hash."""
    from mlflow.exceptions import MlflowException

    wanted, run, where = found["lock_sha256"], found["run"] or {}, []
    if run.get("id"):
        with tracking_to(uri) as mlflow:
            try:
                path = mlflow.artifacts.download_artifacts(
                    run_id=run["id"], artifact_path=RECORDS_FOLDER, dst_path=str(scratch)
                )
                where.append({name: Path(path) / Path(name).name for name in RECORDS})
            except (MlflowException, OSError):  # the run or its files were deleted; git may still have them
                pass
    for number, commit in enumerate({found["code"].get("lock_commit"), found["code"]["commit"]} - {None}):
        files = {name: scratch / str(number) / Path(name).name for name in RECORDS}
        for name, file in files.items():
            file.parent.mkdir(exist_ok=True)
            text = git(root, "show", f"{commit}:./{name}")
            if text is not None:
                file.write_text(text + "\n", encoding="utf-8")
        where.append(files)
    for files in where:
        there = {name: file for name, file in files.items() if file.is_file()}
        lock = there.get("dvc.lock")
        if lock is not None and wanted and hashlib.sha256(lock.read_bytes()).hexdigest() == wanted:
            return there
    raise ArtifactError(
        "neither the MLflow run nor git has the lock file that made the version", where=f"version {found['version']}",
        got=wanted or "no dvc.lock when it was registered (a trial)",
        fix="the model itself is in the registry: `unidec models lineage` shows its parameters' run",
    )  # fmt: skip


def _clone(top: str, commit: str, target: Path) -> None:
    """A clone that borrows this repository's objects, at the commit."""
    commands = (
        ["git", "clone", "--quiet", "--shared", "--no-checkout", top, str(target)],
        ["git", "-C", str(target), "checkout", "--quiet", "--detach", commit],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(target, ignore_errors=True)
            raise ConfigError("git failed", where=shlex.join(command), got=done.stderr.strip()[-500:])


def _write_dvc_config(root: Path, project: Path) -> None:
    """DVC's settings of this machine, with this project's cache, and its remotes where they are."""
    own, shared = configparser.ConfigParser(interpolation=None), configparser.ConfigParser(interpolation=None)
    place = root / ".dvc"
    own.read(place / "config.local", encoding="utf-8")
    shared.read([place / "config", place / "config.local"], encoding="utf-8")
    for section in shared.sections():
        for key in {"url", "dir"} & set(shared[section]):
            value = shared[section][key]
            if "://" not in value and not Path(value).is_absolute() and ":" not in value:
                _set(own, section, key, str((place / value).resolve()))
    if not shared.has_option("cache", "dir"):
        _set(own, "cache", "dir", str(place / "cache"))
    (project / ".dvc").mkdir(exist_ok=True)
    # it may hold a remote's password
    with open(project / ".dvc" / "config.local", "x", encoding="utf-8", opener=_private) as file:
        own.write(file)


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _set(config: configparser.ConfigParser, section: str, key: str, value: str) -> None:
    if not config.has_section(section):
        config.add_section(section)
    config.set(section, key, value)


def _warnings(found: Mapping[str, Any], records: Mapping[str, Path]) -> list[str]:
    warnings = []
    if found["code"]["dirty"]:
        warnings.append("it was made with uncommitted changes, which no commit has: figures may differ")
    if found["differs"]:
        warnings.append(f"its lock file did not fit what lay on disk: {', '.join(found['differs'])}")
    missing = [name for name in RECORDS if name not in records]
    if missing:
        warnings.append(f"as the commit has them, no record is kept: {', '.join(missing)}")
    return warnings


def _commands(project: Path, uri: str) -> list[str]:
    """What brings data and model back, and what makes the model anew, with the old code."""
    python = shlex.quote(sys.executable)
    return [
        f"cd {shlex.quote(str(project))}",
        f"{python} -m dvc checkout    # or, where the cache has not all of it: {python} -m dvc pull",
        f"MLFLOW_TRACKING_URI={shlex.quote(without_credentials(uri))} {python} -m flows.train --steps {_AGAIN}",
    ]
