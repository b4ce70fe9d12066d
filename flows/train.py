"""The flow `unidec`: data checked, model trained round by round, evaluated, indexed, registered.

Two doors lead to the same tasks:

- `python -m flows.train` (`make train`, a deployment): DVC brings the data stages up to date, a task each; the model is
  trained only if something it depends on changed; its outputs are recorded in `dvc.lock`; the bundle is registered.
- `python -m flows.train --steps train`: these steps only, no call of DVC. This is what `dvc repro` runs.

Parameters other than those of params.yaml as it stands (`--set`, `--params`) never touch DVC's outputs: such a run has
a folder of its own below `runs/own/`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import flows  # noqa: F401  sets Prefect's home and quiets it, before it is imported

# isort: split
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.exceptions import TerminationSignal

from flows import artifacts, endings, reproduce
from unidec import stages
from unidec.config import Params, fingerprint, load_params, parse_overrides
from unidec.errors import ConfigError, UnidecError
from unidec.ops.tracking import Tracker
from unidec.ops.tracking_store import tracking_uri

DATA_STEPS = ("ingest", "validate", "tokens", "propensity", "label_graph")
STEPS = (*DATA_STEPS, *reproduce.MODEL_STAGES, "register")

log = logging.getLogger("unidec.flows")


# -- tasks: paths, hashes and small dicts in and out ------------------------------------------------------------------


def worth_retrying(_task: Any, _task_run: Any, state: Any) -> bool:
    """An error that names its fix stays one however often it is tried; a lock, a network or a server may recover."""
    return not isinstance(state.result(raise_on_failure=False), UnidecError)


# DVC and our checkpoints decide what is done already: a result cache on top of them could only disagree
_once = {"cache_policy": NO_CACHE, "persist_result": False}
_again = _once | {"retries": 3, "retry_delay_seconds": [2, 10, 30], "retry_condition_fn": worth_retrying}


@task(name="prepare", task_run_name="prepare {stage}", **_again)
def prepare(stage: str) -> None:
    """Brings a data stage up to date through DVC."""
    reproduce.reproduce(stage, log.info)


@task(name="data", task_run_name="{stage}", **_once)
def data_step(stage: str, params: Params) -> dict[str, Any]:
    """Runs a data stage here, without DVC."""
    return getattr(stages, stage)(params)


@task(name="start run", task_run_name="start run", **_again)
def start_run(params: Params) -> dict[str, Any]:
    """Finds the checkpoint to go on from, or begins anew; opens the MLflow run."""
    return stages.start_run(params)


# A round is not retried: what ended it would end it again, and the next run resumes from its checkpoint.
@task(name="refresh", task_run_name="refresh {number} of {total}", **_once)
def refresh(params: Params, run_dir: str, number: int, total: int) -> dict[str, Any]:
    """Clusters the queries and mines hard negatives."""
    return stages.refresh(params, run_dir)


@task(name="train round", task_run_name="train round {number} of {total}", **_once)
def train_round(params: Params, run_dir: str, number: int, total: int) -> dict[str, Any]:
    """Trains until the next refresh; ends with a checkpoint."""
    return stages.train_round(params, run_dir)


@task(name="export", task_run_name="export", **_once)
def export(params: Params, run_dir: str) -> dict[str, Any]:
    """The run's model -> outputs/model."""
    return stages.export(params, run_dir)


@task(name="index", task_run_name="index", **_once)
def index(params: Params) -> dict[str, Any]:
    """Label vectors and index -> outputs/bundle."""
    return stages.index(params)


@task(name="evaluate", task_run_name="evaluate", **_once)
def evaluate(params: Params) -> dict[str, Any]:
    """Metrics, plots, predictions and report on the test split."""
    return stages.evaluate(params)


@task(name="record", task_run_name="record", **_again)
def record(made: list[str]) -> None:
    """Records the outputs in dvc.lock."""
    reproduce.commit(made)


@task(name="register", task_run_name="register", **_again)
def register(params: Params) -> dict[str, Any]:
    """Registers the bundle as `challenger`; one that is registered already keeps its version."""
    return stages.register(params)


