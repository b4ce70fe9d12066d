"""Train, evaluate and register a UniDEC model, run the gate and promote the model if it passes.

`make train` and the deployment `unidec/train` run this flow. DVC updates the data stages. The model
is trained, from the champion or from scratch, only if something it depends on changed; its outputs
are recorded in `dvc.lock`. With --steps, only these steps run, without DVC, as in `dvc repro`.

examples:
  python -m flows.train                              rebuild what changed, register it, run the gate
  python -m flows.train --force                      train although nothing changed
  python -m flows.train --force --start cold         ... from scratch, not from the champion
  python -m flows.train --set optim.epochs=3         a trial, in runs/own/: not registered
  python -m flows.train --set optim.epochs=3 --register    ... registered as challenger
  python -m flows.train --runner dask://scheduler:8786     ... texts are encoded by a cluster
"""

from __future__ import annotations

if __name__ == "__main__":
    from flows.command import main

    raise SystemExit(main("train"))

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from prefect import flow

from flows import lifecycle, publish, reproduce, runners, server
from flows.decide import decide, share
from flows.decide import summary as in_words  # noqa: F401  what `flows.command` prints
from flows.lifecycle import run
from unidec import pipeline
from unidec.config import Params, fingerprint, leaves, load_params, nested
from unidec.errors import ConfigError, UnidecError
from unidec.pipeline.lock import one_at_a_time
from unidec.pipeline.runs import tracked
from unidec.tracking.repository import git
from unidec.tracking.run import RUN_TAGS, TRIAL_TAG, Tracker, run_tags
from unidec.tracking.store import check_store, import_mlflow, prepare_store, tracking_uri
from unidec.training.fit import fit

Start = Literal["auto", "warm", "cold"]
DATA_STEPS = ("ingest", "validate", "tokens", "propensity", "label_graph")
STEPS = (*DATA_STEPS, *reproduce.MODEL_STAGES, "register")


@flow(name="unidec", description=__doc__, persist_result=False)
def train(
    force: bool = False,
    start: Start | None = None,
    promote: bool | None = None,
    overrides: dict[str, Any] | None = None,
    steps: str = "all",
    params_file: str = "params.yaml",
    register_trial: bool = False,
    runner: str | None = None,
) -> Any:
    """Retrains: fetches data, trains what is out of date, registers, runs the gate and promotes;
    or runs some of these steps.

    Args:
        force: train although nothing changed.
        start: warm: from the champion; cold: from scratch; auto: from the champion where possible,
            but at intervals from scratch. If unset, `retrain.start` decides.
        promote: promote a challenger that passes the gate. If unset, `retrain.promote` decides.
        overrides: {"optim.epochs": 3} or optim.epochs=3: a trial with other parameters, in its own
            folder below runs/own/; DVC is not used, nothing is registered or promoted.
        steps: all, or some (without DVC and gate) of ingest, validate, tokens, propensity,
            label_graph, train, index, evaluate, register, separated by commas.
        params_file: parameter file; another file than params.yaml makes a trial.
        register_trial: also register a trial's bundle, as `challenger`.
        runner: divide part files to read, texts to tokenise, texts to encode by a frozen
            transformer, and labels of a compressed index into shards: processes, threads (:N
            workers), dask://host:port or ray://host:port; default UNIDEC_RUNNER, none.

    Returns:
        what was done: {"steps", and if they ran "start", "epoch", what `unidec.pipeline.evaluate`
        returns, "model",
        "version", "run_url", "skipped", "gate", "promoted", "refused", "shared"}.

    Raises:
        UnidecError: an error in parameters, data, artifacts or training; not retried.
    """
    with lifecycle.at_work(), runners.stages_in_shards(runner):
        wanted = parse_steps(steps)
        params = load_params(params_file, overrides)
        pipeline.check_before_work(params, wanted)
        if overrides or params_file != "params.yaml":
            if not register_trial and "register" in wanted:
                wanted.remove("register")
                lifecycle.say("a trial: its bundle is not registered (--register registers it)")
            with _named(params_file, overrides or {}), _own_folder(params) as params:
                return lifecycle.finished(_in_process(params, wanted))
        if steps != "all":
            return lifecycle.finished(_in_process(params, wanted))
        return lifecycle.finished(
            lifecycle.alone(lambda: _through_dvc(params, force, start, promote))
        )


def parse_steps(steps: str) -> list[str]:
    """Parse "all" or "train,index" into steps in the pipeline's order; a ConfigError for an unknown
    step.
    """
    named = [word.strip() for word in steps.split(",")]
    if named == ["all"]:
        return list(STEPS)
    unknown = [step for step in named if step not in STEPS]
    if unknown:
        raise ConfigError(
            "no such step",
            where="steps",
            got=", ".join(unknown),
            expected=f"all, or {', '.join(STEPS)}",
        )
    return [step for step in STEPS if step in named]


def _through_dvc(
    params: Params, force: bool, start: Start | None, promote: bool | None
) -> dict[str, Any]:
    """Run all stages that are out of date, register the bundle, run the gate and share it."""
    work = reproduce.prepare_data(params, DATA_STEPS)
    if force:
        work = list(reproduce.MODEL_STAGES)
    if not work:
        return _skip(params, promote)
    lifecycle.say(f"will re-run: {', '.join(work)}")
    done: dict[str, Any] = {}
    if params.retrain.push:  # the data: a remote that refuses is noticed before the training
        reproduce.push(params.source)
    if "train" in work:
        run("data change", pipeline.data_change, params, retry=True)
        done["start"] = pipeline.plain(
            run("choose start", pipeline.choose_start, params, start, retry=True)
        )
        lifecycle.say(f"start: {done['start']['kind']}, {done['start']['reason']}")
    before = reproduce.inputs_state()

    def record() -> None:
        if reproduce.inputs_state() != before:
            raise ConfigError(
                "parameters, code or data were edited while the model was trained; its outputs "
                "are kept",
                where="dvc.lock",
                fix="run it again: stages that the edit affects are re-run",
            )
        run("record", reproduce.commit, work, retry=True)

    done |= _in_process(params, [*work, "register"], record)
    done |= decide(params, done["version"], promote)
    return done | share(params, done)


