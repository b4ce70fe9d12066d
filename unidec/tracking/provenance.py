"""Provenance of a run: git commit, uncommitted changes, dvc.lock, versions; git and DVC are queried
through their commands.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from unidec.config import RESULTS, keys_deciding, load_params, value_at
from unidec.data.storage import file_sha256, text_sha256
from unidec.errors import ConfigError
from unidec.tracking.repository import GitError, ask, git, head, is_inside
from unidec.version import __version__

ARTIFACTS = (
    "data/dataset",
    "data/tokens",
    "data/propensity",
    "data/label_graph",
    "data/validation",
    "outputs/model",
    "outputs/bundle",
)
"""Pipeline outputs whose hashes are stored in a registered version's tags."""
RECORDS = ("dvc.lock", "params.yaml", "data/start.json")
"""Files that, together with a commit, record how a model was made; its MLflow run keeps copies of
them.
"""
RECORDS_FOLDER = "made_of"
DVC_TAG = "dvc."
DIFFERS_TAG = "dvc.differs"
LOCK_TAG = "dvc.lock.sha256"
LOCK_COMMIT_TAG = "git.lock_commit"  # set by the flow: the commit that has this version's dvc.lock
COMMIT_TAG = "mlflow.source.git.commit"
DIRTY_TAG = "git.dirty"
CHANGED_TAG = "git.changed"
UNKNOWN_TAG = "git.unknown"  # why git could not report the commit or the changes
CODE_TAGS = (COMMIT_TAG, DIRTY_TAG, CHANGED_TAG, UNKNOWN_TAG)

PARAMS = "params.yaml"  # a key of `CHANGED_TAG`; compared by its values and its recipe's
_CODE = ("unidec", "flows")
_LOCK = Path("dvc.lock")
_DIFF = ("diff", "--name-only", "--relative", "-z")
_LONGEST_TAG = 5000
log = logging.getLogger(__name__)
_UNFIT = re.compile(r"[^\w.\-/: ]")  # characters that MLflow does not allow in a tag's name


