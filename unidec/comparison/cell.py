"""One task of a comparison, in a process of its own: `python -m unidec.comparison.cell FOLDER`.

The folder is the working folder and holds job.json. Killed or stopped, the same command goes on: training from its
checkpoint, everything else from its beginning. result.json comes last; what went wrong is in failure.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.comparison.workspace import FAILURE, MODEL, RESULT, SPEC, read_json, same_identity
from unidec.config import Params
from unidec.data.storage import write_json
from unidec.errors import Stopped, TrainingError, UnidecError

if TYPE_CHECKING:
    from unidec.training.step_timing import Times

IDENTITY = "identity.json"  # under which the folder's unfinished work was begun
BUDGET = "budget.json"
MOST_EPOCHS = 1000  # a budget is no reason for more
PARENT = "UNIDEC_COMPARE_PARENT"
ACCEPT = "UNIDEC_COMPARE_ACCEPT"
_KEPT = (SPEC, "log.txt", ".lock")


def main(folder: str) -> int:
    """Do the task of a folder; returns the exit code."""
    from unidec.pipeline.parent_watch import watch

    os.chdir(folder)
    if PARENT in os.environ:
        watch(int(os.environ[PARENT]))
    spec = json.loads(Path(SPEC).read_text(encoding="utf-8"))
    accepted = tuple(os.environ.get(ACCEPT, "").split())
    try:
        with _alone():
            if _is_made(spec, accepted):
                return 0  # by another comparison of the same workspace, while this one waited
            _clean(spec, accepted)
            _link(spec["links"])
            TASKS[spec["kind"]](spec, accepted)
    except Stopped as stopped:
        print(stopped, file=sys.stderr, flush=True)
        return stopped.exit_code
    except UnidecError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_json(FAILURE, {"what": str(error), "exit_code": error.exit_code})
        return error.exit_code
    Path(FAILURE).unlink(missing_ok=True)
    return 0


# -- tasks ------------------------------------------------------------------------------------------------------------


def _data(spec: dict[str, Any], _accepted: tuple[str, ...]) -> None:
    """Data set (a slice of it, where one is asked for), tokens, propensities."""
    from unidec import pipeline
    from unidec.data.dataset import write_dataset
    from unidec.data.formats import read_section
    from unidec.data.raw import make_slice
    from unidec.pipeline import paths

    params = Params.model_validate(spec["params"])
    if spec["train"] or spec["test"]:
        data = params.data
        everything = 2**62
        raw = make_slice(read_section(data, params.raw), spec["train"] or everything, spec["test"] or everything)
        write_dataset(paths.DATASET, raw, validation_share=data.validation_share, split_seed=data.split_seed)
    else:
        pipeline.ingest(params)
    pipeline.tokens(params)
    pipeline.propensity(params)


def _graph(spec: dict[str, Any], _accepted: tuple[str, ...]) -> None:
    from unidec import pipeline

    pipeline.label_graph(Params.model_validate(spec["params"]))


def _recipe(spec: dict[str, Any], accepted: tuple[str, ...]) -> None:
    """Train, index, evaluate, measure."""
    from unidec import pipeline
    from unidec.comparison import measure
    from unidec.pipeline.runs import list_runs

    begin = time.time()
    params = _within(spec["minutes"], spec["params"]) if "minutes" in spec else Params.model_validate(spec["params"])
    # with other code the run would get another name: the one that was begun goes on
    begun = "" if accepted and any(run.unfinished for run in list_runs()) else None
    state = pipeline.train(params, begun, accepted if begun is not None else ())
    peak = measure.peak_bytes()
    facts = measure.serve(params)
    result = measure.of_recipe(params, facts | {"peak_memory_bytes": peak}, Path(state["run_dir"]))
    _finish(spec, result, begin)


def _within(minutes: float, values: dict[str, Any]) -> Params:
    """The parameters with as many epochs as fill a training's time on this machine; measured once a cell."""
    told = read_json(Path(BUDGET))
    if told is None:
        from unidec.pipeline.plan import measure_time

        # the time of a step does not depend on the weights that it starts from
        params = Params.model_validate({**values, "encoder": {**values["encoder"], "start": ""}})
        told = {"epochs": affordable_epochs(measure_time(params), params.pool.refresh, 60 * minutes)}
        write_json(BUDGET, told)
    epochs, warmup = told["epochs"], values["optim"]["warmup_epochs"]
    optim = {**values["optim"], "epochs": epochs, "warmup_epochs": min(warmup, epochs / 4)}
    return Params.model_validate({**values, "optim": optim})


