"""Searches for the best validation metric: of any parameters (`unidec tune`), or of one cell."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from unidec.comparison.chosen import Trials
from unidec.comparison.comparison_file import DataEntry
from unidec.comparison.jobs import Job, slug
from unidec.comparison.trials import STUDY, Search, Subject, Tuned
from unidec.comparison.tuning_space import (
    read_space,
)
from unidec.comparison.workspace import Comparison
from unidec.config import (
    Params,
    build_params,
    leaves,
    nearest,
)
from unidec.errors import ConfigError
from unidec.interrupt import signals_raise
from unidec.metric_names import metric_names
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.runs import tracked
from unidec.training.stopping import METRIC

ROOT = Path("runs/tune")
EXPERIMENT = "unidec-tune"


def tune(
    params: Params,
    file: str | Path,
    trials: int,
    metric: str = METRIC,
    folder: str | Path | None = None,
) -> Tuned:
    """Search the parameters for which a file gives ranges, with Optuna's TPE; its median rule
    prunes bad trials.

    The first trial uses the unchanged parameters, if these lie in the ranges.

    Args:
        params: all other parameters, and the seed of the search.
        file: see `read_space`.
        trials: total number; a resumed search adds the missing ones.
        metric: on the validation split, by the heads alone, after a trial's last epoch.
        folder: folder of the search; None: runs/tune/<name of the file>.

    Raises:
        Stopped: by SIGINT or SIGTERM, after the running trial's checkpoint was written.
        ConfigError: wrong file or metric, no validation split, a folder of another search, Optuna
        is missing.
        TrainingError: another process uses the folder, the first trial fails with unchanged
        parameters, or all fail.
    """
    if metric not in metric_names():
        near = nearest(metric, metric_names())
        raise ConfigError(
            "no such metric",
            where="--metric",
            got=metric,
            expected="nDCG@5, PSP@5, tail/R@100, ...",
            fix=near and f"--metric {near}",
        )
    root = Path(folder or ROOT / Path(file).stem)
    if not (root / STUDY).exists() and any(root.glob("[!.]*")):
        raise ConfigError("not the folder of a search", where=root, fix="another folder with --out")
    subject = Subject(
        job=_job_of(params),
        ranges=read_space(file, params),
        metric=metric,
        root=root,
        workspace=root,
        name=root.name,
        asked=params,
    )
    signals = signals_raise(
        "re-run the command to resume", "stopped at once; finished trials are kept"
    )
    with signals, _search(subject) as search:
        return search.run(trials) or search.write_best(params)


def _job_of(params: Params) -> Job:
    """The training of these parameters, for a process in another folder."""
    values = dict(leaves(params)) | {"tracking.experiment": EXPERIMENT}
    for key in ("encoder.start", "teacher.bundle"):
        if values[key]:
            values[key] = str(Path(values[key]).resolve())
    path = params.data.path
    tokens = params.tokens
    return Job(
        data=Path(path).name,
        cell="trial",
        seed=params.seed,
        kind="trial",
        params=build_params(values, {}, "trial"),
        entry=DataEntry(path=path, text=tokens.text, max_length=tokens.max_length),
        settings={},
    )


def subject_of(comparison: Comparison, key: str, environment: Mapping[str, str]) -> Subject:
    """The search of a recipe cell in a comparison's `tuning`."""
    job = comparison.jobs[key]
    name = comparison.file.name
    return Subject(
        job=job,
        ranges=job.ranges,
        metric=METRIC,
        root=comparison.root / "tuning" / slug(job.cell),
        workspace=comparison.root,
        name=f"{name} {job.cell}",
        jobs=comparison.jobs,
        kept=comparison.overrides,
        environment=environment,
        tags={"comparison": name},
    )


@contextlib.contextmanager
def _search(subject: Subject, stopping: threading.Event | None = None) -> Iterator[Search]:
    """A search in its folder, locked against other processes."""
    with (
        one_at_a_time(subject.root),
        contextlib.closing(Search(subject, stopping)) as search,
        tracked(subject.root),
    ):
        yield search


def tune_cell(subject: Subject, trials: int, stopping: threading.Event) -> Trials:
    """Search the settings of a comparison's cell.

    Args:
        stopping: ends the search after the running trial's checkpoint was written.

    Returns:
        The search's trials.

    Raises:
        TrainingError: all trials failed, or the search is being stopped.
    """
    with _search(subject, stopping) as search:
        search.run(trials)
        search.best()
        return search.figures()
