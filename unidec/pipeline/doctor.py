"""What crashes, full disks and other hands leave behind in a project: found, explained, and mended where that is safe.

Nothing is changed without `fix`; `fix` does only what cannot lose data.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import load_propensity
from unidec.data.storage import MANIFEST, file_sha256, read_manifest
from unidec.data.temporary import is_stale
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError, without_credentials
from unidec.model import frozen, unidec
from unidec.pipeline import paths
from unidec.pipeline.lock import is_held
from unidec.pipeline.runs import run_folders
from unidec.retrieval import bundle_folder
from unidec.tracking.doctor import Finding, Severity, environment_findings, tracking_findings
from unidec.training.checkpoint import KEPT, checkpoint_folders, read_state

_ROOTS = ("data", "outputs", "runs")
_CHECKPOINTS_ON_DISK = 2  # the one that is written beside the one that is kept
_CLOUD: tuple[tuple[str, Severity, str, str], ...] = (
    ("missing", "warning", "in neither DVC's cache nor its remote", "dvc repro, or dvc push where it still is"),
    ("deleted", "note", "in DVC's remote alone", "dvc pull"),
    ("new", "note", "in DVC's cache, not in its remote", "dvc push"),
)
_EXIT_CODES = {"note": 0, "warning": 1, "broken": 4}


def examine(deep: bool = False, fix: bool = False, root: Path = Path(".")) -> list[Finding]:
    """Look at everything.

    Args:
        deep: also hash every file of models, bundles and checkpoints; what a training reads is always hashed.
        fix: mend what can be mended without losing data.
        root: of the project.

    Returns:
        what was found, the worst first; `done` says what was mended.
    """
    run_dirs = _run_dirs(root)
    at_work = is_held(root / paths.RUNS)
    findings = [
        *_half_written(root, at_work),
        *_locks(root),
        *(finding for base in _bases(root) for finding in _artifacts(base, deep)),
        *(finding for run_dir in run_dirs for finding in _run(run_dir, deep, at_work)),
        *_disk(root, run_dirs),
        *_dvc(root),
        *tracking_findings(run_dirs, root, at_work),
        *environment_findings(root),
    ]
    if fix:
        for finding in findings:
            if finding.mend is not None:
                try:
                    finding.done = finding.mend()
                except OSError as error:
                    finding.fix = f"{finding.fix} (tried: {error})"
    return sorted(findings, key=lambda finding: -_EXIT_CODES[finding.severity])


def exit_code(findings: Collection[Finding]) -> int:
    """0: nothing is wrong (any more), 1: warnings, 4: something is broken."""
    return max((_EXIT_CODES[finding.severity] for finding in findings if finding.done is None), default=0)


def report(findings: Collection[Finding]) -> list[dict[str, Any]]:
    """For JSON."""
    return [
        {"severity": f.severity, "what": f.what, "where": f.where, "fix": f.fix, "fixable": f.mend is not None,
         "done": f.done}
        for f in findings
    ]  # fmt: skip


def rows_of(findings: Collection[Finding]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read."""
    rows = []
    for finding in findings:
        how = f"done: {finding.done}" if finding.done else finding.fix + (" (--fix does)" if finding.mend else "")
        rows.append([finding.severity, finding.what, finding.where, how])
    return ["severity", "what", "where", "fix"], rows


# -- where to look ----------------------------------------------------------------------------------


def _bases(root: Path) -> list[Path]:
    """The project, and the folders of runs with parameters of their own."""
    return [root, *sorted((root / paths.RUNS / "own").glob("*"))]


def _run_dirs(root: Path) -> list[Path]:
    return [path for base in _bases(root) for path in run_folders(base / paths.RUNS)]


# -- files ------------------------------------------------------------------------------------------


def _half_written(root: Path, at_work: bool) -> Iterator[Finding]:
    """Temporary folders and files whose writer is gone."""
    for top in _ROOTS:
        for folder, subfolders, files in os.walk(root / top):
            found = [name for name in subfolders + files if name.startswith(".") and name.endswith(".tmp")]
            subfolders[:] = [name for name in subfolders if name not in found]
            for name in found:
                path = Path(folder, name)
                # those of several ranks, and of a removal that was cut off, name no process
                nameless = name.endswith((".ranks.tmp", ".gone.0.00000000.tmp"))
                if (nameless and not at_work) or (not nameless and is_stale(path)):
                    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.is_dir() else 0
                    yield Finding(
                        f"half-written, its writer is gone ({size or path.lstat().st_size:,} bytes)", str(path),
                        "warning", "remove it", partial(_remove, path),
                    )  # fmt: skip


def _remove(path: Path) -> str:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return "removed"


