"""The flow `unidec`: newest data fetched and checked, model trained, evaluated, registered, judged, promoted.

Two doors lead to the same tasks:

- `python -m flows.train` (`make train`, the deployment `unidec/train`): DVC brings the data stages up to date, a task
  each; the model is trained, from the champion or from nothing, only if something it depends on changed; its outputs
  are recorded in `dvc.lock`; the bundle is registered; what passes the gate becomes champion.
- `python -m flows.train --steps train`: these steps only, no call of DVC. This is what `dvc repro` runs.

Parameters other than those of params.yaml (`--set`, `--params`) never touch DVC's outputs: such a trial has a folder of
its own below `runs/own/`. It has an MLflow run, is registered only with `--register`, and is never promoted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from flows import server

if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    server.start()  # takes seconds, as do the imports that follow

# isort: split
from prefect import flow

from flows import artifacts, decide, lifecycle, publish, reproduce, steps
from flows.summary import summary
from unidec.config import Params, fingerprint, load_params, parse_overrides
from unidec.errors import ConfigError, DataError, TrainingError
from unidec.pipeline.runs import tracked
from unidec.tracking.run import Tracker
from unidec.tracking.store import import_mlflow, prepare_store, tracking_uri
from unidec.training.fit import fit

if TYPE_CHECKING:
    from unidec.pipeline.training import Run

Start = Literal["auto", "warm", "cold"]
Step = Literal[
    "ingest", "validate", "tokens", "propensity", "label_graph", "train", "index", "evaluate", "register"
]  # fmt: skip
STEPS: tuple[str, ...] = get_args(Step)
DATA_STEPS = STEPS[: STEPS.index("train")]

log = logging.getLogger("unidec.flows")


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a run is asked beside its parameters.

    Attributes:
        force: train although nothing changed.
        start: of training; None: `retrain.start` decides.
        promote: what passes the gate; None: `retrain.promote` decides.
    """

    force: bool = False
    start: Start | None = None
    promote: bool | None = None


@flow(
    name="unidec",
    description=__doc__,
    persist_result=False,
    on_failure=[publish.failed],
    on_crashed=[publish.failed],
)
def train(
    force: bool = False,
    start: Start | None = None,
    promote: bool | None = None,
    overrides: dict[str, Any] | None = None,
    steps: Literal["all"] | Step | list[Step] = "all",
    params_file: str = "params.yaml",
    use_dvc: bool = True,
    register_trial: bool = False,
) -> Any:
    """Retrains: fetches data, trains what is out of date, registers, judges and promotes; or runs some of the steps.

    Args:
        force: train although nothing changed.
        start: warm: from the champion; cold: from nothing; auto: from the champion, from nothing every so often and
            where it does not fit. Empty: `retrain.start` decides.
        promote: whether a challenger that passes the gate becomes champion. Empty: `retrain.promote` decides.
        overrides: {"optim.epochs": 3}: a trial with other parameters, in a folder of its own; DVC is left alone,
            nothing is registered or promoted.
        steps: all, or some of them: no call of DVC, no gate.
        params_file: parameters; another file than params.yaml makes a trial.
        use_dvc: with all steps: let DVC decide what is stale, and record what was made.
        register_trial: also a trial's bundle, as `challenger`.

    Returns:
        what was done: {"steps", and where they ran "start", "epoch", what `unidec.pipeline.evaluate` returns, "model",
        "version", "run_url", "skipped", "gate", "promoted", "refused", "shared"}.

    Raises:
        UnidecError: parameters, data, artifacts or training are wrong; nothing is retried then.
    """
    with lifecycle.at_work():
        wanted = parse_steps(steps)
        params = load_params(params_file, overrides)
        own = bool(overrides) or Path(params_file).resolve() != Path("params.yaml").resolve()
        with _own_folder(params) if own else contextlib.nullcontext(params) as params:
            if use_dvc and not own and wanted == list(STEPS):
                return _retrain(params, Wishes(force, start, promote))
            if own and not register_trial and "register" in wanted:
                wanted.remove("register")
                lifecycle.say("a trial: its bundle is not registered (--register does)")
            return _in_process(params, wanted)


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


