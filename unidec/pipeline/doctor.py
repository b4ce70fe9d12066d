"""What crashes and full disks leave behind in a project's own files: found, explained, and repaired where that is safe.

DVC's files are checked by `dvc status`, the environment by `pip check`. Nothing is changed without `fix`; `fix` does
only what cannot lose data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import load_propensity
from unidec.data.storage import is_stale, read_manifest
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError
from unidec.machine import available_disk
from unidec.model import frozen, unidec
from unidec.pipeline import paths
from unidec.pipeline.lock import is_held
from unidec.pipeline.runs import run_folders
from unidec.retrieval import bundle_folder
from unidec.tracking.outbox import Outbox
from unidec.tracking.run import STATE, Tracker, has_died, tracking_state
from unidec.training.checkpoint import checkpoint_folders, read_state

_ROOTS = ("data", "outputs", "runs")
_EXIT_CODES = {"warning": 1, "broken": 4}


@dataclass
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: "warning" (something is lost or in the way) or "broken" (something will fail).
        what: one sentence; where: path; fix: what to do.
        repair: does it, where that cannot lose data; returns what was done.
        done: what `repair` returned.
    """

    severity: Literal["warning", "broken"]
    what: str
    where: str
    fix: str
    repair: Callable[[], str] | None = None
    done: str | None = None


def examine(deep: bool = False, fix: bool = False, root: Path = Path(".")) -> list[Finding]:
    """Look at everything; the worst finding comes first.

    Args:
        deep: also hash every file of models, bundles and checkpoints; what a training reads is always hashed.
        fix: repair what can be repaired without losing data; `done` of a finding names it.
        root: of the project.
    """
    bases = [root, *sorted((root / paths.RUNS / "own").glob("*"))]  # runs with parameters of their own
    run_dirs = [path for base in bases for path in run_folders(base / paths.RUNS)]
    findings = [
        *_half_written(root, is_held(root / paths.RUNS)),
        *(finding for base in bases for finding in _artifacts(base, deep)),
        *(finding for run_dir in run_dirs for finding in _checkpoints(run_dir, deep)),
        *(finding for run_dir in run_dirs for finding in _tracking(run_dir)),
        *_disk(root, run_dirs),
    ]
    if fix:
        for finding in findings:
            if finding.repair is not None:
                try:
                    finding.done = finding.repair()
                except OSError as error:
                    finding.fix = f"{finding.fix} (tried: {error})"
    return sorted(findings, key=lambda finding: -_EXIT_CODES[finding.severity])


def exit_code(findings: Collection[Finding]) -> int:
    """0: nothing is wrong (any more), 1: warnings, 4: something is broken."""
    return max((_EXIT_CODES[finding.severity] for finding in findings if finding.done is None), default=0)


def report(findings: Collection[Finding]) -> list[dict[str, Any]]:
    """For JSON."""
    found = [vars(finding) | {"fixable": finding.repair is not None} for finding in findings]
    return [{key: value for key, value in one.items() if key != "repair"} for one in found]