def _artifacts(base: Path, deep: bool) -> Iterator[Finding]:
    """Damaged artifacts of the stages; what a training reads is always hashed, as the training itself does."""
    opened: dict[Path, Callable[[Path], object]] = {
        paths.DATASET: XMCDataset.open,
        paths.TOKENS / "queries": TokenCache.open,
        paths.TOKENS / "labels": TokenCache.open,
        paths.PROPENSITY: load_propensity,
        paths.LABEL_GRAPH: load_label_graph,
        paths.MODEL: partial(_read_folder, kind=unidec.KIND, version=unidec.VERSION, deep=deep),
        paths.BUNDLE: partial(_read_folder, kind=bundle_folder.KIND, version=bundle_folder.VERSION, deep=deep),
    }
    for name, opens in opened.items():
        yield from _damage(base / name, opens, f"dvc checkout {name}, or run its stage again")
    read_cache = partial(_read_folder, kind=frozen.KIND, version=frozen.VERSION, deep=True)
    for path in sorted((base / paths.CACHE).glob("*-*")):
        if not path.name.startswith("."):
            yield from _damage(path, read_cache, "delete it: it is computed again")


def _read_folder(path: Path, kind: str, version: int, deep: bool) -> object:
    return read_manifest(path, kind, version, deep)


def _damage(path: Path, opens: Callable[[Path], object], fix: str) -> Iterator[Finding]:
    if not path.is_dir():
        return
    try:
        opens(path)
    except ArtifactError as error:
        got = f", got: {error.got}" if error.got is not None else ""
        yield Finding(f"damaged: {error.what}{got}", error.where or str(path), "broken", fix)


# -- runs -------------------------------------------------------------------------------------------


def _run(run_dir: Path, deep: bool, at_work: bool) -> Iterator[Finding]:
    """Checkpoints that are damaged or too many, and refreshes that none of them needs."""
    whole: dict[Path, dict[str, Any]] = {}
    damaged: dict[Path, str] = {}
    for path in checkpoint_folders(run_dir):
        try:
            whole[path] = read_state(run_dir, path, verify=deep)
        except ArtifactError as error:
            damaged[path] = str(error).splitlines()[0]
    for path, why in damaged.items():
        yield Finding(
            f"a damaged checkpoint: {why.rpartition(': ')[2]}", str(path), "warning" if whole else "broken",
            "none: the newest whole one is used, and the next save removes this" if whole
            else "no other is whole: delete the run's folder to train from the start",
        )  # fmt: skip
    for path in list(whole)[KEPT:]:
        yield Finding("a checkpoint that nothing needs", str(path), "note", "none: the next save removes it")
    if at_work or damaged:
        return
    for path in _refreshes_not_needed(run_dir, list(whole.values())):
        yield Finding("a refresh that no checkpoint needs", str(path), "note", "remove it",
                      partial(_remove, path))  # fmt: skip


def _refreshes_not_needed(run_dir: Path, states: list[dict[str, Any]]) -> Iterator[Path]:
    """Those of rounds before every checkpoint, that no checkpoint names."""
    if not states:
        return
    named = {state["refresh"] for state in states}
    folders = sorted((run_dir / "refresh").glob("epoch-*"))
    earliest = min(int(state["epoch"]) for state in states)
    # the last one made before the earliest checkpoint may be that checkpoint's own round
    before = [path for path in folders if path.name[6:].isdigit() and int(path.name[6:]) <= earliest]
    for path in before[:-1]:
        manifest = path / MANIFEST
        if not manifest.is_file() or file_sha256(manifest) not in named:
            yield path


def _disk(root: Path, run_dirs: Collection[Path]) -> Iterator[Finding]:
    """Whether there is room for what the newest run saves."""
    newest = next((path for run_dir in run_dirs for path in checkpoint_folders(run_dir)[:1]), None)
    if newest is None:
        return
    size = sum(file.stat().st_size for file in newest.iterdir())
    free = shutil.disk_usage(root).free
    if free < _CHECKPOINTS_ON_DISK * size:
        yield Finding(
            f"{free:,} bytes are free; {_CHECKPOINTS_ON_DISK} checkpoints take {_CHECKPOINTS_ON_DISK * size:,}",
            str(root / paths.RUNS), "warning" if free >= size else "broken", "free some space before training",
        )  # fmt: skip


# -- DVC, as its command line -----------------------------------------------------------------------