def _retrain(params: Params, wishes: Wishes) -> Any:
    """Everything, one run at a time."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(reproduce.one_at_a_time())
        except TrainingError as error:
            return lifecycle.turned_away(error)
        try:
            return lifecycle.named(_through_dvc(params, wishes))
        except DataError:
            artifacts.show_data_pages()
            raise


def _through_dvc(params: Params, wishes: Wishes) -> dict[str, Any]:
    if params.source.kind != "none":
        lifecycle.say(f"fetch: {steps.fetch(params)['reason']}")
    data_changed, work = reproduce.stale(DATA_STEPS)
    if data_changed:
        with ThreadPoolExecutor(1) as imports:  # what training imports takes seconds, as DVC's processes do
            imports.submit(importlib.import_module, "unidec.pipeline.training")
            steps.prepare_data(DATA_STEPS)
        _, work = reproduce.stale()
    else:
        lifecycle.say("the data is up to date")
    if wishes.force:
        work = list(reproduce.MODEL_STAGES)
    if not work:
        return _skip(params, wishes)
    lifecycle.say(f"will re-run: {', '.join(work)}")
    done: dict[str, Any] = {}
    if "train" in work:
        artifacts.show_change(steps.data_change(params))
        done["start"] = steps.choose_start(params, wishes.start)
        lifecycle.say(f"start: {done['start']['kind']}, {done['start']['reason']}")
    before = reproduce.inputs_state()
    done |= _in_process(params, [*work, "register"], lambda: _record(work, before))
    done |= decide.decide(params, done["version"], wishes.promote)
    artifacts.show_links(done["run_url"], done["version"], params.tracking.model_name)  # now with the gate's page
    return done | decide.share(params, done["version"], done)


def _skip(params: Params, wishes: Wishes) -> dict[str, Any]:
    """Nothing to train; what an earlier run was killed before is made up for: registration, the gate, the commit."""
    reason = "nothing that the model depends on changed since dvc.lock was written"
    lifecycle.say(f"training is skipped: {reason} (force trains anyway)")
    done = _in_process(params, ["register"])
    judged = decide.decide(params, done["version"], wishes.promote, always=False)
    if judged or publish.is_uncommitted(params):
        judged |= decide.share(params, done["version"], judged)
    artifacts.show_skip(reason)
    publish.emit(params.tracking.model_name, "skipped", {"reason": reason, "version": str(done["version"])})
    return {**done, **judged, "skipped": reason}


def _record(made: list[str], before: dict[str, Any]) -> None:
    if reproduce.inputs_state() != before:
        raise ConfigError(
            "parameters, code or data were edited while the model was trained: its outputs are kept, dvc.lock is not",
            where="dvc.lock",
            fix="run it again: what the edit concerns is then rebuilt",
        )
    steps.record(made)


def _in_process(params: Params, wanted: list[str], recorded: Callable[[], None] | None = None) -> dict[str, Any]:
    """The steps, in order; `recorded` is called once all outputs are written and before anything is registered."""
    done: dict[str, Any] = {"steps": wanted}
    for stage in (step for step in wanted if step in DATA_STEPS):
        steps.data_step(stage, params)
    with contextlib.ExitStack() as stack:
        if "train" in wanted and recorded is None:  # else it is held already
            stack.enter_context(reproduce.one_at_a_time())
        run_dir = None
        if "train" in wanted:
            run = steps.start_run(params)
            run_dir = str(run.folder)
            stack.enter_context(tracked(run_dir))
            done |= _fit(run)
        if "index" in wanted:
            steps.index(params)
        if "evaluate" in wanted:
            done |= steps.evaluate(params)
            done["report"] = str(Path(done["report"]).resolve())
            artifacts.show_metrics(done["metrics"])
        if recorded is not None:
            recorded()
        done["run_url"] = Tracker.resume(run_dir).url if run_dir else None
        if "register" in wanted:
            registered = steps.register(params)
            done |= {key: registered.get(key) for key in ("model", "version")}
            done["run_url"] = done["run_url"] or registered.get("run")
        artifacts.show_links(done["run_url"], done.get("version"), params.tracking.model_name)
    return done


def _fit(run: Run) -> dict[str, Any]:
    """Trains the run's rounds, each phase a task, and exports the model."""
    for line in run.lines:
        lifecycle.say(line)
    bar = artifacts.begin_progress(run.epoch, run.epochs)

    def phase(name: str, number: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        report = steps.run_phase(name, number, run.num_rounds, work)
        if name == "validate":  # the round's last phase
            artifacts.show_progress(bar, run.epoch, run.epochs)
        return report

    fit(run, phase)
    steps.export(run)
    return {"epoch": run.epoch}


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
    lifecycle.say(f"other parameters than params.yaml: outputs go to {folder}, DVC is left alone")
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
        description="Train, evaluate, register, judge and promote a UniDEC model: everything that is out of date.",
        epilog="examples:\n"
        "  python -m flows.train                              what changed is rebuilt, registered and judged\n"
        "  python -m flows.train --force                      train although nothing changed\n"
        "  python -m flows.train --force --start cold         ... from nothing, not from the champion\n"
        "  python -m flows.train --set optim.epochs=3         a trial, in runs/own/: not registered, not promoted\n"
        "  python -m flows.train --set optim.epochs=3 --register    ... registered as challenger\n"
        "  python -m flows.train --steps train                one step, as `dvc repro` runs it\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--params", default="params.yaml", metavar="FILE", help="parameters (default: params.yaml)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another value for a parameter")
    parser.add_argument("--steps", default="all", help=f"all, or some of: {','.join(STEPS)}")
    parser.add_argument("--no-dvc", action="store_true", help="run every step here and now, leave dvc.lock alone")
    parser.add_argument("--force", action="store_true", help="train although nothing changed")
    parser.add_argument("--start", choices=get_args(Start), help="from the champion or from nothing: retrain.start")
    parser.add_argument("--register", action="store_true", help="register a trial's bundle (--set, --params), too")
    parser.add_argument("--no-promote", action="store_true", help="keep the champion, whatever the gate decides")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, not a summary")
    options = parser.parse_args(arguments)

    def check() -> None:
        parse_steps(options.steps)
        load_params(options.params, parse_overrides(options.set) or None)
        if options.steps == "all" and not (options.set or options.no_dvc or options.params != "params.yaml"):
            reproduce.check_repository()
        import_mlflow()  # each run requires it, and the database, which takes seconds to create
        prepare_store()

    def run() -> dict[str, Any]:
        wanted = parse_steps(options.steps)
        return train(
            force=options.force,
            start=options.start,
            promote=False if options.no_promote else None,
            overrides=parse_overrides(options.set) or None,
            steps="all" if wanted == list(STEPS) else wanted,
            params_file=options.params,
            use_dvc=not options.no_dvc,
            register_trial=options.register,
        )

    return lifecycle.on_command_line(run, show=lifecycle.as_json if options.json else summary, meanwhile=check)


if __name__ == "__main__":
    sys.exit(main())
