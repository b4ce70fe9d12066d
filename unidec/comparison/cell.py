"""One step of a comparison, in a separate process: `python -m unidec.comparison.cell FOLDER`.

The folder is the working folder and holds cell.json. Re-run the command after a kill or a stop:
training resumes from its checkpoint, everything else starts again. result.json is written last;
errors are in failure.json.

Legend: n test queries, K labels per query.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from unidec.comparison.jobs import START
from unidec.comparison.peers import PEERS
from unidec.comparison.peers.running import last_lines, run_peer
from unidec.comparison.workspace import FAILURE, LOG, MODEL, PREDICTIONS, RESULT, SPEC, Step
from unidec.config import Params, flatten
from unidec.data.file_lock import lock_file
from unidec.data.json_file import read_json_lines
from unidec.data.storage import MANIFEST, folder_bytes, read_json, write_json
from unidec.data.temporary import remove
from unidec.errors import ConfigError, Stopped, TrainingError, UnidecError
from unidec.evaluation.baselines import K
from unidec.machine import host_peak
from unidec.pipeline import paths

PARENT = "UNIDEC_COMPARE_PARENT"  # environment variable: the process that must be alive
COMMAND = (sys.executable, "-m", "unidec.comparison.cell")
POLL_S = 0.1
GRACE_S = 120.0  # time for a stopped child to write its checkpoint
TIMED_QUERIES = 512  # queries whose prediction is timed
TIMED_K = 10


def run_step(
    step: Step,
    environment: Mapping[str, str],
    stopping: threading.Event,
    is_enough: Callable[[], bool] = lambda: False,
) -> bool:
    """Run a step in its own process group, and wait for it; `stopping` ends it with a checkpoint,
    and so does `is_enough`, which is called again and again.

    Returns:
        whether `is_enough` ended it.

    Raises:
        TrainingError: with the reason, which is also in failure.json.
    """
    if stopping.is_set():
        raise TrainingError(
            "the comparison is being stopped", where=step.name, fix="run it again to resume"
        )
    variables = {**os.environ, **environment, PARENT: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    folder = step.folder
    log_file = folder / LOG
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / SPEC, step.spec)
        with log_file.open("ab") as log:
            process = subprocess.Popen(
                [*COMMAND, str(folder.resolve())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                process_group=0,
            )
    except OSError as error:
        raise TrainingError(
            "the process of this run cannot be started",
            where=step.name,
            got=error,
            fix="make its folder writable, free memory or disk space, then run it again",
        ) from error
    try:
        while (code := process.poll()) is None:
            if stopping.wait(POLL_S):
                _end(process)
            elif is_enough():
                _end(process)
                return True
    except BaseException:  # a signal
        _end(process)
        raise
    if code == 0 and step.result() is not None:
        return False
    reason = step.failure()
    if not reason:
        how = f"exit code {code}"
        if code < 0:
            how = f"ended by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (not enough memory?)"
        reason = f"{how}: {last_lines(log_file)}"
        if not stopping.is_set():
            write_json(folder / FAILURE, {"what": reason})
    raise TrainingError(
        reason,
        where=log_file,
        fix="read this log, remove the cause and run it again: finished runs are kept",
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children; it is given time to write a checkpoint."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def main(folder: str) -> int:
    """Run the step of a folder; returns the exit code."""
    from unidec.pipeline.parent_watch import watch

    os.chdir(folder)
    if PARENT in os.environ:
        watch(int(os.environ[PARENT]))
    spec = read_json(SPEC)
    step = Step("", "", Path(), spec)
    try:
        with lock_file(Path(".lock")):  # another comparison may be running the same cell
            if not step.is_done():
                _make(step)
    except Stopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code
    except UnidecError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_json(FAILURE, {"what": str(error)})
        return error.exit_code
    return 0


def _make(step: Step) -> None:
    """Produce a step's data set, model or peer, and its result; then delete files that only an
    unfinished run needs.
    """
    from unidec.pipeline.evaluation import data_card

    Path(FAILURE).unlink(missing_ok=True)
    if step.result() is not None:  # a result of other code
        for path in Path().iterdir():
            if path.name not in (SPEC, LOG, ".lock"):
                remove(path)
    spec = step.spec
    begin = time.time()
    _link(spec["links"])
    params = Params.model_validate(spec["params"])
    result = {"name": spec["name"], "code": spec["code"]}
    if spec["kind"] == "data":
        _prepare_data(params, spec["train"], spec["test"])
    else:
        work = {"peer": _peer, "trial": _trained}.get(spec["kind"], _recipe)
        made = work(spec, params)
        # of an interrupted earlier attempt, only the seconds of its training are known
        recorded = seconds_of(made["curve"])
        made["costs"]["total_seconds"] = max(time.time() - begin, recorded)
        # comparable on a machine that others use too
        made["costs"]["cpu_seconds"] = time.process_time()
        lineage = _lineage() | made.get("lineage", {})
        result |= {**made, "dataset": data_card(params), "lineage": lineage}
    write_json(RESULT, result)
    if not spec["keep"]:
        remove(Path(MODEL))
        remove(Path("outputs/bundle"))
    remove_checkpoints(Path())


def seconds_of(curve: Iterable[Mapping[str, Any]]) -> float:
    """Seconds of rounds and their refreshes, from lines of rounds.jsonl."""
    return sum(line["seconds"] + _refresh_seconds(line) for line in curve)


def _refresh_seconds(line: Mapping[str, Any]) -> float:
    return float(line["refresh"].get("refresh_seconds", 0.0))


def remove_checkpoints(folder: Path) -> None:
    """Remove files that only an unfinished training needs from a step's folder."""
    for unfinished in ("runs/*/checkpoints", "runs/*/refresh"):
        for path in folder.glob(unfinished):
            remove(path)