def _locks(root: Path) -> Iterator[Finding]:
    """Locks of DVC whose holder is gone. (runs/.train.lock is the system's own: it cannot be left behind.)"""
    tmp = root / ".dvc" / "tmp"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        words = (tmp / "lock").read_text(encoding="utf-8").strip().split("|")
        # a hard link, as core.hardlink_lock makes it: "path|host|process|number"; the other kind is the system's own
        if len(words) == 4 and words[1] == socket.gethostname() and words[2].isdigit() and not _lives(int(words[2])):
            yield Finding(f"DVC's lock is held by process {words[2]}, which is gone", str(tmp / "lock"), "broken",
                          "remove it", lambda: _remove(tmp / "lock"))  # fmt: skip
    path = tmp / "rwlock"
    if not path.is_file():
        return
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
        pids = {int(entry["pid"]) for entry in _holders(held)}
    except (ValueError, KeyError, TypeError, AttributeError):
        yield Finding("DVC's list of locks is damaged: every dvc command fails", str(path), "broken", "remove it",
                      None if _dvc_is_at_work(tmp) else lambda: _remove(path))  # fmt: skip
        return
    dead = sorted(pid for pid in pids if not _lives(pid))
    if dead:
        yield Finding(
            f"locks of processes that are gone: {', '.join(map(str, dead))}", str(path), "warning",
            "take them out", None if _dvc_is_at_work(tmp) else lambda: _release(path, dead),
        )  # fmt: skip


def _holders(held: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from held.get("write", {}).values()
    for entries in held.get("read", {}).values():
        yield from entries


def _release(path: Path, dead: Collection[int]) -> str:
    held = json.loads(path.read_text(encoding="utf-8"))
    write = {key: entry for key, entry in held.get("write", {}).items() if entry["pid"] not in dead}
    read = {key: [e for e in entries if e["pid"] not in dead] for key, entries in held.get("read", {}).items()}
    path.write_text(json.dumps({"write": write, "read": {k: v for k, v in read.items() if v}}), encoding="utf-8")
    return f"taken out: {', '.join(map(str, dead))}"


def _dvc_is_at_work(tmp: Path) -> bool:
    """Whether a process holds DVC's own lock, which the system takes back from one that dies."""
    try:
        import fcntl
    except ImportError:
        return True
    for name in ("lock", "rwlock.lock"):
        with contextlib.suppress(FileNotFoundError), open(tmp / name, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
    return False


def _lives(pid: int) -> bool:
    import psutil

    return psutil.pid_exists(pid)


def _dvc(root: Path) -> Iterator[Finding]:
    """Outputs that disagree with dvc.lock, objects that are missing in the cache and in the remote."""
    if not (root / ".dvc").is_dir() or not (root / "dvc.lock").is_file():
        return
    status, why = _ask(root, "data", "status", "--json", "--granular")
    if status is None:
        yield Finding(f"dvc data status fails: {why}", "dvc.lock", "warning", "dvc doctor; dvc status -v")
        return
    changed = status.get("uncommitted", {})
    lost = _tops(status.get("not_in_cache", []))
    if lost and not any((root / path).exists() for path in (paths.DATASET, paths.MODEL, paths.BUNDLE)):
        yield Finding("nothing is built here yet", "dvc.lock", "note", "make train builds it, dvc pull fetches it")
        return
    for path, count in _tops(changed.get("modified", [])).items():
        yield Finding(f"{_files(count)} changed since dvc.lock was written", path, "warning",
                      "dvc repro makes it anew; dvc checkout takes the recorded one")  # fmt: skip
    for path, count in _tops(changed.get("deleted", [])).items():
        if path in lost:
            yield Finding(f"{_files(count)} of dvc.lock in neither workspace nor cache", path, "warning",
                          "dvc pull, or dvc repro (make train)")  # fmt: skip
        else:
            yield Finding(f"{_files(count)} of dvc.lock not in the workspace", path, "note", "dvc checkout")
    for path in lost.keys() - _tops(changed.get("deleted", [])).keys():
        yield Finding("not in DVC's cache: it could not be brought back", path, "warning", "dvc commit, or dvc pull")
    cloud, why = _ask(root, "status", "--cloud", "--json")
    if cloud is None:
        yield Finding(f"DVC's remote cannot be asked: {why}", ".dvc/config", "note", "dvc remote list")
        return
    for kind, severity, what, fix in _CLOUD:
        for path, count in _tops(path for path, found in cloud.items() if found == kind).items():
            if path not in lost:
                yield Finding(f"{_files(count)} {what}", path, severity, fix)


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _tops(names: Any) -> dict[str, int]:
    """Files by their output: the first two parts of the path."""
    return dict(Counter("/".join(str(name).rstrip("/").split("/")[:2]) for name in names))


def _ask(root: Path, *words: str) -> tuple[dict[str, Any] | None, str]:
    """A command of DVC, its JSON; None and the last words where it failed."""
    command = [sys.executable, "-m", "dvc", *words]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return None, (without_credentials(done.stderr).strip().splitlines() or ["no answer"])[-1][:200]
    return json.loads(lines[-1]), ""