def rows_of(findings: Collection[Finding]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read."""
    rows = []
    for finding in findings:
        how = f"done: {finding.done}" if finding.done else finding.fix + (" (--fix does)" if finding.repair else "")
        rows.append([finding.severity, finding.what, finding.where, how])
    return ["severity", "what", "where", "fix"], rows


def _half_written(root: Path, at_work: bool) -> Iterator[Finding]:
    """Temporary folders and files whose writer is gone."""
    for top in _ROOTS:
        for folder, subfolders, files in os.walk(root / top):
            found = [name for name in subfolders + files if name.startswith(".") and name.endswith(".tmp")]
            subfolders[:] = [name for name in subfolders if name not in found]
            for path in (Path(folder, name) for name in found):
                # those of several ranks, and of an interrupted removal, name no process
                is_nameless = path.name.endswith((".ranks.tmp", ".gone.0.00000000.tmp"))
                if (is_nameless and not at_work) or (not is_nameless and is_stale(path)):
                    size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) or path.lstat().st_size
                    what = f"half-written, its writer is gone ({size:,} bytes)"
                    yield Finding("warning", what, str(path), "remove it", partial(_remove, path))


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
        paths.MODEL: lambda path: read_manifest(path, unidec.KIND, unidec.VERSION, deep),
        paths.BUNDLE: lambda path: read_manifest(path, bundle_folder.KIND, bundle_folder.VERSION, deep),
    }
    for name, opens in opened.items():
        yield from _damage(base / name, opens, f"dvc checkout {name}, or run its stage again")
    for path in sorted((base / paths.CACHE).glob("[!.]*-*")):
        yield from _damage(
            path, lambda path: read_manifest(path, frozen.KIND, frozen.VERSION, True), "delete it: it is computed again"
        )


def _damage(path: Path, opens: Callable[[Path], object], fix: str) -> Iterator[Finding]:
    if not path.is_dir():
        return
    try:
        opens(path)
    except ArtifactError as error:
        got = f", got: {error.got}" if error.got is not None else ""
        yield Finding("broken", f"damaged: {error.what}{got}", error.where or str(path), fix)


def _checkpoints(run_dir: Path, deep: bool) -> Iterator[Finding]:
    damaged: dict[Path, str] = {}
    folders = checkpoint_folders(run_dir)
    for path in folders:
        try:
            read_state(run_dir, path, verify=deep)
        except ArtifactError as error:
            damaged[path] = str(error).splitlines()[0]
    for path, why in damaged.items():
        what = f"a damaged checkpoint: {why.rpartition(': ')[2]}"
        if len(damaged) < len(folders):
            fix = "none: the newest whole one is used, and the next save removes this"
            yield Finding("warning", what, str(path), fix)
        else:
            fix = "no other is whole: delete the run's folder to train from the start"
            yield Finding("broken", what, str(path), fix)


def _tracking(run_dir: Path) -> Iterator[Finding]:
    """An MLflow run that was never ended, and what was never sent to its store."""
    if (run_dir / STATE).exists() and not tracking_state(run_dir):
        fix = "delete it: the next start finds the run by its checkpoint"
        yield Finding("warning", "a damaged note of the MLflow run", str(run_dir / STATE), fix)
    elif has_died(run_dir):
        what = f"MLflow run {tracking_state(run_dir).get('run_id')} was never ended, and its process is gone"
        fix = "end it as KILLED; a training that resumes opens it again"
        yield Finding("warning", what, str(run_dir), fix, partial(_end, run_dir))
    elif Outbox(run_dir) and tracking_state(run_dir).get("status"):
        what = "not everything that was logged was sent to the tracking store"
        yield Finding("warning", what, str(run_dir), "send it", partial(_send, run_dir))


def _end(run_dir: Path) -> str:
    Tracker.resume(run_dir).finish("KILLED")
    return "noted as KILLED; the store is away and is updated later" if Outbox(run_dir) else "ended as KILLED"


def _send(run_dir: Path) -> str:
    return "sent" if Tracker.resume(run_dir).flush(force=True) else "the store is away: it is kept"


def _disk(root: Path, run_dirs: Collection[Path]) -> Iterator[Finding]:
    """Whether there is room for what the newest run saves."""
    newest = next((path for run_dir in run_dirs for path in checkpoint_folders(run_dir)[:1]), None)
    if newest is None:
        return
    size, free = sum(file.stat().st_size for file in newest.iterdir()), available_disk(root)
    if free < 2 * size:  # the checkpoint that is written beside the one that is kept
        what = f"{free:,} bytes are free; 2 checkpoints take {2 * size:,}"
        severity: Literal["warning", "broken"] = "warning" if free >= size else "broken"
        yield Finding(severity, what, str(root / paths.RUNS), "free some space before training")