def code_tags(made_with: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Tags that identify the code and the lock file of a run in the working folder; unavailable
    facts are left out.

    A run is dirty only if something that affects a model changed: tracked code files (compared with
    the commit by content) or parameters (compared with the commit's params.yaml by value). Data has
    its own hashes: `artifact_tags`.

    Args:
        made_with: all parameters that made the model, by section; None: parameters are not
        compared.

    Returns:
        "mlflow.source.git.commit", "git.dirty" ("true"/"false"), "git.changed" (JSON: file -> hash
        of its content, for `uncommitted`), "git.unknown" (why git could not report these),
        "dvc.lock.sha256", "unidec.version", "mlflow.source.name", "mlflow.user".
    """
    tags = {
        "unidec.version": __version__,
        "mlflow.source.name": "flows/train.py",
        "mlflow.user": getpass.getuser(),
    }
    tags |= _git_tags(_project(), made_with)
    if _LOCK.is_file():
        tags[LOCK_TAG] = file_sha256(_LOCK)
    return tags


def _git_tags(project: Path, made_with: Mapping[str, Any] | None) -> dict[str, str]:
    """The tags of `CODE_TAGS`; {} without a repository. In a repository without a commit
    everything is uncommitted.
    """
    if not is_inside(project):
        return {}
    tags: dict[str, str] = {}
    try:
        commit = head(project)
        if commit is None:
            return {DIRTY_TAG: "true", CHANGED_TAG: json.dumps({"every file": ""})}
        tags[COMMIT_TAG] = commit
        changed = _changed_files(project, commit)
    except GitError as error:
        return tags | {UNKNOWN_TAG: error.what}
    made = made_with and _parameters_sha256(made_with, project)
    if made and made != _committed_sha256(project, commit):
        changed[PARAMS] = made
    tags[DIRTY_TAG] = str(bool(changed)).lower()
    text = json.dumps(changed, sort_keys=True)
    if changed and len(text) <= _LONGEST_TAG:
        tags[CHANGED_TAG] = text
    return tags


def unknown_code(tags: Mapping[str, str]) -> str:
    """Why the code that made a version is unknown, from the version's tags; "" if it is known, or
    there was no repository.
    """
    return tags.get(UNKNOWN_TAG, "")


def is_clean(tags: Mapping[str, str]) -> bool:
    """Whether a version was made without uncommitted changes, or outside a repository."""
    return tags.get(DIRTY_TAG) != "true" and not unknown_code(tags)


def uncommitted(tags: Mapping[str, str]) -> list[str]:
    """Files that were not committed when a version was made (from its tags, see `code_tags`), and
    differ in the commit that is checked out.
    """
    return differing(tags, "HEAD") if tags.get(DIRTY_TAG) == "true" else []


def differing(tags: Mapping[str, str], at: str) -> list[str]:
    """Files that made a version (from its tags) and differ in the commit `at`; files added since
    did not exist when it was made.
    """
    if tags.get(DIRTY_TAG) == "true" and CHANGED_TAG not in tags:
        return ["changes that were not recorded"]
    project = _project()
    commit = tags.get(COMMIT_TAG, "")
    changed: dict[str, str] = json.loads(tags.get(CHANGED_TAG, "{}"))
    since = git(project, *_DIFF, "--diff-filter=a", commit, at, "--", *_CODE)
    if since is None:
        return sorted(changed) or ["files that git does not list"]
    made = changed.pop(PARAMS, None) or _committed_sha256(project, commit)
    left = set(filter(None, since.split("\0"))) - changed.keys()
    for name, blob in changed.items():
        if (git(project, "rev-parse", f"{at}:./{name}") or "") != blob:
            left.add(name)
    if made != _committed_sha256(project, at):
        left.add(PARAMS)
    return sorted(left)


def _project() -> Path:
    """The folder of params.yaml: the working folder, or the project of a trial in runs/own/."""
    here = Path.cwd()
    levels = (here, *here.parents[:3])
    return next((folder for folder in levels if (folder / PARAMS).is_file()), here)


def _changed_files(project: Path, commit: str) -> dict[str, str]:
    """Tracked files that differ from the commit -> git's hash of their content, "" if deleted."""
    found = ask(project, *_DIFF, commit, "--", *_CODE)
    names = list(filter(None, found.split("\0")))
    there = [name for name in names if (project / name).is_file()]
    hashes = ask(project, "hash-object", "--", *there).split() if there else []
    return dict.fromkeys(names, "") | dict(zip(there, hashes, strict=True))


def _committed_sha256(project: Path, commit: str) -> str:
    """`_parameters_sha256` of the commit's params.yaml and its recipe; "" if the commit has no
    readable params.yaml.
    """
    text = git(project, "show", f"{commit}:./{PARAMS}")
    if text is None:
        return ""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yaml") as file:
        print(text, file=file, flush=True)
        try:
            return _parameters_sha256(load_params(file.name).model_dump(), project)
        except ConfigError:
            return ""


def _parameters_sha256(params: Mapping[str, Any], project: Path) -> str:
    """sha256 (hex) of the values of all parameters that decide a result; paths in the project are
    made relative to it.
    """
    values = {key: value_at(params, key) for key in keys_deciding(*RESULTS, warm=True)}
    # a trial's paths are absolute
    text = json.dumps(values, sort_keys=True).replace(f"{project}{os.sep}", "")
    return text_sha256(text)


def dvc_hash(path: str) -> str | None:
    """The hash of the output `path` in dvc.lock, e.g. "0a1b...dir"; None if it is not there."""
    return _entries(_lock(), "outs").get(path.rstrip("/"))


def artifact_tags(raw: str, only: Iterable[str] = ARTIFACTS) -> dict[str, str]:
    """DVC's hash of each artifact: {"dvc.data/dataset": "0a1b...dir", ...}; {} without a lock file.

    An artifact whose content differs from its hash in dvc.lock, according to DVC, is left out and
    named in "dvc.differs"; if DVC does not answer, all artifacts are. The hash of the raw data (at
    `raw`) is taken from dvc.lock unchecked, if data/dataset matches its hash there."""
    lock = _lock()
    outs = _entries(lock, "outs")
    known = {path: outs[path] for path in only if path in outs}
    changed = changed_outputs() if known else set()
    differ = [path for path in known if changed is None or path in changed]
    tags = {f"{DVC_TAG}{path}": md5 for path, md5 in known.items() if path not in differ}
    if differ:
        tags[DIFFERS_TAG] = ", ".join(differ)
    raw = raw.rstrip("/")
    source = _entries({"ingest": lock.get("ingest", {})}, "deps").get(raw)
    if source and f"{DVC_TAG}{ARTIFACTS[0]}" in tags:
        tags[DVC_TAG + _UNFIT.sub("_", raw)[:200]] = source
    return tags


def changed_outputs() -> set[str] | None:
    """Outputs in dvc.lock that changed or are missing; None if DVC does not answer."""
    command = [sys.executable, "-m", "dvc", "data", "status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        log.warning("dvc data status: %s", done.stderr.strip()[-500:])
        return None
    uncommitted = json.loads(done.stdout).get("uncommitted", {})
    return {path.rstrip("/") for paths in uncommitted.values() for path in paths}


def _lock() -> dict[str, Any]:
    """Stages of dvc.lock by name."""
    if not _LOCK.is_file():
        return {}
    found = yaml.safe_load(_LOCK.read_text(encoding="utf-8")) or {}
    return found.get("stages", {})


def _entries(stages: Mapping[str, Any], kind: str) -> dict[str, str]:
    """path -> hash of the stages' outputs or dependencies."""
    return {
        entry.get("path", "").rstrip("/"): entry["md5"]
        for stage in stages.values()
        for entry in stage.get(kind, [])
        if entry.get("md5")
    }