def _skip(params: Params, promote: bool | None) -> dict[str, Any]:
    """Train nothing; complete the registration, gate and commit of an earlier run that was killed
    before them.
    """
    reason = "nothing that the model depends on changed since dvc.lock was written"
    lifecycle.say(f"training is skipped: {reason} (--force trains anyway)")
    done = _in_process(params, ["register"])
    judged = decide(params, done["version"], promote, always=False)
    if judged or (
        params.retrain.commit != "none"
        and git(".", "status", "--porcelain", "--", *publish.RECORDED)
    ):
        judged |= share(params, done | judged)
    publish.emit(
        params.tracking.model_name, "skipped", {"reason": reason, "version": str(done["version"])}
    )
    return {**done, **judged, "skipped": reason}


def _in_process(
    params: Params, wanted: list[str], record: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Run the steps in order; `record` is called after all outputs are written and before
    registration.
    """
    done: dict[str, Any] = {"steps": wanted, "run_url": None}
    for stage in (step for step in wanted if step in DATA_STEPS):
        run(stage, getattr(pipeline, stage), params)
    with contextlib.ExitStack() as stack:
        if "train" in wanted:
            if record is None:  # else the lock is already held
                stack.enter_context(one_at_a_time())
            training = run("start run", pipeline.start_run, params, retry=True)
            stack.enter_context(tracked(training.folder))
            for line in training.lines:
                lifecycle.say(line)
            num_rounds = f"{'at most ' if params.optim.patience else ''}{training.num_rounds}"
            # tasks without retries: an error would recur, and the next run resumes from the
            # checkpoint
            fit(training, lambda name, number, work: run(f"{name} {number} of {num_rounds}", work))
            run("export", training.export)
            done["epoch"] = training.epoch
        if "index" in wanted:
            run("index", pipeline.index, params)
        if "evaluate" in wanted:
            done |= pipeline.plain(run("evaluate", pipeline.evaluate, params))
            done["report"] = str(Path(done["report"]).resolve())
        if record is not None:
            record()
        if "train" in wanted:
            done["run_url"] = Tracker.resume(training.folder).url
        if "register" in wanted:
            registered = run("register", pipeline.register, params, retry=True)
            done |= {"model": registered.model, "version": registered.version}
            done["run_url"] = done["run_url"] or registered.run
    return done


def _named(params_file: str, overrides: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Inside the block, MLflow runs are tagged with what makes this a trial."""
    changed = [f"{key}={value}" for key, value in overrides.items()]
    words = [params_file, *changed] if params_file != "params.yaml" else changed
    return lifecycle.environment(RUN_TAGS, json.dumps(run_tags() | {TRIAL_TAG: " ".join(words)}))


@contextlib.contextmanager
def _own_folder(params: Params) -> Iterator[Params]:
    """Run the block inside `runs/own/<fingerprint>/`, so that the pipeline's relative paths do not
    touch DVC's outputs.

    Paths in the parameters and the tracking store stay the same.
    """
    values = dict(leaves(params))
    for key in ("data.path", "encoder.name", "encoder.start", "teacher.bundle"):
        path = Path(values[key])
        if key == "data.path" or (values[key] and path.exists()):
            values[key] = str(path.resolve())
    folder = Path("runs") / "own" / fingerprint(params)[:12]
    folder.mkdir(parents=True, exist_ok=True)
    lifecycle.say(f"parameters differ from params.yaml: outputs go to {folder}, DVC is not used")
    inside = Params.model_validate(nested(values))
    try:
        with (
            lifecycle.environment("MLFLOW_TRACKING_URI", tracking_uri()),
            contextlib.chdir(folder),
        ):
            yield inside
    except UnidecError as error:
        error.seen_from_above(folder)
        raise


def prepare(options: dict[str, Any]) -> dict[str, Any] | None:
    """Report errors in the options before Prefect starts, and do slow work while its server starts.

    If no server is configured and there is nothing to do, the result is returned, and no flow run
    is needed."""
    runners.parse_runner(options["runner"])
    params = load_params(options["params_file"], options["overrides"])
    pipeline.check_before_work(params, parse_steps(options["steps"]))
    through_dvc = (
        options["steps"] == "all"
        and not options["overrides"]
        and options["params_file"] == "params.yaml"
    )
    if through_dvc:
        reproduce.check_repository()
    beside = ThreadPoolExecutor(1)
    is_registered = through_dvc or options["register_trial"]
    store = beside.submit(_open_store, is_registered)
    beside.shutdown(wait=False)  # after an error, or Ctrl-C, nothing waits for it
    if through_dvc and params.source.kind == "none" and server.is_needed():
        pipeline.inputs(params)
        data_changed, work = reproduce.stale(DATA_STEPS)
        store.result()
        if not (data_changed or work or options["force"]):
            with one_at_a_time():
                return _skip(params, options["promote"])
        server.start()
    store.result()
    return None


def _open_store(is_registered: bool) -> None:
    import_mlflow()  # in the background, as each run needs MLflow and its database
    prepare_store()
    if is_registered:
        check_store()