# -- the flow ---------------------------------------------------------------------------------------------------------


@flow(
    name="unidec",
    description=__doc__,
    persist_result=False,
    on_failure=[endings.hook("FAILED")],
    on_cancellation=[endings.hook("KILLED")],
    on_crashed=[endings.hook("KILLED")],
)
def train(
    params_file: str = "params.yaml",
    overrides: dict[str, Any] | None = None,
    steps: str | list[str] = "all",
    use_dvc: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Trains and registers a model, or runs some of the steps.

    Args:
        params_file: parameters; DVC knows only params.yaml.
        overrides: {"optim.epochs": 3}: in memory only, so the run gets a folder of its own and DVC is left alone.
        steps: "all", or some of ingest, validate, tokens, propensity, label_graph, train, index, evaluate, register.
        use_dvc: with all steps: let DVC decide what is stale, and record what was made.
        force: train although nothing changed.

    Returns:
        what was done: {"steps", and where they ran "epoch", "metrics", "version", "run_url", "skipped"}.

    Raises:
        UnidecError: parameters, data, artifacts or training are wrong; nothing is retried then.
    """
    endings.one_line_for_known_errors()
    wanted = parse_steps(steps)
    params = load_params(params_file, overrides)
    own = bool(overrides) or Path(params_file).resolve() != Path("params.yaml").resolve()
    try:
        with _own_folder(params) if own else contextlib.nullcontext(params) as params:
            if use_dvc and not own and wanted == list(STEPS):
                return _through_dvc(params, force)
            return _in_process(params, wanted)
    except (KeyboardInterrupt, TerminationSignal) as error:
        endings.leave_if_server_left(error)
        raise


def parse_steps(steps: str | Sequence[str]) -> list[str]:
    """ "all", "train,index" or a list -> known steps in the pipeline's order.

    Raises:
        ConfigError: a step that does not exist.
    """
    named = [word.strip() for word in steps.split(",")] if isinstance(steps, str) else list(steps)
    if named == ["all"]:
        return list(STEPS)
    unknown = [step for step in named if step not in STEPS]
    if unknown or not named:
        raise ConfigError("no such step", where="steps", got=", ".join(unknown), expected=f"all, or {', '.join(STEPS)}")
    return [step for step in STEPS if step in named]


def _through_dvc(params: Params, force: bool) -> dict[str, Any]:
    with reproduce.one_at_a_time():
        for stage in DATA_STEPS:
            prepare(stage)
        steps = list(reproduce.MODEL_STAGES) if force else reproduce.stale()
        if not steps:
            reason = "nothing that the model depends on changed since dvc.lock was written"
            log.info("training is skipped: %s (--force trains anyway)", reason)
            return {**_in_process(params, ["register"]), "skipped": reason}
        log.info("to be made anew: %s", ", ".join(steps))
        before = reproduce.inputs_digest()
        return _in_process(params, [*steps, "register"], lambda: _record(steps, before))


def _record(steps: list[str], before: str) -> None:
    if reproduce.inputs_digest() != before:
        raise ConfigError(
            "parameters, code or data were edited while the model was trained: its outputs are kept, dvc.lock is not",
            where="dvc.lock",
            fix="run again: what the edit concerns is then made anew",
        )
    record(steps)


def _in_process(params: Params, steps: list[str], recorded: Callable[[], None] | None = None) -> dict[str, Any]:
    """The steps, in order; `recorded` is called once all outputs are written and before anything is registered."""
    done: dict[str, Any] = {"steps": steps}
    for stage in (step for step in steps if step in DATA_STEPS):
        data_step(stage, params)
    with contextlib.ExitStack() as stack:
        if "train" in steps and recorded is None:  # else it is held already
            stack.enter_context(reproduce.one_at_a_time())
        run_dir = None
        if "train" in steps:
            begun = start_run(params)
            run_dir = begun["run_dir"]
            stack.enter_context(endings.tracked(run_dir))
            done |= _fit(params, begun)
        if "index" in steps:
            index(params)
        if "evaluate" in steps:
            done["metrics"] = evaluate(params).get("metrics", {})
            artifacts.show_metrics(done["metrics"])
        if recorded is not None:
            recorded()
        done["run_url"] = Tracker.resume(run_dir).url if run_dir else None
        if "register" in steps:
            registered = register(params)
            done |= {"version": registered.get("version"), "run_url": done["run_url"] or registered.get("run")}
        artifacts.show_links(done["run_url"], done.get("version"), params.tracking.model_name)
    return done


def _fit(params: Params, begun: dict[str, Any]) -> dict[str, Any]:
    """Rounds of refresh and training until the run's last epoch, then the model is exported.

    Inside a round the refresh does nothing, and the round goes on at its next step.
    """
    run_dir, epochs, a_round = begun["run_dir"], params.optim.epochs, params.pool.refresh
    total = -(-epochs // a_round)
    epoch, finished = begun.get("epoch", 0), begun["finished"]
    for line in begun.get("lines", []):
        endings.say(line)
    bar = artifacts.begin_progress(epoch, epochs)
    while not finished:
        number = epoch // a_round + 1
        refresh(params, run_dir, number, total)
        state = train_round(params, run_dir, number, total)
        epoch, finished = state["epoch"], state["finished"]
        artifacts.show_progress(bar, epoch, epochs)
        artifacts.show_round(number, state.get("validation", {}))
    export(params, run_dir)
    return {"epoch": epoch}


@contextlib.contextmanager
def _own_folder(params: Params) -> Iterator[Params]:
    """Runs inside `runs/own/<fingerprint>/`: the pipeline's relative paths then lead nowhere near DVC's outputs.

    What the parameters point to, and the tracking store, stay where they are.
    """
    encoder = params.encoder
    if Path(encoder.name).exists():
        encoder = encoder.model_copy(update={"name": str(Path(encoder.name).resolve())})
    if encoder.start:
        encoder = encoder.model_copy(update={"start": str(Path(encoder.start).resolve())})
    data = params.data.model_copy(update={"path": str(Path(params.data.path).resolve())})
    folder = Path("runs") / "own" / fingerprint(params)[:12]
    folder.mkdir(parents=True, exist_ok=True)
    log.info("not params.yaml as it stands: outputs go to %s, DVC is left alone", folder)
    before = os.environ.get("MLFLOW_TRACKING_URI")
    os.environ["MLFLOW_TRACKING_URI"] = tracking_uri(".")
    try:
        with contextlib.chdir(folder):
            yield params.model_copy(update={"data": data, "encoder": encoder})
    finally:
        if before is None:
            os.environ.pop("MLFLOW_TRACKING_URI", None)
        else:
            os.environ["MLFLOW_TRACKING_URI"] = before


# -- command line -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m flows.train`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.train",
        description="Train, evaluate and register a UniDEC model: everything that is out of date.",
        epilog="examples:\n"
        "  python -m flows.train                              what changed is made anew, the bundle registered\n"
        "  python -m flows.train --force                      train although nothing changed\n"
        "  python -m flows.train --set optim.epochs=3         a trial, in a folder of its own below runs/own/\n"
        "  python -m flows.train --steps train                one step, as `dvc repro` runs it\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", default="params.yaml", metavar="FILE", help="parameters (default: params.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a parameter")
    parser.add_argument("--steps", default="all", help=f"all, or some of: {','.join(STEPS)}")
    parser.add_argument("--no-dvc", action="store_true", help="run every step here and now, leave dvc.lock alone")
    parser.add_argument("--force", action="store_true", help="train although nothing changed")
    options = parser.parse_args(arguments)

    def run() -> dict[str, Any]:
        overrides = parse_overrides(options.set) or None
        parse_steps(options.steps)
        load_params(options.params, overrides)  # what is wrong shows before Prefect starts
        return train(options.params, overrides, options.steps, not options.no_dvc, options.force)

    return endings.on_command_line(run)


if __name__ == "__main__":
    sys.exit(main())