def _prepare_data(params: Params, train: int | None, test: int | None) -> None:
    """Prepare the data set (or the requested slice of it), tokens and propensities."""
    from unidec import pipeline
    from unidec.data.dataset import write_dataset
    from unidec.data.formats import read_section
    from unidec.data.raw import make_slice

    if train or test:
        data = params.data
        everything = 2**62
        whole = read_section(data, params.raw)
        raw = make_slice(whole, train or everything, test or everything)
        write_dataset(
            paths.DATASET, raw, validation_share=data.validation_share, split_seed=data.split_seed
        )
    else:
        pipeline.ingest(params)
    pipeline.tokens(params)
    pipeline.propensity(params)


def _trained(_spec: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """Train; returns costs, curve and MLflow run of the training. The test split is not used."""
    from unidec import pipeline
    from unidec.tracking.run import tracking_state

    if params.reads_label_graph and not (paths.LABEL_GRAPH / MANIFEST).is_file():
        pipeline.label_graph(params)
    trained = pipeline.train(params)
    assert trained is not None  # one process trains it
    run_dir = Path(trained.run_dir)
    curve = read_json_lines(run_dir / "rounds.jsonl")
    costs = {
        "peak_memory_bytes": float(host_peak()),
        "train_seconds": sum(line["train_seconds"] for line in curve),
        "refresh_seconds": sum(map(_refresh_seconds, curve)),
    }
    run_id = tracking_state(run_dir).get("run_id")
    return {"costs": costs, "curve": curve, "mlflow_run": run_id}


def _recipe(spec: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """Train (or take another cell's model), index, evaluate; returns metrics, costs and curve of
    the bundle in outputs/.
    """
    import pyarrow.parquet as pq

    from unidec import pipeline
    from unidec.bundle.bundle import Bundle

    result: dict[str, Any] = {"costs": {}, "curve": [], "mlflow_run": None}
    if spec["kind"] == "recipe":
        result = _trained(spec, params)
    pipeline.index(params)
    pipeline.evaluate(params)
    metrics = read_json(paths.METRICS)
    table = pq.read_table(paths.PREDICTIONS, columns=["labels"])
    lists = table["labels"].combine_chunks()
    labels = np.full((len(lists), K), -1, dtype=np.int32)  # [n, K], -1 behind the last
    num_n1 = lists.value_lengths().to_numpy()[:, None]
    labels[np.arange(K) < num_n1] = lists.flatten()
    np.save(PREDICTIONS, labels, allow_pickle=False)
    bundle = Bundle.load(paths.BUNDLE, verify=False)
    sizes = [weight.numel() for weight in bundle.model.parameters()]
    sizes += [array.size for name, array in bundle.vectors.items() if name != "de"]
    result["costs"] |= {
        "search_ms": _search_ms(bundle, params),
        "parameters": float(sum(sizes)),
        "bundle_bytes": float(folder_bytes(paths.BUNDLE)),
    }
    # results are shared: without folders of this machine
    shared = {
        key: value for key, value in flatten(params).items() if not Path(str(value)).is_absolute()
    }
    return result | {
        "params": shared,
        "metrics": metrics["test"],
        "validation": metrics["validation"],
    }


def _search_ms(bundle: Any, params: Params) -> float:
    """Milliseconds per test query, from its text to its labels."""
    dataset = paths.open_dataset()
    rows = dataset.rows("test")[:TIMED_QUERIES]
    texts = dataset.query_texts(rows, params.tokens.text)
    # warm-up: loading at the first call is not search time
    bundle.predict_arrays(texts[:8], k=TIMED_K)
    begin = time.perf_counter()
    bundle.predict_arrays(texts, k=TIMED_K)
    return 1000 * (time.perf_counter() - begin) / max(len(texts), 1)


def _peer(spec: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """Run a peer, remove filtered pairs, evaluate its labels as our own, and log an MLflow run."""
    from unidec.evaluation.metrics import evaluate, remove_filtered, truth_of
    from unidec.model.encoder_folder import FROM_HERE, resolved
    from unidec.model.sources import resolve_encoder
    from unidec.tracking.run import Tracker

    dataset = paths.open_dataset()
    propensity = paths.open_propensity()
    name = spec["peer"]
    peer = PEERS[name]
    settings = {
        "text": params.tokens.text,
        "max_length": params.tokens.max_length,
        "pooling": "mean",
        "encoder": "",
        "epochs": params.optim.epochs,
        "batch_size": params.pool.batch_size,
        "seed": params.seed,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
    }
    if peer.script == "sentence.py":
        folder = resolve_encoder(params.encoder.name)
        pooling = resolved(params.encoder, folder).pooling
        settings |= {"encoder": str(folder), "pooling": FROM_HERE[pooling]}
    vectors = _vectors(params, dataset) if peer.reads_vectors else None
    labels, facts = run_peer(name, dataset, settings, vectors)
    rows = dataset.rows("test")
    labels = remove_filtered(labels, dataset.filter_pairs[rows], K)
    np.save(PREDICTIONS, labels.astype(np.int32), allow_pickle=False)
    truth = truth_of(dataset, rows)
    metrics = evaluate(labels, truth, propensity.inverse_L, propensity.group_L)
    version = facts.pop("version")
    costs = {"peak_memory_bytes": float(host_peak()), **facts}
    tracker = Tracker(params.tracking.experiment)
    about = {"name": dataset.name, "digest": dataset.sha256, "path": str(paths.DATASET)}
    tracker.start("runs/peer", {"peer": name, "seed": params.seed}, {}, about)
    for part, figures in (("test", metrics), ("cost", costs)):
        tracker.log_final({f"{part}/{name}": value for name, value in figures.items()})
    tracker.finish()
    return {
        "metrics": metrics,
        "validation": {},
        "costs": costs,
        "curve": [],
        "mlflow_run": tracker.run_id,
        "lineage": {name: version},
    }


def _vectors(params: Params, dataset: Any) -> dict[str, np.ndarray]:
    """Unit vectors of all texts by the model that a peer builds on (`after`)."""
    from unidec.methods.assembly import load_model
    from unidec.pipeline.ranking import Ranking

    every_query = np.arange(dataset.num_queries)
    ranking = Ranking.of_model(load_model(START), dataset, every_query, params.optim.precision)
    if ranking.encoded.de_BD is None:
        raise ConfigError(
            "the model has no vectors of label texts",
            fix="name a cell with a dual encoder in `after`",
        )
    return {"queries": ranking.encoded.de_BD, "labels": ranking.vectors["de"]}


def _lineage() -> dict[str, str]:
    """Versions, commit and machine with which the figures were measured; no user or host names."""
    import torch

    from unidec.tracking.provenance import COMMIT_TAG, DIRTY_TAG, code_tags

    tags = code_tags()
    names = {COMMIT_TAG: "commit", DIRTY_TAG: "edited", "unidec.version": "unidec"}
    found = {short: tags[name] for name, short in names.items() if name in tags}
    found |= {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _link(links: Mapping[str, str]) -> None:
    """Make relative links to the shared folders, so that a moved workspace still works."""
    for name, target in links.items():
        place = Path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "data/cache":
            Path(target).mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.relpath(target, place.parent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
