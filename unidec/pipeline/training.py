"""Stages of training: begin or go on, refresh, a round, export. Killed anywhere and started again they go on there."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from unidec.config import Params, flatten
from unidec.data.storage import read_json_lines, write_bytes_atomic, write_folder, write_json
from unidec.errors import ArtifactError
from unidec.model.unidec import KIND, VERSION
from unidec.pipeline import launch, paths, runs
from unidec.pipeline.plan import check_fits, memory_figures
from unidec.pipeline.ranking import Ranking, headline, validation_metrics
from unidec.pipeline.run_tracking import model_params, refresh_figures, step_figures
from unidec.pipeline.start import open_start, start_lines
from unidec.pipeline.start_file import effective, read_start, start_tags
from unidec.tracking.provenance import DVC_TAG, code_tags, dvc_hash
from unidec.tracking.run import Tracker
from unidec.training.checkpoint import newest_state, random_state, restore_random_state
from unidec.training.distributed import ALONE, Ranks
from unidec.training.identity import identity_sha256
from unidec.training.trainer import Trainer

REFRESH, HISTORY, ROUNDS = "refresh.json", "history.jsonl", "rounds.jsonl"


def open_trainer(params: Params, run_dir: str | Path, accept: Collection[str] = (), ranks: Ranks = ALONE) -> Trainer:
    """The run's trainer, at its newest checkpoint; on each machine one process verifies what it reads.

    Where `launch` started this process, the one that called it did.
    """
    verify = ranks.is_first_here and launch.LAUNCHER not in os.environ
    return Trainer(
        params,
        paths.open_dataset(verify),
        paths.open_tokens("queries", verify),
        paths.open_tokens("labels", verify),
        Path(run_dir),
        paths.CACHE,
        label_graph=paths.open_label_graph(params, verify),
        accept=accept,
        ranks=ranks,
        start=open_start(),
    )


# -- one trainer for the stages of one process ------------------------------------------------------------


@dataclass
class _Kept:
    """A trainer between two stages, with torch's random states as a trainer opened anew would have them."""

    key: tuple[Any, ...]
    trainer: Trainer
    random: dict[str, Tensor]


_kept: _Kept | None = None


@contextlib.contextmanager
def _opened(params: Params, run_dir: str | Path, accept: Collection[str] = (), ranks: Ranks = ALONE) -> Iterator[_Kept]:
    """The run's trainer, as it stands at its newest checkpoint; the one of the stage before where it is the same run.

    It is opened anew after an error, and in other processes: those find the same bits in the checkpoint.
    """
    global _kept
    key = (params.model_dump_json(), str(Path(run_dir).resolve()), tuple(accept), ranks)
    if _kept is None or _kept.key != key:
        forget()
        trainer = open_trainer(params, run_dir, accept, ranks)
        _kept = _Kept(key, trainer, random_state(trainer.device))
    mine, _kept = _kept, None
    restore_random_state(mine.random, mine.trainer.device)
    try:
        yield mine
    except BaseException:  # an error leaves nothing to keep, but for the checkpoint that is being written
        with contextlib.suppress(ArtifactError):
            mine.trainer.writer.wait()
        raise
    if ranks.alone:
        _kept = mine


def forget() -> None:
    """Let go of the trainer that the next stage would have used."""
    global _kept
    if _kept is not None:
        _kept.trainer.writer.wait()
    _kept = None


# -- stages ----------------------------------------------------------------------------------------------------


