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
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from flows import server

if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    server.start()  # takes seconds, as do the imports that follow

# isort: split
from prefect import flow

from flows import artifacts, lifecycle, publish, reproduce, source
from flows.decide import decide, share
from flows.steps import run
from flows.summary import summary
from unidec import pipeline
from unidec.config import Params, fingerprint, load_params, parse_overrides
from unidec.errors import ConfigError, DataError
from unidec.pipeline.lock import one_at_a_time
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
        if overrides or Path(params_file).resolve() != Path("params.yaml").resolve():
            if not register_trial and "register" in wanted:
                wanted.remove("register")
                lifecycle.say("a trial: its bundle is not registered (--register does)")
            with _own_folder(params) as params:
                return _in_process(params, wanted)
        if not use_dvc or wanted != list(STEPS):
            return _in_process(params, wanted)
        try:
            return lifecycle.alone(lambda: _through_dvc(params, force, start, promote))
        except DataError:
            artifacts.show_links({}, artifacts.DATA_PAGES)
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


def _through_dvc(params: Params, force: bool, start: Start | None, promote: bool | None) -> dict[str, Any]:
    """Everything that is out of date."""
    work = source.prepare_data(params, DATA_STEPS)
    if force:
        work = list(reproduce.MODEL_STAGES)
    if not work:
        return _skip(params, promote)
    lifecycle.say(f"will re-run: {', '.join(work)}")
    done: dict[str, Any] = {}
    if "train" in work:
        artifacts.show_change(run("data change", pipeline.data_change, params, retry=True))
        done["start"] = run("choose start", pipeline.choose_start, params, start, retry=True)
        lifecycle.say(f"start: {done['start']['kind']}, {done['start']['reason']}")
    before = reproduce.inputs_state()

    def record() -> None:
        if reproduce.inputs_state() != before:
            raise ConfigError(
                "parameters, code or data were edited while the model was trained",
                where="dvc.lock",
                got="a lock file that does not describe the outputs, which are kept",
                fix="run it again: what the edit concerns is then rebuilt",
            )
        run("record", reproduce.commit, work, retry=True)

    done |= _in_process(params, [*work, "register"], record)
    done |= decide(params, done["version"], promote)
    artifacts.show_result(done["run_url"], done["version"], done["model"])  # now with the gate's page
    return done | share(params, done["version"], done)


def _skip(params: Params, promote: bool | None) -> dict[str, Any]:
    """Nothing to train; what an earlier run was killed before is made up for: registration, the gate, the commit."""
    reason = "nothing that the model depends on changed since dvc.lock was written"
    lifecycle.say(f"training is skipped: {reason} (force trains anyway)")
    done = _in_process(params, ["register"])
    judged = decide(params, done["version"], promote, always=False)
    if judged or publish.is_uncommitted(params):
        judged |= share(params, done["version"], judged)
    artifacts.show_text("skipped", [f"Training was skipped: {reason}."], "why nothing was trained")
    publish.emit(params.tracking.model_name, "skipped", {"reason": reason, "version": str(done["version"])})
    return {**done, **judged, "skipped": reason}


def _in_process(params: Params, wanted: list[str], recorded: Callable[[], None] | None = None) -> dict[str, Any]:
    """The steps, in order; `recorded` is called once all outputs are written and before anything is registered."""
    done: dict[str, Any] = {"steps": wanted, "run_url": None}
    for stage in (step for step in wanted if step in DATA_STEPS):
        run(stage, getattr(pipeline, stage), params)
    with contextlib.ExitStack() as stack:
        if "train" in wanted:
            if recorded is None:  # else it is held already
                stack.enter_context(one_at_a_time())
            training = run("start run", pipeline.start_run, params, retry=True)
            stack.enter_context(tracked(training.folder))
            _fit(training)
            done["epoch"] = training.epoch
        if "index" in wanted:
            run("index", pipeline.index, params)
        if "evaluate" in wanted:
            done |= run("evaluate", pipeline.evaluate, params)
            done["report"] = str(Path(done["report"]).resolve())
            artifacts.show_table("metrics", artifacts.rows_of(done["metrics"]), "held-out queries, percent")
        if recorded is not None:
            recorded()
        if "train" in wanted:
            done["run_url"] = Tracker.resume(training.folder).url
        if "register" in wanted:
            registered = run("register", pipeline.register, params, retry=True)
            done |= {key: registered.get(key) for key in ("model", "version")}
            done["run_url"] = done["run_url"] or registered.get("run")
        artifacts.show_result(done["run_url"], done.get("version"), params.tracking.model_name)
    return done


def _fit(training: Run) -> None:
    """Trains the rounds, each phase a task, and exports the model."""
    for line in training.lines:
        lifecycle.say(line)

    def phase(name: str, number: int, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        def shown() -> dict[str, Any]:
            report = work()
            artifacts.show_phase(name, number, report)
            return report

        # not retried: what ended it would end it again, and the next run resumes from its checkpoint
        return run(f"{name} {number} of {training.num_rounds}", shown)

    fit(training, phase)
    run("export", training.export)


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
    with lifecycle.environment("MLFLOW_TRACKING_URI", tracking_uri(".")), contextlib.chdir(folder):
        yield params.model_copy(update={"data": data, "encoder": encoder})


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

    wishes: dict[str, Any] = {"force": options.force, "start": options.start, "use_dvc": not options.no_dvc}
    wishes |= {"promote": False if options.no_promote else None, "register_trial": options.register}

    def check() -> None:
        wishes["overrides"] = parse_overrides(options.set) or None
        wishes["steps"] = "all" if options.steps == "all" else parse_steps(options.steps)
        load_params(options.params, wishes["overrides"])
        if options.steps == "all" and not (options.set or options.no_dvc or options.params != "params.yaml"):
            reproduce.check_repository()
        import_mlflow()  # each run requires it, and the database, which takes seconds to create
        prepare_store()

    show = lifecycle.as_json if options.json else summary
    return lifecycle.on_command_line(lambda: train(params_file=options.params, **wishes), show=show, meanwhile=check)


if __name__ == "__main__":
    sys.exit(main())
