"""Where a run came from: git commit and dirtiness, DVC's lock, versions; read-only and without dvc or git libraries."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import subprocess
from pathlib import Path

import yaml

import unidec


def code_tags(root: Path | str = ".") -> dict[str, str]:
    """Tags that say which code and which lock file a run used; a fact that cannot be had is left out.

    Returns:
        "mlflow.source.git.commit", "git.dirty" ("true"/"false"), "dvc.lock.sha256", "unidec.version",
        "mlflow.source.name", "mlflow.user".
    """
    tags = {"unidec.version": unidec.__version__, "mlflow.source.name": "flows/train.py"}
    with contextlib.suppress(OSError, KeyError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    commit = _git(root, "rev-parse", "HEAD")
    if commit:
        tags["mlflow.source.git.commit"] = commit
        # the pipeline itself rewrites dvc.lock, which has a tag of its own: a change there is no edit of the code
        tags["git.dirty"] = (
            "true" if _git(root, "status", "--porcelain", "--", ":/", ":(exclude,top)dvc.lock") else "false"
        )
    lock = Path(root) / "dvc.lock"
    if lock.is_file():
        tags["dvc.lock.sha256"] = hashlib.sha256(lock.read_bytes()).hexdigest()
    return tags


def dvc_hash(path: str, root: Path | str = ".") -> str | None:
    """The hash under which DVC's lock file knows the output `path` (relative to the root), e.g. "0a1b...dir"."""
    lock = Path(root) / "dvc.lock"
    if not lock.is_file():
        return None
    stages = (yaml.safe_load(lock.read_text(encoding="utf-8")) or {}).get("stages", {})
    outs = (out for stage in stages.values() for out in stage.get("outs", []))
    return next((out.get("md5") for out in outs if out.get("path", "").rstrip("/") == path.rstrip("/")), None)


def _git(root: Path | str, *words: str) -> str:
    """A git command's output, "" where git or a repository is missing."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