def start_run(params: Params, resume: str | None = None, accept: Collection[str] = ()) -> dict[str, Any]:
    """Find or begin the run of these parameters and this data, and open its MLflow run.

    A round that was trained but not measured before a kill is measured here.

    Args:
        params: all parameters, as params.yaml has them; what is trained with is `effective` of them.
        resume: a run to go on with in place of the one that these parameters name; "": the newest unfinished one.
        accept: keys of the run's identity that may differ from what it was begun with.

    Returns:
        {"run_dir", "epoch", "epoch_step", "step", "finished"}: where it goes on; {"epochs", "rounds", "refresh"}: all
        of them, and epochs a round; {"start"}: data/start.json; {"lines"}: for people.

    Raises:
        ConfigError: it does not fit into memory, or the run to go on with was begun with other data, parameters,
            tokenizer or code: every key that differs is listed.
    """
    params = effective(params)
    lines = start_lines(open_start())
    identity = paths.run_identity(params)
    run_dir = runs.choose_run(resume) if resume is not None else paths.RUNS / identity_sha256(identity)[:16]
    lines += [f"accepted: {line}" for line in runs.claim(run_dir, params, identity, accept)]
    paths.open_propensity()  # with what the identity read, all that this training reads is verified now
    path, state, refused = newest_state(run_dir)
    if path is None:
        other = runs.others_unfinished(run_dir, identity)
        lines += [other] if other else []
    finished = state.get("epoch", 0) >= params.optim.epochs
    if not finished:
        check_fits(params)
    lines += [f"checkpoint passed over: {reason}" for reason in refused]
    lines += _where_it_goes_on(run_dir, path, state, params.optim.epochs)
    lines += [f"MLflow run of {name} ended as KILLED: its process is gone" for name in runs.close_left_running(run_dir)]
    tracker = _open_tracking(params, run_dir, state, lines)
    try:
        if state and state["epoch_step"] == 0 and (finished or state["epoch"] % params.pool.refresh == 0):
            lines += _measure_if_missing(params, run_dir, int(state["epoch"]))
        tracker.catch_up(_records(run_dir))
        tracker.flush(force=True)
    except BaseException as error:
        runs.close_tracking(run_dir, "FAILED" if isinstance(error, Exception) else "KILLED")
        raise
    counters = {key: int(state.get(key, 0)) for key in ("epoch", "epoch_step", "step")}
    epochs, a_round = params.optim.epochs, params.pool.refresh
    return {"run_dir": str(run_dir), **counters, "finished": finished, "epochs": epochs, "refresh": a_round,
            "rounds": -(-epochs // a_round), "start": read_start().as_dict(), "lines": lines}  # fmt: skip


def cluster(params: Params, run_dir: str) -> dict[str, Any]:
    """The first half of a refresh: cluster the training queries for the coming round.

    Several processes make the whole refresh in one launch: the queries are encoded once.

    Returns:
        figures of the clusters; {} inside a round, or where its refresh is made.
    """
    params = effective(params)
    return _work("refresh" if launch.needed(params) else "cluster", params, run_dir)


def refresh(params: Params, run_dir: str) -> dict[str, Any]:
    """Cluster the training queries, unless `cluster` just did, and mine hard negatives for the coming round.

    Where the run is inside a round, or its refresh is made, nothing is done: what was reported then comes back.
    """
    return _work("refresh", effective(params), run_dir)


def train_round(params: Params, run_dir: str) -> dict[str, Any]:
    """Train until the next refresh is due, from wherever in the round the run is, then measure the validation split.

    Returns:
        {"epoch", "finished", "round", "validation", ...}.
    """
    params = effective(params)
    report = _work("train_round", params, run_dir)
    with _opened(params, run_dir, runs.accepted_keys(Path(run_dir))) as kept:
        report = _record_round(params, Path(run_dir), kept.trainer, report)
        if not launch.needed(params):
            report["memory"] = memory_figures(params)
    tracker = Tracker.resume(run_dir)
    tracker.log(report["step"], {f"memory/{name}": value for name, value in report.get("memory", {}).items()})
    tracker.catch_up(_records(Path(run_dir)))
    tracker.flush()
    return report


def export(params: Params, run_dir: str) -> dict[str, Any]:
    """The run's model -> outputs/model, with the records of its training."""
    run, start = Path(run_dir), read_start()
    with _opened(effective(params), run_dir, runs.accepted_keys(run)) as kept:
        trainer = kept.trainer
        with write_folder(paths.MODEL, KIND, VERSION, {"run": run.name}) as out:
            trainer.model.save_into(out, {"start": start.as_dict()} if start.warm else None)
            for name in (HISTORY, ROUNDS):
                if (run / name).is_file():
                    shutil.copyfile(run / name, out.path / name)
        exported = {"model": str(paths.MODEL), "epoch": trainer.epoch, "steps": trainer.step}
    forget()  # what follows needs the memory
    return exported


def _work(name: str, params: Params, run_dir: str) -> dict[str, Any]:
    accept = runs.accepted_keys(Path(run_dir))
    if launch.needed(params):
        forget()
        return launch.run(name, params, run_dir, accept, params.run.restarts)
    return work(name, params, run_dir, ALONE, accept)


def work(
    name: str, params: Params, run_dir: str | Path, ranks: Ranks = ALONE, accept: Collection[str] = ()
) -> dict[str, Any]:
    """What every rank of a training does: "cluster", "refresh" or "train_round". The first rank writes and reports."""
    with _opened(params, run_dir, accept, ranks) as kept:
        if name == "cluster":
            return {"epoch": kept.trainer.epoch, **kept.trainer.cluster()} if kept.trainer.refresh_due else {}
        if name == "refresh":
            return _refresh(kept.trainer, Path(run_dir))
        report = _train(kept.trainer, Path(run_dir))
        kept.random = random_state(kept.trainer.device)
    if not ranks.alone:
        report["memory"] = memory_figures(params)
    return report


def _refresh(trainer: Trainer, run_dir: Path) -> dict[str, Any]:
    if not trainer.refresh_due:
        return _refresh_report(run_dir, trainer.epoch - trainer.epoch % trainer.params.pool.refresh)
    report = {"epoch": trainer.epoch, **trainer.refresh()}
    if trainer.ranks.is_first:
        write_json(run_dir / REFRESH, report)
        Tracker.resume(run_dir).log(trainer.step, refresh_figures(report))
    return report


def _refresh_report(run_dir: Path, epoch: int) -> dict[str, Any]:
    """What was reported of the refresh after so many epochs; nothing but that where a kill came before the report."""
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((run_dir / REFRESH).read_text(encoding="utf-8"))
        if report["epoch"] == epoch:
            return report
    return {"epoch": epoch}


def _train(trainer: Trainer, run_dir: Path) -> dict[str, Any]:
    """The rest of the round; its figures are sent while it goes on."""
    if not trainer.ranks.is_first:
        return trainer.train_round()
    tracker = Tracker.resume(run_dir)
    # for the day when the folder's own note is lost: the run goes on in the same MLflow run
    trainer.notes |= {"mlflow_run_id": tracker.run_id}
    tracker.catch_up(_records(run_dir))
    try:
        with tracker.system_metrics(), tracker.live():
            report = trainer.train_round(lambda step, figures: tracker.log(step, step_figures(figures)), wait=False)
    except BaseException:
        tracker.flush()  # not forced: whoever stops a training does not wait for a store that is away
        raise
    tracker.flush()
    return report | {"step": trainer.step, "trained_seconds": trainer.seconds}


def _measure_if_missing(params: Params, run_dir: Path, epoch: int) -> list[str]:
    """A kill between a round's last checkpoint and its record: what the model is worth is measured now."""
    if any(line["epoch"] == epoch for line in read_json_lines(run_dir / ROUNDS)):
        return []
    with _opened(params, run_dir, runs.accepted_keys(run_dir)) as kept:
        trainer = kept.trainer
        report = {"epoch": trainer.epoch, "finished": trainer.finished, "measured_after_restart": True}
        _record_round(params, run_dir, trainer, report)
    return [f"epoch {epoch} was trained but not measured before: measured now"]


def _record_round(params: Params, run_dir: Path, trainer: Trainer, report: dict[str, Any]) -> dict[str, Any]:
    """Measure the validation split and add a finished round's line to rounds.jsonl.

    A round that was cut off counts as a whole: its steps since the round before, the seconds of those steps.
    """
    begin = time.perf_counter()
    ranking = Ranking.of_model(trainer.model, trainer.dataset, "validation", params.optim.precision)
    metrics = validation_metrics(ranking, params)
    validation_seconds = time.perf_counter() - begin
    before = [line for line in read_json_lines(run_dir / ROUNDS) if line["epoch"] < trainer.epoch]
    last = before[-1] if before else {}
    # a line of an older version says neither
    steps = trainer.step - int(last.get("step", trainer.step - report.get("steps", 0)) if last else 0)
    before_it = last.get("trained_seconds", trainer.seconds) if last else 0.0
    seconds = max(report.get("train_seconds", 0.0), trainer.seconds - before_it)
    report = report | {
        "step": trainer.step, "steps": steps, "train_seconds": seconds, "trained_seconds": trainer.seconds,
        "steps_per_s": steps / max(seconds, 1e-9), "round": -(-trainer.epoch // params.pool.refresh),
        "validation": metrics, "validation_seconds": validation_seconds,
        "refresh": _refresh_report(run_dir, _round_begin(trainer.epoch, params.pool.refresh)),
        "seconds": seconds + validation_seconds,
    }  # fmt: skip
    lines = [json.dumps(line) for line in [*before, report]]
    write_bytes_atomic(run_dir / ROUNDS, "".join(f"{line}\n" for line in lines).encode())
    return report


def _round_begin(epoch: int, a_round: int) -> int:
    """Finished epochs when the round began that ended after `epoch`."""
    return (epoch - 1) // a_round * a_round


# -- what is said ----------------------------------------------------------------------------------------------------


def _open_tracking(params: Params, run_dir: Path, state: dict[str, Any], lines: list[str]) -> Tracker:
    dataset = paths.open_dataset()
    meta = dataset.manifest["meta"]
    facts = {key: meta[key] for key in ("num_queries", "num_labels", "num_pairs")}
    tags = code_tags() | {"dataset.sha256": dataset.sha256, "run.folder": run_dir.name} | start_tags()
    accepted = [line.removeprefix("accepted: ") for line in lines if line.startswith("accepted: ")]
    if accepted:
        tags |= {"accepted": "; ".join(accepted)[:5000]}
    about = {"name": dataset.name, "digest": dataset.sha256, "path": str(paths.DATASET), **facts}
    tracker = Tracker(params.tracking.experiment)
    if known := dvc_hash(str(paths.DATASET)):
        tags[f"{DVC_TAG}{paths.DATASET}"] = known
    experiment = os.environ.get("DVC_EXP_NAME", "")  # set by `dvc exp run` and `dvc queue`
    if experiment:
        tags["dvc_experiment"] = experiment
    name = f"{dataset.name} {params.recipe or params.model.heads} {experiment or run_dir.name[:6]}"
    run_id = state.get("notes", {}).get("mlflow_run_id")
    logged = model_params(flatten(params) | {"data.path": paths.from_project(params.data.path)}, read_start().warm)
    tracker.start(run_dir, logged, tags, about, run_name=name, run_id=run_id)
    tracker.log_files([paths.VALIDATION / "index.html"], "validation")
    return tracker


def _where_it_goes_on(run_dir: Path, path: Path | None, state: dict[str, Any], epochs: int) -> list[str]:
    if path is None:
        return [f"run {run_dir.name} begins"]
    if state["epoch"] >= epochs:
        return [f"run {run_dir.name} is trained: {state['epoch']} epochs, {state['step']} steps"]
    inside = f" and {state['epoch_step']} steps of the next" if state["epoch_step"] else ""
    age = max(0.0, time.time() - path.stat().st_mtime)
    return [
        f"run {run_dir.name} goes on after epoch {state['epoch']} of {epochs}{inside} (step {state['step']}), "
        f"from the checkpoint of {runs.in_words(age)} ago"
    ]


def _records(run_dir: Path) -> list[dict[str, float]]:
    """All that the run's own files have for the tracker: figures of steps, then of rounds."""
    rounds = [line for line in read_json_lines(run_dir / ROUNDS) if "step" in line and line.get("validation")]
    steps = [{"step": line["step"], **step_figures(line)} for line in read_json_lines(run_dir / HISTORY)]
    return steps + [
        {"step": line["step"], **{f"validation/{k}": v for k, v in headline(line["validation"]).items()}}
        for line in rounds
    ]
