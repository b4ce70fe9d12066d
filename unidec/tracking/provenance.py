"""Where a run came from: git commit and dirtiness, DVC's lock, versions; read-only and without dvc or git libraries."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from unidec.config import OPERATIONS, load_params
from unidec.errors import ConfigError
from unidec.tracking.run import RUN_TAGS
from unidec.tracking.store import user
from unidec.version import __version__

ARTIFACTS = (
    "data/dataset", "data/tokens", "data/propensity", "data/label_graph", "data/validation", "outputs/model",
    "outputs/bundle",
)  # fmt: skip
"""Outputs of the pipeline whose hashes a registered version carries."""
RECORDS = ("dvc.lock", "params.yaml", "data/start.json")
"""Files that together with a commit say how a model was made; its MLflow run keeps them as they were then."""
RECORDS_FOLDER = "made_of"
DVC_TAG, DIFFERS_TAG = "dvc.", "dvc.differs"
COMMIT_TAG, DIRTY_TAG, CHANGED_TAG = "mlflow.source.git.commit", "git.dirty", "git.changed"

_CODE = ("unidec", "flows")  # and what dvc.lock lists as dependencies
_WRITTEN = ("params.yaml", "dvc.lock", "data/start.json", "outputs")  # compared by value, or written by the pipeline
_LONGEST_TAG = 5000
_UNFIT = re.compile(r"[^\w.\-/: ]")  # MLflow takes no other characters in a tag's name


def code_tags(
    root: Path | str = ".", besides: Iterable[str] = (), made_with: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Tags that name the code and the lock file of a run; a fact that is not available is left out.

    Only what decides a model makes it dirty: tracked files of the code and of DVC's dependencies, compared with the
    commit by content, and parameters, compared with the commit's params.yaml by value.

    Args:
        root: of the project, or a trial's folder in it.
        besides: further paths, relative to the project, whose changes do not count: data that a run fetches. Those
            outside of it are ignored.
        made_with: all parameters that made the model, by section; None: parameters are not compared.

    Returns:
        "mlflow.source.git.commit", "git.dirty" ("true"/"false"), "git.changed" (JSON: what `uncommitted` compares),
        "dvc.lock.sha256", "unidec.version", "mlflow.source.name", "mlflow.user".
    """
    tags = {"unidec.version": __version__, "mlflow.source.name": "flows/train.py", "mlflow.user": user()}
    project = _project(root)
    if commit := git(project, "rev-parse", "HEAD"):
        tags[COMMIT_TAG] = commit
        files = _changed_files(project, commit, _paths_of_code(project, besides))
        values = {} if made_with is None else _changed_parameters(project, commit, made_with)
        if files is not None:
            tags[DIRTY_TAG] = "true" if files or values else "false"
            changed = json.dumps({"files": files, "parameters": values}, sort_keys=True)
            if (files or values) and len(changed) <= _LONGEST_TAG:
                tags[CHANGED_TAG] = changed
    lock = lock_sha256(root)
    return tags | ({"dvc.lock.sha256": lock} if lock else {})


def uncommitted(tags: Mapping[str, str], root: Path | str = ".") -> list[str]:
    """Files and parameters that made a version and are not in the commit that is checked out, by name.

    Args:
        tags: of the version: see `code_tags`.
        root: of the project.

    Returns:
        [] where the version was made from a commit, or all it was made of has been committed since.
    """
    if tags.get(DIRTY_TAG) != "true":
        return []
    try:
        changed = json.loads(tags[CHANGED_TAG])
        files, values = dict(changed["files"]), dict(changed["parameters"])
    except (KeyError, TypeError, ValueError):
        return ["changes that were not recorded"]
    project, commit = _project(root), tags.get(COMMIT_TAG, "")
    # files that were added since were not there when the version was made
    words = ("--diff-filter=a", commit, "HEAD", "--", *_paths_of_code(project))
    since = git(project, "diff", "--name-only", "--relative", "-z", *words)
    if since is None:
        return [*sorted(files), *sorted(values)]
    left = {name for name in since.split("\0") if name and name not in files}
    left |= {name for name, blob in files.items() if (git(project, "rev-parse", f"HEAD:./{name}") or "") != blob}
    made_with, now = _committed_parameters(project, commit) | values, _committed_parameters(project, "HEAD")
    return [*sorted(left), *(key for key in sorted(made_with | now) if made_with.get(key) != now.get(key))]


def _project(root: Path | str) -> Path:
    """The folder of params.yaml: `root`, or for a trial below runs/own/ the project that it belongs to."""
    root = Path(root).resolve()
    return next((folder for folder in (root, *root.parents[:3]) if (folder / "params.yaml").is_file()), root)


def _paths_of_code(project: Path, besides: Iterable[str] = ()) -> list[str]:
    """Pathspecs, relative to the project, of all files that decide a model."""

    def inside(paths: Iterable[str]) -> list[str]:
        return [path for path in paths if path and not path.startswith("/") and ".." not in PurePosixPath(path).parts]

    wanted = sorted({*_CODE, *inside(_entries(_lock(project), "deps"))})
    left_out = (*_WRITTEN, *inside(besides))
    return [*(f":(literal){path}" for path in wanted), *(f":(exclude,literal){path}" for path in left_out)]


def _changed_files(project: Path, commit: str, paths: list[str]) -> dict[str, str] | None:
    """Tracked files that differ from the commit -> git's hash of their content, "" where deleted; None without git."""
    found = git(project, "diff", "--name-only", "--relative", "-z", commit, "--", *paths)
    if found is None:
        return None
    names = [name for name in found.split("\0") if name]
    there = [name for name in names if (project / name).is_file()]
    hashes = (git(project, "hash-object", "--", *there) or "").split() if there else []
    return dict.fromkeys(names, "") | dict(zip(there, hashes, strict=False))


def _changed_parameters(project: Path, commit: str, made_with: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that differ from the commit's; None as a value: the commit alone has this key."""
    mine, its = _by_key(made_with, project), _committed_parameters(project, commit)
    return {key: mine.get(key) for key in mine | its if mine.get(key) != its.get(key)}


def _committed_parameters(project: Path, commit: str) -> dict[str, Any]:
    """Key path -> value of what the commit's params.yaml and its recipe say; {} where it has none that can be read."""
    text = git(project, "show", f"{commit}:./params.yaml")
    if text is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            return _by_key(load_params(file).model_dump(), project)
        except ConfigError:
            return {}


def _by_key(params: Mapping[str, Any], project: Path) -> dict[str, Any]:
    """Parameters that decide a model by key path, as JSON has them; paths in the project relative to it."""
    values: dict[str, Any] = {}
    for name, section in params.items():
        if name not in (*OPERATIONS, "recipe", "run"):  # a recipe counts by its values
            leaves = {f"{name}.{k}": v for k, v in section.items()} if isinstance(section, Mapping) else {name: section}
            values |= leaves
    inside = f"{project}{os.sep}"  # a trial's paths are absolute
    values = {key: v.removeprefix(inside) if isinstance(v, str) else v for key, v in values.items()}
    return json.loads(json.dumps(values))


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

    An artifact that is here with another hash than dvc.lock has for it is left out
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
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
