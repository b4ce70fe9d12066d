"""The tasks of the flows: each calls one stage of the library, or DVC; paths, hashes and small dicts in and out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from flows import artifacts, publish, reproduce, source
from unidec import pipeline
from unidec.config import Params
from unidec.errors import UnidecError

if TYPE_CHECKING:
    from unidec.pipeline.training import Run

Work = Callable[[], dict[str, Any]]

log = logging.getLogger("unidec.flows")


def worth_retrying(_task: Any, _task_run: Any, state: Any) -> bool:
    """An error that names its fix stays one however often it is tried; a lock, a network or a server may recover."""
    return not isinstance(state.result(raise_on_failure=False), UnidecError)


# DVC and our checkpoints decide what is done already: a result cache on top of them could only disagree
_once: dict[str, Any] = {"cache_policy": NO_CACHE, "persist_result": False}
_again: dict[str, Any] = _once | {
    "retries": 3,
    "retry_delay_seconds": [2, 10, 30],
    "retry_condition_fn": worth_retrying,
}


# -- data -------------------------------------------------------------------------------------------------------------


@task(name="fetch", task_run_name="fetch", **_again)
def fetch(params: Params) -> dict[str, Any]:
    """The newest raw data, from where section `source` names."""
    return source.fetch(params, log.info)


@task(name="prepare data", task_run_name="prepare data", **_again)
def prepare_data(stages: Sequence[str]) -> None:
    """Brings the data stages up to date through DVC, all in one `dvc repro`."""
    reproduce.reproduce(stages, log.info)


@task(name="data", task_run_name="{stage}", **_once)
def data_step(stage: str, params: Params) -> dict[str, Any]:
    """Runs a data stage here, without DVC."""
    return getattr(pipeline, stage)(params)


@task(name="data change", task_run_name="data change", **_again)
def data_change(params: Params) -> dict[str, Any]:
    """Compares the data with what the champion was trained on; a change beyond the limits stops."""
    return pipeline.data_change(params)


# -- model ------------------------------------------------------------------------------------------------------------


@task(name="choose start", task_run_name="choose start", **_again)
def choose_start(params: Params, kind: str | None) -> dict[str, Any]:
    """From the champion or from nothing -> data/start.json."""
    return pipeline.choose_start(params, kind)


@task(name="start run", task_run_name="start run", **_again)
def start_run(params: Params) -> Run:
    """Finds the checkpoint to resume from, or begins a run; opens the MLflow run."""
    return pipeline.start_run(params)


# The phases of a round (`unidec.training.fit`), a task each. A round is not retried: what ended it would end it again,
# and the next run resumes from its checkpoint.
@task(name="cluster", task_run_name="cluster {number} of {total}", **_once)
def cluster(work: Work, number: int, total: int) -> dict[str, Any]:
    """Clusters the training queries for a round."""
    report = work()
    artifacts.show_refresh("clusters", number, report)
    return report


@task(name="mine", task_run_name="mine {number} of {total}", **_once)
def mine(work: Work, number: int, total: int) -> dict[str, Any]:
    """Mines hard negatives for a round: with the clusters that is its refresh."""
    report = work()
    artifacts.show_refresh("hard-negatives", number, report)
    return report


@task(name="train round", task_run_name="train round {number} of {total}", **_once)
def train_round(work: Work, number: int, total: int) -> dict[str, Any]:
    """Trains until the next refresh; ends with a checkpoint."""
    return work()


@task(name="validate", task_run_name="validate {number} of {total}", **_once)
def validate(work: Work, number: int, total: int) -> dict[str, Any]:
    """Measures the validation split after a round."""
    report = work()
    artifacts.show_round(number, report.get("validation", {}))
    return report


def run_phase(name: str, number: int, total: int, work: Work) -> dict[str, Any]:
    """Runs a phase of a round as its task."""
    tasks = {"cluster": cluster, "mine": mine, "train round": train_round, "validate": validate}
    return tasks[name](work, number, total)


@task(name="export", task_run_name="export", **_once)
def export(run: Run) -> dict[str, Any]:
    """The run's model -> outputs/model."""
    return run.export()


@task(name="index", task_run_name="index", **_once)
def index(params: Params) -> dict[str, Any]:
    """Label vectors and index -> outputs/bundle."""
    return pipeline.index(params)


@task(name="evaluate", task_run_name="evaluate", **_once)
def evaluate(params: Params) -> dict[str, Any]:
    """Metrics, plots, predictions and report on the test split."""
    return pipeline.evaluate(params)


@task(name="record", task_run_name="record", **_again)
def record(made: list[str]) -> None:
    """Records the outputs in dvc.lock."""
    reproduce.commit(made)


@task(name="refresh labels", task_run_name="refresh labels", **_once)
def refresh_labels(params: Params) -> dict[str, Any]:
    """The champion with the labels of today -> a bundle of its own."""
    return pipeline.refresh_labels(params)


# -- registry and after -----------------------------------------------------------------------------------------------


@task(name="register", task_run_name="register", **_again)
def register(params: Params, bundle: str | None = None) -> dict[str, Any]:
    """Registers the bundle as `challenger`; one that is registered already keeps its version."""
    return pipeline.register(params) if bundle is None else pipeline.register(params, bundle)


@task(name="gate", task_run_name="gate of version {version}", **_again)
def gate(params: Params, version: str) -> dict[str, Any]:
    """Challenger against champion: quality, significance, servability."""
    return pipeline.gate(params, version)


@task(name="promote", task_run_name="promote version {version}", **_again)
def promote(params: Params, version: str) -> dict[str, Any]:
    """The version becomes `champion`, the champion `previous`."""
    return pipeline.promote(params, version, reason="retraining")


@task(name="push", task_run_name="dvc push", **_again)
def push(params: Params) -> str:
    """What was made goes to DVC's remote."""
    return reproduce.push(source.secret_values(params.source.secrets), log.info)


@task(name="commit", task_run_name="git {how} of version {version}", **_once)
def commit_in_git(params: Params, version: Any, how: str, verdict: str, extra: Sequence[str]) -> dict[str, str]:
    """The lock file and metrics, in git."""
    return publish.commit(params, version, verdict, extra)


@task(name="monitor", task_run_name="monitor", **_once)
def monitor(params: Params, queries: str, **options: Any) -> dict[str, Any]:
    """A window of live queries against what the champion was trained on."""
    return pipeline.monitor(params, queries, **options)
