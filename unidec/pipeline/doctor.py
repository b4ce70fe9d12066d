"""Find, explain and (where that is safe) repair defects that crashes and full disks leave in a
project's files.

`dvc status` checks DVC's files, `pip check` the environment. Nothing is changed without `fix`,
which applies only repairs that cannot lose data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from unidec.bundle import bundle_folder
from unidec.data.dataset import XMCDataset
from unidec.data.label_graph import load_label_graph
from unidec.data.propensity import load_propensity
from unidec.data.storage import read_manifest
from unidec.data.temporary import is_stale, remove_folder
from unidec.data.tokens import TokenCache
from unidec.errors import ArtifactError
from unidec.model import frozen, unidec
from unidec.pipeline import paths, teaching
from unidec.pipeline.lock import is_held
from unidec.pipeline.runs import run_folders
from unidec.tracking.run import STATE, has_died, is_behind, reconcile_runs, tracking_state
from unidec.training.checkpoint import checkpoint_folders, read_state

Severity = Literal["warning", "broken"]
Repair = Callable[[], str]  # applies a fix that cannot lose data, and returns what was done
# severity, what, where, fix (as in `Finding`), and the repair
Defect = tuple[Severity, str, object, str, Repair | None]
# kinds of the folders in data/cache, by the beginning of their names; others are encoder caches
_CACHES = {"teacher": teaching.KIND, "words": teaching.WORDS_KIND}
_EXIT_CODES: dict[Severity, int] = {"warning": 1, "broken": 4}


@dataclass(frozen=True)
class Finding:
    """One defect.

    Attributes:
        severity: "warning" (something is lost or in the way) or "broken" (something will fail).
        what: one sentence. where: path. fix: what to do.
        fixable: whether `examine(fix=True)` applies the fix. done: what the fix did; None if it was
            not applied.
    """

    severity: Severity
    what: str
    where: str
    fix: str
    fixable: bool
    done: str | None


def examine(deep: bool = False, fix: bool = False) -> list[Finding]:
    """Check all of a project's files; the most severe findings come first.

    Args:
        deep: also hash every file of models, bundles and checkpoints; the inputs of training are
        always hashed.
        fix: apply the fixes that cannot lose data.
    """
    folders = [Path(), *sorted(paths.TRIALS.glob("*"))]  # the project, and its trials
    defects = list(_half_written())
    for folder in folders:
        defects += _artifacts(folder, deep)
        for run_dir in run_folders(folder / paths.RUNS):
            defects += [*_checkpoints(run_dir, deep), *_tracking(run_dir)]
    findings = []
    for severity, what, where, advice, repair in defects:
        done = None
        try:
            if fix and repair is not None:
                done = repair()
        except OSError as error:
            advice = f"{advice} (tried: {error})"
        findings.append(Finding(severity, what, str(where), advice, repair is not None, done))
    return sorted(findings, key=lambda finding: -_EXIT_CODES[finding.severity])


def exit_code(findings: Collection[Finding]) -> int:
    """Exit code of the findings that were not fixed: 0 none, 1 only warnings, 4 something is
    broken.
    """
    left = [_EXIT_CODES[finding.severity] for finding in findings if finding.done is None]
    return max(left, default=0)


def rows_of(findings: Collection[Finding]) -> list[dict[str, str]]:
    """Rows of the printed table, by column."""
    rows = []
    for one in findings:
        advice = f"{one.fix} (--fix applies this)" if one.fixable else one.fix
        if one.done:
            advice = f"done: {one.done}"
        row = {"severity": one.severity, "what": one.what, "where": one.where, "fix": advice}
        rows.append(row)
    return rows


def _half_written() -> Iterator[Defect]:
    """Temporary folders and files whose process has ended."""
    training_runs = is_held()

    temporary = {path for top in ("data", "outputs", "runs") for path in Path(top).rglob(".*.tmp")}
    outermost = [path for path in temporary if temporary.isdisjoint(path.parents)]
    what = "half-written; the process that wrote it is gone"
    for path in sorted(outermost):
        # names that several ranks share contain no process id
        is_shared = path.name.endswith(".ranks.tmp")
        if is_stale(path) or (is_shared and not training_runs):
            yield "warning", what, path, "remove it", partial(_remove, path)


def _remove(path: Path) -> str:
    remove_folder(path) if path.is_dir() else path.unlink(missing_ok=True)
    return "removed"


def _artifacts(folder: Path, deep: bool) -> Iterator[Defect]:
    """Damaged artifacts of the stages; the inputs of training are always hashed, as training itself
    does.
    """
    open_with: dict[Path, Callable[[Path], object]] = {
        paths.DATASET: XMCDataset.open,
        paths.TOKENS / "queries": TokenCache.open,
        paths.TOKENS / "labels": TokenCache.open,
        paths.PROPENSITY: load_propensity,
        paths.LABEL_GRAPH: load_label_graph,
        paths.MODEL: lambda path: read_manifest(path, unidec.KIND, unidec.VERSION, deep),
        paths.BUNDLE: lambda path: read_manifest(
            path, bundle_folder.KIND, bundle_folder.VERSION, deep
        ),
    }
    # a cache's name ends with a hash; shards of one, with which the next run resumes, are no damage
    for path in sorted((folder / paths.CACHE).glob("[!.]*-*[0-9a-f]")):
        kind = _CACHES.get(path.name.partition("-")[0], frozen.KIND)
        open_with[path.relative_to(folder)] = partial(read_manifest, kind=kind)
    for path, open_artifact in open_with.items():
        try:
            if (folder / path).is_dir():
                open_artifact(folder / path)
        except ArtifactError as error:
            got = f", got: {error.got}" if error.got is not None else ""
            fix = f"dvc checkout {path}, or run its stage again"
            if path.parent.name == "cache":
                fix = "delete it: it is computed again"
            yield "broken", f"damaged: {error.what}{got}", error.where or folder / path, fix, None


def _checkpoints(run_dir: Path, deep: bool) -> Iterator[Defect]:
    """Damaged checkpoints of a run; only warnings if an intact one remains."""
    damaged = {}
    folders = checkpoint_folders(run_dir)
    for path in folders:
        try:
            read_state(run_dir, path, verify=deep)
        except ArtifactError as error:
            damaged[path] = f"a damaged checkpoint: {error.what}"
    severity: Severity = "broken"
    fix = "no intact checkpoint is left: delete the run's folder to train from the start"
    if len(damaged) < len(folders):
        severity = "warning"
        fix = "none needed: the newest intact one is used, and the next save removes this one"
    for path, what in damaged.items():
        yield severity, what, path, fix, None


def _tracking(run_dir: Path) -> Iterator[Defect]:
    """An MLflow run that was never ended, a damaged tracking.json, and records that were not sent
    to the tracking store.
    """

    def send() -> str:
        reconcile_runs([run_dir])
        if is_behind(run_dir):
            return "recorded; the store does not answer and is updated later"
        return "sent to the store"

    state = tracking_state(run_dir)
    if (run_dir / STATE).exists() and not state:
        fix = "delete it: the next start finds the MLflow run by its checkpoint"
        yield "warning", "a damaged record of the MLflow run", run_dir / STATE, fix, None
    elif has_died(run_dir):
        what = f"MLflow run {state.get('run_id')} was never ended, and its process is gone"
        fix = "end it as KILLED; a training that resumes opens it again"
        yield "warning", what, run_dir, fix, send
    elif is_behind(run_dir):
        what = "some records were not sent to the tracking store"
        yield "warning", what, run_dir, "send them", send
