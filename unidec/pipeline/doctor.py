"""What crashes and full disks leave behind in a project's own files: found, explained, and repaired where that is safe.

DVC's files are checked by `dvc status`, the environment by `pip check`. Nothing is changed without `fix`; `fix` does
only what cannot lose data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import load_propensity
from unidec.data.storage import is_stale, read_manifest, remove_folder
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError
from unidec.model import frozen, unidec
from unidec.pipeline import paths
from unidec.pipeline.lock import is_held
from unidec.pipeline.runs import run_folders
from unidec.retrieval import bundle_folder
from unidec.tracking.run import STATE, Tracker, has_died, is_behind, tracking_state
from unidec.training.checkpoint import checkpoint_folders, read_state

Severity = Literal["warning", "broken"]
# severity, what, where, fix; and what does the fix where that cannot lose data, and returns what was done
Found = tuple[Severity, str, object, str, Callable[[], str] | None]
_EXIT_CODES: dict[Severity, int] = {"warning": 1, "broken": 4}


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be.

    Attributes:
        severity: "warning" (something is lost or in the way) or "broken" (something will fail).
        what: one sentence; where: path; fix: what to do.
        fixable: `examine(fix=True)` does it; done: what it did.
    """

    severity: Severity
    what: str
    where: str
    fix: str
    fixable: bool
    done: str | None


def examine(deep: bool = False, fix: bool = False) -> list[Finding]:
    """Look at everything; the worst finding comes first.

    Args:
        deep: also hash every file of models, bundles and checkpoints; what a training reads is always hashed.
        fix: repair what can be repaired without losing data; `done` of a finding names it.
    """
    bases = [Path(), *sorted((paths.RUNS / "own").glob("*"))]  # runs with parameters of their own
    found = list(_half_written())
    for base in bases:
        found += _artifacts(base, deep)
        for run_dir in run_folders(base / paths.RUNS):
            found += [*_checkpoints(run_dir, deep), *_tracking(run_dir)]
    findings = []
    for severity, what, where, how, repair in found:
        done = None
        try:
            done = repair() if fix and repair is not None else None
        except OSError as error:
            how = f"{how} (tried: {error})"
        findings.append(Finding(severity, what, str(where), how, repair is not None, done))
    return sorted(findings, key=lambda finding: -_EXIT_CODES[finding.severity])


def exit_code(findings: Collection[Finding]) -> int:
    """0: nothing is wrong (any more), 1: warnings, 4: something is broken."""
    return max((_EXIT_CODES[finding.severity] for finding in findings if finding.done is None), default=0)


def rows_of(findings: Collection[Finding]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the table that people read."""
    rows = []
    for one in findings:
        how = f"done: {one.done}" if one.done else one.fix + (" (--fix does)" if one.fixable else "")
        rows.append([one.severity, one.what, one.where, how])
    return ["severity", "what", "where", "fix"], rows


def _half_written() -> Iterator[Found]:
    """Temporary folders and files whose writer is gone."""
    at_work = is_held()

    def remove(path: Path) -> str:
        remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
        return "removed"

    found = {path for top in ("data", "outputs", "runs") for path in Path(top).rglob(".*.tmp")}
    for path in sorted(path for path in found if found.isdisjoint(path.parents)):
        # those of several ranks, and of an interrupted removal, name no process
        nameless = path.name.endswith((".ranks.tmp", ".gone.0.00000000.tmp"))
        if (not at_work) if nameless else is_stale(path):
            yield "warning", "half-written, its writer is gone", path, "remove it", partial(remove, path)


def _artifacts(base: Path, deep: bool) -> Iterator[Found]:
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
    for path in sorted((base / paths.CACHE).glob("[!.]*-*")):
        opened[path] = lambda path: read_manifest(path, frozen.KIND, frozen.VERSION, True)
    for name, opens in opened.items():
        try:
            if (base / name).is_dir():
                opens(base / name)
        except ArtifactError as error:
            got = f", got: {error.got}" if error.got is not None else ""
            fix = f"dvc checkout {name}, or run its stage again"
            if name.parent.name == "cache":
                fix = "delete it: it is computed again"
            yield "broken", f"damaged: {error.what}{got}", error.where or base / name, fix, None


def _checkpoints(run_dir: Path, deep: bool) -> Iterator[Found]:
    damaged, folders = {}, checkpoint_folders(run_dir)
    for path in folders:
        try:
            read_state(run_dir, path, verify=deep)
        except ArtifactError as error:
            damaged[path] = f"a damaged checkpoint: {error.what}"
    for path, what in damaged.items():
        if len(damaged) < len(folders):
            fix = "none: the newest whole one is used, and the next save removes this"
            yield "warning", what, path, fix, None
        else:
            yield "broken", what, path, "no other is whole: delete the run's folder to train from the start", None


def _tracking(run_dir: Path) -> Iterator[Found]:
    """An MLflow run that was never ended, and what was never sent to its store."""

    def end() -> str:
        Tracker.resume(run_dir).finish("KILLED")
        return "noted as KILLED; the store is away and is updated later" if is_behind(run_dir) else "ended as KILLED"

    def send() -> str:
        return "sent" if Tracker.resume(run_dir).flush() else "the store is away: it is kept"

    state = tracking_state(run_dir)
    if (run_dir / STATE).exists() and not state:
        fix = "delete it: the next start finds the run by its checkpoint"
        yield "warning", "a damaged note of the MLflow run", run_dir / STATE, fix, None
    elif has_died(run_dir):
        what = f"MLflow run {state.get('run_id')} was never ended, and its process is gone"
        yield "warning", what, run_dir, "end it as KILLED; a training that resumes opens it again", end
    elif is_behind(run_dir):
        yield "warning", "not everything that was logged was sent to the tracking store", run_dir, "send it", send