def affordable_epochs(times: Times, rounds_of: int, seconds: float) -> int:
    """The most epochs, at least 1, that fit into so many seconds with a refresh every `rounds_of` epochs."""
    refresh, epochs = times.encode + times.cluster + times.mine, 1
    while times.once + (epochs + 1) * times.epoch + -(-(epochs + 1) // rounds_of) * refresh <= seconds:
        epochs += 1
        if epochs == MOST_EPOCHS:
            break
    return epochs


def _model_of(spec: dict[str, Any], _accepted: tuple[str, ...]) -> None:
    """Index and evaluate a model that another cell trained."""
    from unidec.comparison import measure

    params, begin = Params.model_validate(spec["params"]), time.time()
    _link({MODEL: spec["model"]})
    result = measure.of_recipe(params, measure.serve(params), None)
    _finish(spec, result, begin)


def _peer(spec: dict[str, Any], _accepted: tuple[str, ...]) -> None:
    from unidec.comparison import measure, peers

    params, begin = Params.model_validate(spec["params"]), time.time()
    Path("outputs").mkdir(exist_ok=True)
    write_json("peer.json", {
        "text": params.tokens.text, "max_length": params.tokens.max_length, "encoder": spec["params"]["encoder"],
        "model_dim": params.model.dim, "epochs": params.optim.epochs, "batch_size": params.pool.batch_size,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")), "shared": spec["shared"],
    })  # fmt: skip
    facts = peers.run(spec["peer"], Path.cwd(), spec["seed"], spec["options"])
    _finish(spec, measure.of_peer(params, spec, facts), begin)


TASKS = {"data": _data, "graph": _graph, "recipe": _recipe, "model_of": _model_of, "peer": _peer}


# -- the folder -------------------------------------------------------------------------------------------------------


def _finish(spec: dict[str, Any], result: dict[str, Any], begin: float) -> None:
    """Write the result, then let go of what is only needed to go on."""
    # an attempt that was cut off before has left the seconds of its training only
    recorded = sum(line["seconds"] + line.get("refresh", {}).get("refresh_seconds", 0) for line in result["curve"])
    result["costs"]["total_seconds"] = max(time.time() - begin, recorded)
    result["costs"]["cpu_seconds"] = time.process_time()  # what it took of a machine that others work on too
    write_json(RESULT, {"name": spec["name"], "kind": spec["kind"], "identity": spec["identity"], **result})
    for folder in [*Path("runs").glob("*/checkpoints"), *Path("runs").glob("*/refresh")]:
        shutil.rmtree(folder, ignore_errors=True)
    if not spec["keep"]:
        for name in (MODEL, "outputs/bundle"):
            _remove(Path(name))


def _is_made(spec: dict[str, Any], accepted: tuple[str, ...]) -> bool:
    if "identity" not in spec:
        return False
    result = read_json(Path(RESULT))
    if result is None or not same_identity(result.get("identity", {}), spec["identity"], accepted):
        return False
    return not spec["keep"] or spec["kind"] != "recipe" or (Path(MODEL) / "manifest.json").is_file()


def _clean(spec: dict[str, Any], accepted: tuple[str, ...]) -> None:
    """Remove what was made under another identity: it can be neither gone on with nor shown."""
    Path(FAILURE).unlink(missing_ok=True)
    if "identity" not in spec:
        return
    begun = read_json(Path(IDENTITY))
    if Path(RESULT).is_file() or begun is None or not same_identity(begun, spec["identity"], accepted):
        Path(RESULT).unlink(missing_ok=True)
        for path in Path.cwd().iterdir():
            if path.name not in _KEPT:
                _remove(path)
        write_json(IDENTITY, spec["identity"])


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _link(links: dict[str, str]) -> None:
    """Relative links to what is shared: a moved workspace still works."""
    for name, target in links.items():
        place = Path(name)
        place.parent.mkdir(parents=True, exist_ok=True)
        if name == "data/cache":
            Path(target).mkdir(parents=True, exist_ok=True)
        wanted = os.path.join(*[".."] * len(place.parent.parts), target)
        if place.is_symlink() and os.readlink(place) == wanted:
            continue
        if place.is_symlink() or place.exists():
            _remove(place)
        place.symlink_to(wanted)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Two comparisons that meet at one folder: the later one waits, and finds it done."""
    from filelock import FileLock, Timeout

    lock = FileLock(".lock")
    try:
        lock.acquire(timeout=6 * 3600)
    except Timeout as error:
        raise TrainingError("another process holds this folder", where=os.getcwd(), fix="end it") from error
    try:
        yield
    finally:
        lock.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
