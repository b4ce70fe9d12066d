"""Where a run came from: git commit and dirtiness, DVC's lock, versions; read-only and without dvc or git libraries."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

import unidec
from unidec.ops.tracking import RUN_TAGS

ARTIFACTS = (
    "data/dataset", "data/tokens", "data/propensity", "data/label_graph", "data/validation", "outputs/model",
    "outputs/bundle",
)  # fmt: skip
"""Outputs of the pipeline whose hashes a registered version carries."""
RECORDS = ("dvc.lock", "params.yaml", "data/start.json")
"""Files that together with a commit say how a model was made; its MLflow run keeps them as they were then."""
RECORDS_FOLDER = "made_of"
DVC_TAG, DIFFERS_TAG = "dvc.", "dvc.differs"

_WRITTEN = ("dvc.lock", "data/start.json", "outputs")  # by the pipeline itself: a change there is no edit of the code
_UNFIT = re.compile(r"[^\w.\-/: ]")  # MLflow takes no other characters in a tag's name
_BLOCK = 1 << 20


def code_tags(root: Path | str = ".", besides: Iterable[str] = ()) -> dict[str, str]:
    """Tags that say which code and which lock file a run used; a fact that cannot be had is left out.

    Args:
        root: of the project.
        besides: further paths, relative to the repository, whose changes are no edit of the code: data that a run
            fetches. Those outside of it are ignored.

    Returns:
        "mlflow.source.git.commit", "git.dirty" ("true"/"false"), "dvc.lock.sha256", "unidec.version",
        "mlflow.source.name", "mlflow.user".
    """
    tags = {"unidec.version": unidec.__version__, "mlflow.source.name": "flows/train.py"}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    commit = git(root, "rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        inside = [
            path for path in besides if path and not path.startswith("/") and ".." not in PurePosixPath(path).parts
        ]
        left_out = [f":(exclude,top,literal){path}" for path in (*_WRITTEN, *inside)]
        changed = git(root, "status", "--porcelain", "--", ":/", *left_out)
        if changed is not None:
            tags["git.dirty"] = "true" if changed else "false"
    lock = lock_sha256(root)
    return tags | ({"dvc.lock.sha256": lock} if lock else {})


def lock_sha256(root: Path | str = ".") -> str | None:
    """Hash of dvc.lock; None where there is none."""
    lock = Path(root) / "dvc.lock"
    return hashlib.sha256(lock.read_bytes()).hexdigest() if lock.is_file() else None


def run_tags() -> dict[str, str]:
    """Tags that name the Prefect run which is at work, as it left them in `UNIDEC_RUN_TAGS`."""
    outer = json.loads(os.environ.get(RUN_TAGS, "{}"))
    return {key: str(value) for key, value in outer.items() if key.startswith("prefect.")}


def dvc_hash(path: str, root: Path | str = ".") -> str | None:
    """The hash under which DVC's lock file knows the output `path` (relative to the root), e.g. "0a1b...dir"."""
    return _entries(_lock(root), "outs").get(path.rstrip("/"))


def artifact_tags(raw: str, root: Path | str = ".", only: Iterable[str] = ARTIFACTS) -> dict[str, str]:
    """The hash by which DVC finds each artifact again: {"dvc.data/dataset": "0a1b...dir", ...}; {} without a lock file.

    A tag never says more than is so: an artifact that lies here with another hash than dvc.lock has for it is left out
    and named in "dvc.differs". Raw data is taken at the lock file's word, which goes with that for data/dataset.

    Args:
        raw: path of the raw data, as stage `ingest` depends on it.
        root: of the project.
        only: the artifacts that are asked for.
    """
    lock = _lock(root)
    known, tags, differ = _entries(lock, "outs"), {}, []
    for path in only:
        if path not in known:
            continue
        if md5_of(Path(root) / path) == known[path]:
            tags[f"{DVC_TAG}{path}"] = known[path]
        else:
            differ.append(path)
    source = _entries({"ingest": lock.get("ingest", {})}, "deps").get(raw.rstrip("/"))
    if source and f"{DVC_TAG}{ARTIFACTS[0]}" in tags:
        tags[DVC_TAG + _UNFIT.sub("_", raw.rstrip("/"))[:200]] = source
    return tags | ({DIFFERS_TAG: ", ".join(differ)} if differ else {})


def md5_of(path: Path) -> str | None:
    """The hash that DVC gives a file or, with ".dir" at its end, a folder; None where there is neither.

    A folder's is that of the list of its files, sorted by their names, as DVC writes it down.
    """
    if path.is_file():
        return _file_md5(path)
    if not path.is_dir():
        return None
    names = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    listed = [{"md5": _file_md5(path / name), "relpath": name} for name in names]
    return hashlib.md5(json.dumps(listed, sort_keys=True).encode(), usedforsecurity=False).hexdigest() + ".dir"


def git(root: Path | str, *words: str) -> str | None:
    """A git command's output, None where it failed: no git, no repository, a commit that is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _lock(root: Path | str) -> dict[str, Any]:
    """Stages of dvc.lock by name."""
    lock = Path(root) / "dvc.lock"
    if not lock.is_file():
        return {}
    return (yaml.safe_load(lock.read_text(encoding="utf-8")) or {}).get("stages", {})


def _entries(stages: Mapping[str, Any], kind: str) -> dict[str, str]:
    """path -> hash of the stages' outputs or dependencies."""
    entries = (entry for stage in stages.values() for entry in stage.get(kind, []))
    return {entry.get("path", "").rstrip("/"): entry["md5"] for entry in entries if entry.get("md5")}


def _file_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
