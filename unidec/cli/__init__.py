"""The command line: every stage of the pipeline, prediction, and a look at the parameters.

Parameters are read and checked before anything heavy is imported, so that a mistake in them shows at once.
"""

from __future__ import annotations

from unidec import interrupt  # before all that takes time: from now on Ctrl-C ends with a line

# isort: split
import contextlib
import os
import sys
import threading
import traceback
from typing import Annotated, Any

from typer import Argument, Exit, Option

from unidec import pipeline
from unidec.cli import bundles, data, init, labels, models  # noqa: F401  init adds its command
from unidec.cli.commands import (
    DEFAULT_PARAMS,
    AsJson,
    Assignments,
    ParamsFile,
    Shown,
    add_stage,
    app,
    command,
    group,
    load,
    table,
)
from unidec.config import Params, describe, parse_overrides, recipe_names, to_yaml
from unidec.errors import ConfigError, Stopped, UnidecError, missing_package, without_credentials
from unidec.version import __version__

config_app = group("config", "Show, check and explain the parameters.")
runs_app = group("runs", "List training runs, and find and repair what a crash left.")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"unidec-xmc {__version__}")
        raise Exit


@app.callback()
def _options(
    debug: Annotated[bool, Option("--debug", help="show the traceback of an error (anywhere on the line)")] = False,
    version: Annotated[
        bool, Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""
    # numpy's products are of one query each and small: more threads for one cost more than they bring, and take the
    # cores from torch, the encoder and the search. Read once, when numpy is imported
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@command(app, "--set optim.epochs=3", "--resume", "--resume 3f2a --accept optim.lr_clf --accept code")
def train(
    params: Params,
    run: Annotated[
        str | None, Argument(metavar="[RUN]", help="with --resume: a run's name, or its first letters")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="resume RUN, or the newest unfinished run")] = False,
    accept: Annotated[
        list[str] | None,
        Option(metavar="KEY", help="resume although this differs from how the run began; repeatable"),
    ] = None,
) -> Any:
    """Train in this process, without Prefect; re-run the command to resume a training that was stopped or killed."""
    if run is not None and not resume:
        raise ConfigError("a run to resume needs --resume", where="unidec train", fix=f"unidec train --resume {run}")
    return pipeline.train(params, (run or "") if resume else None, tuple(accept or ()))


add_stage(
    app, "evaluate", "evaluate", "Compute every metric on the test split; report and plots in outputs/.",
    "--json",
)  # fmt: skip


@app.command(
    epilog="Examples: unidec compare comparison/small.yaml  |  unidec compare comparison/small.yaml --report-only  |  "
    'unidec compare comparison/fair.yaml --only "lf-debian titles/unidec/0" --jobs 2'
)
def compare(
    file: Annotated[str, Argument(metavar="FILE", help="the comparison file")],
    only: Annotated[
        list[str] | None, Option(metavar="NAME", help="cell, data/cell or data/cell/seed, with wildcards; repeatable")
    ] = None,
    assignments: Assignments = None,
    jobs: Annotated[int, Option(help="runs at a time: their times are no fair measure unless it is 1")] = 1,
    folder: Annotated[str | None, Option(help="of the results, instead of runs/compare/<name>")] = None,
    metrics: Annotated[str | None, Option(help="a JSON file for the last run's figures")] = None,
    tune: Annotated[bool, Option("--tune", help="run the trials of section `tuning`, and write what is best")] = False,
    as_json: AsJson = False,
    report_only: Annotated[
        bool, Option("--report-only", help="write the report: results, and the runs without one; run nothing")
    ] = False,
) -> None:
    """Run every system of a comparison file on the same data and seeds, and report; what is done is not run again."""
    if not report_only:
        # in this process's place, so that signals and the exit code are the flow's
        words = [word for word in sys.argv[1:] if word != "--debug"]
        os.execv(sys.executable, [sys.executable, "-m", "flows.compare", *words[1:]])
    from unidec.comparison.results import write_report
    from unidec.comparison.workspace import load_comparison

    print(f"report: {write_report(load_comparison(file, parse_overrides(assignments or []), folder))}")


@command(
    app,
    "comparison/tune.yaml --trials 20",
    "comparison/tune.yaml --metric PSP@5 --set optim.epochs=6 --out runs/tune/tail",
)
def tune(
    params: Params,
    space: Annotated[str, Argument(metavar="SPACE", help="search space: key path: {low, high, log}, or [choices]")],
    trials: Annotated[int, Option(min=1, help="trainings in all, those of an earlier call counted")] = 20,
    metric: Annotated[str, Option(help="of the validation split, after a training's last epoch")] = "nDCG@5",
    out: Annotated[
        str | None, Option(metavar="FOLDER", help="of the search, instead of runs/tune/<name of SPACE>")
    ] = None,
) -> Any:
    """Search parameters by a validation metric; a trial is a training, a bad one ends after a round.

    best.yaml has the best parameters. Stopped or killed, the same command continues. The test split is not looked at.
    """
    from unidec.comparison import tune as tuning

    return tuning.tune(params, space, trials, metric, out)


@command(
    app, "", "--set run.table_place=host --json",
    "--set recipe=unidec-gpu --labels 1300000 --queries 2248619 --tokens 32 --device-memory 48GiB",
)  # fmt: skip
def plan(
    params: Params,
    labels: Annotated[int | None, Option(min=1, help="sizes by hand instead of data/dataset: labels")] = None,
    queries: Annotated[int | None, Option(min=1, help="training queries")] = None,
    tokens: Annotated[int | None, Option(min=1, help="tokens of each text")] = None,
    device_memory: Annotated[
        str | None, Option(metavar="SIZE", help="compare with a GPU of this size alone: 16GiB")
    ] = None,
) -> Shown:
    """Memory of a training before it starts, and settings that would fit; exit code 1: too large."""
    from unidec.pipeline.plan import plan_command

    planned = plan_command(params, labels, queries, tokens, device_memory)
    return Shown(planned.as_dict(), planned.lines(), 1 if planned.short else 0)


@command(runs_app, "", "--json", name="list")
def list_runs() -> Shown:
    """List the training runs of this folder: how far each came, its newest checkpoint, its MLflow run."""
    from unidec.pipeline.runs import list_runs, rows_of

    found = list_runs()
    lines = table(*rows_of(found)) if found else ["no runs yet: unidec train begins one"]
    return Shown(found, lines)


@command(runs_app, "", "--fix", "--deep --json")
def doctor(
    fix: Annotated[bool, Option("--fix", help="do what cannot lose data, and say what was done")] = False,
    deep: Annotated[bool, Option("--deep", help="also hash models, bundles and checkpoints")] = False,
) -> Shown:
    """Look for what a crash or a full disk leaves behind; exit code 0: nothing wrong, 1: warnings, 4: broken."""
    from unidec.pipeline.doctor import examine, exit_code, rows_of

    found = examine(deep=deep, fix=fix)
    return Shown(found, table(*rows_of(found)) if found else ["healthy"], exit_code(found))


@command(config_app, "--set recipe=depsl", name="show")
def config_show(params: Params) -> Shown:
    """Print every parameter as it will be used: file over recipe over default."""
    return Shown(params.model_dump(), to_yaml(params).splitlines())


@config_app.command("check", epilog="Example: unidec config check --params mine.yaml")
def config_check(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None) -> None:
    """Check the parameters: all that is wrong is listed, exit code 2."""
    load(params, assignments)
    print(f"{params}: ok")


@command(config_app, "| grep pool", name="keys")
def config_keys() -> None:
    """Explain every parameter: default, what it takes, what it does."""
    for key, default, takes, about in describe():
        print(f"{key} = {default}\n    {about} ({takes})")
    print(f"\nrecipes: {', '.join(recipe_names())}")


@app.command()
def version() -> None:
    """Print the version, and those of what results depend on."""
    from importlib import metadata

    print(f"unidec-xmc {__version__}\npython {sys.version.split()[0]}")
    for name in ("torch", "transformers", "tokenizers", "faiss-cpu", "faiss-gpu", "numpy", "mlflow", "prefect", "dvc"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(f"{name} {metadata.version(name)}")


for _group in (
    data.data_app, models.models_app, labels.labels_app, bundles.index_app, bundles.export_app, runs_app, config_app,
):  # fmt: skip
    app.add_typer(_group)


def main() -> None:
    """Entry point: an error that a user can fix is a message and an exit code, not a traceback."""
    debug = "--debug" in sys.argv[1:]
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    # as Python's own, without the credentials of addresses in messages
    sys.excepthook = lambda *error: print(
        without_credentials("".join(traceback.format_exception(*error))), end="", file=sys.stderr, flush=True
    )
    interrupt.guard_work()
    try:
        app(args=arguments, prog_name="unidec")
    except UnidecError as error:
        if debug:
            raise
        print(error if isinstance(error, Stopped) else f"error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, Stopped) and any(not thread.daemon for thread in threading.enumerate()[1:]):
            os._exit(error.exit_code)  # a second Ctrl-C came while a checkpoint was being written
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if debug or missing is error:
            raise
        sys.exit(f"error: {missing}")
    except interrupt.Interrupted:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(interrupt.EXIT_CODE)
