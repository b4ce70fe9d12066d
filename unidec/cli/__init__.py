"""The command line: every stage of the pipeline, prediction, serving, and inspection of the
parameters.

Parameters are read and checked before anything heavy is imported, so that a mistake in them is
reported at once."""

from __future__ import annotations

# first, before slow imports: from here on Ctrl-C prints one line
from unidec import interrupt, surroundings

if interrupt.IS_PROGRAM:
    surroundings.settle()

# isort: split
import contextlib
import json
import os
import platform
import sys
import threading
from typing import Annotated, Any

from typer import Argument, Exit, Option

from unidec import pipeline
from unidec.addresses import mask_logs, masked_excepthook

# the others add their commands
from unidec.cli import bundles, commands, data_commands, init, label_commands, models  # noqa: F401
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
    lines_of,
    load,
    load_if_there,
    shown_rows,
    table,
)
from unidec.config import Params, describe, parse_overrides, recipe_names, to_yaml, what_decides
from unidec.cores import one_thread_of_blas
from unidec.errors import ConfigError, Stopped, in_one_message
from unidec.user import name_user
from unidec.version import __version__

_VERSIONED = "torch transformers tokenizers faiss-cpu faiss-gpu numpy mlflow prefect dvc"
config_app = group("config", "Show, check and explain the parameters.")
runs_app = group("runs", "List training runs; find and repair what a crash left behind.")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"unidec-xmc {__version__}")
        raise Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, Option("--debug", help="show tracebacks (anywhere on the command line)")
    ] = False,
    version: Annotated[
        bool, Option("--version", help="print the version", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options before the command."""
    one_thread_of_blas()
    name_user()


@command(
    app, "--set optim.epochs=3", "--resume", "--resume 3f2a --accept optim.lr_clf --accept code"
)
def train(
    params: Params,
    run: Annotated[
        str | None,
        Argument(metavar="[RUN]", help="with --resume: a run's name, or the beginning of it"),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="resume RUN, or the newest unfinished run")
    ] = False,
    accept: Annotated[
        list[str] | None,
        Option(
            metavar="KEY", help="resume although KEY has changed since the run began; repeatable"
        ),
    ] = None,
) -> Any:
    """Train in this process, without Prefect; re-run the command to resume a training that was
    stopped or killed.
    """
    if run is not None and not resume:
        raise ConfigError(
            "a run to resume needs --resume",
            where="unidec train",
            fix=f"unidec train --resume {run}",
        )
    resumed = (run or "") if resume else None
    return pipeline.train(params, resumed, tuple(accept or ()))


add_stage(
    app,
    "evaluate",
    "Compute every metric on the test split; write report and plots to outputs/.",
    "--json",
)


@app.command(
    epilog="Examples: unidec compare comparison/small.yaml  |  "
    "unidec compare comparison/small.yaml --report-only  |  "
    'unidec compare comparison/fair.yaml --only "lf-debian titles/unidec/0" --jobs 2'
)
def compare(
    file: Annotated[str, Argument(metavar="FILE", help="the comparison file")],
    only: Annotated[
        list[str] | None,
        Option(
            metavar="NAME", help="cell, data/cell or data/cell/seed, with wildcards; repeatable"
        ),
    ] = None,
    assignments: Assignments = None,
    jobs: Annotated[int, Option(help="parallel runs; times are comparable only with 1")] = 1,
    folder: Annotated[
        str | None, Option(help="folder of the results; default: runs/compare/<name>")
    ] = None,
    metrics: Annotated[
        str | None, Option(help="JSON file to write the last run's metrics to")
    ] = None,
    tune: Annotated[
        bool, Option("--tune", help="search the ranges of section `tuning`, and write the best")
    ] = False,
    keep_results: Annotated[
        bool,
        Option(
            "--keep-results", help="do not rebuild results that another version of the code made"
        ),
    ] = False,
    as_json: AsJson = False,
    report_only: Annotated[
        bool, Option("--report-only", help="run nothing; write the report of the results so far")
    ] = False,
) -> None:
    """Run every system of a comparison file on the same data and seeds, and report; finished runs
    are not repeated.
    """
    if not report_only:
        # replaces this process, so that signals and the exit code are the flow's
        os.execv(sys.executable, [sys.executable, "-m", "flows.compare", *_arguments()[1:]])
    from unidec.comparison.results import write_report
    from unidec.comparison.workspace import load_comparison

    comparison = load_comparison(file, parse_overrides(assignments or []), folder)
    report = str(write_report(comparison))
    print(json.dumps({"report": report}) if as_json else f"report: {report}")


@command(
    app,
    "comparison/tune.yaml --trials 20",
    "comparison/tune.yaml --metric PSP@5 --set optim.epochs=6 --out runs/tune/tail",
)
def tune(
    params: Params,
    space: Annotated[
        str, Argument(metavar="SPACE", help="YAML file: {low, high, log} or [choices] per key path")
    ],
    trials: Annotated[
        int, Option(min=1, help="total number of trials, including those of earlier calls")
    ] = 20,
    metric: Annotated[
        str, Option(help="metric on the validation split after the last epoch")
    ] = "nDCG@5",
    out: Annotated[
        str | None,
        Option(metavar="FOLDER", help="folder of the search; default: runs/tune/<name of SPACE>"),
    ] = None,
) -> Any:
    """Search parameters by a validation metric; each trial is a training, and bad trials are pruned
    after a round.

    The best parameters are written to best.yaml. Re-run the command to resume a search that was
    stopped or killed. The test split is not used."""
    from unidec.comparison import tune as tuning

    return tuning.tune(params, space, trials, metric, out)


@command(
    app,
    "",
    "--set run.table_place=host --json",
    "--set recipe=unidec-gpu-paper --labels 1300000 --queries 2248619 --tokens 32 "
    "--device-memory 48GiB",
    "--labels 100000000 --queries 1000000000 --tokens 8 --machines 64",
)
def plan(
    params: Params,
    labels: Annotated[
        int | None, Option(min=1, help="number of labels, instead of data/dataset's")
    ] = None,
    queries: Annotated[int | None, Option(min=1, help="number of training queries")] = None,
    tokens: Annotated[int | None, Option(min=1, help="tokens per text")] = None,
    device_memory: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="memory of the GPU to plan for, such as 16GiB, instead of this machine's",
        ),
    ] = None,
    machines: Annotated[
        int | None,
        Option(min=1, help="also estimate the time, on this many machines with two cores each"),
    ] = None,
) -> Shown:
    """Estimate the memory of a training, and suggest settings that fit; exit code 1: it does not
    fit.
    """
    from unidec.pipeline.memory_plan import plan_command

    planned = plan_command(params, labels, queries, tokens, device_memory, machines)
    return Shown(planned.as_dict(), planned.lines(), 1 if planned.short else 0)


@command(runs_app, "", "--json", name="list")
def list_runs() -> Shown:
    """List the training runs of this folder: progress, newest checkpoint, MLflow run."""
    from unidec.pipeline.runs import list_runs, rows_of

    found = list_runs()
    return shown_rows(found, rows_of(found), "no runs yet: unidec train starts one")


@command(runs_app, "", "--fix", "--deep --json")
def doctor(
    fix: Annotated[
        bool, Option("--fix", help="apply the fixes that cannot lose data, and print them")
    ] = False,
    deep: Annotated[
        bool, Option("--deep", help="also hash models, bundles and checkpoints")
    ] = False,
) -> Shown:
    """Check for what a crash or a full disk leaves behind; exit code 0: healthy, 1: warnings, 4:
    broken.
    """
    from unidec.pipeline.doctor import examine, exit_code, rows_of

    found = examine(deep=deep, fix=fix)
    return shown_rows(found, rows_of(found), "healthy", exit_code(found))


@command(config_app, "--set recipe=depsl", name="show")
def config_show(params: Params) -> Shown:
    """Print the effective value of every parameter (file over recipe over default), and the
    settings in the encoder's folder, if it exists here.
    """
    from unidec.pipeline.encoders import what_folder_says

    lines = to_yaml(params).splitlines()
    if says := what_folder_says(params):
        lines.append(f"# from the encoder's folder: {says}")
    return Shown(params.model_dump(), lines)


@command(app, "", "all-MiniLM-L6-v2", "my/encoder --json", loads=load_if_there)
def encoders(
    params: Params,
    name: Annotated[
        str | None, Argument(metavar="[NAME]", help="a folder, an alias or a name on the hub")
    ] = None,
) -> Shown:
    """List the supported encoder architectures, poolings and prompts.

    With NAME: show the settings in its folder, missing files, parameters, memory, and texts per
    second on this machine.
    """
    from unidec.pipeline.encoders import about_encoder, known_encoders

    if name is not None:
        about = about_encoder(params, name)
        return Shown(about, lines_of(name, about))
    known = known_encoders()
    lines = table(known["architectures"])
    lines.append(f"poolings: {', '.join(known['poolings'])}")
    for names, prompts in known["prompts"].items():
        said = ", ".join(f"encoder.{key}: {prompt!r}" for key, prompt in prompts.items())
        lines.append(f"prompts of {names}: {said}")
    return Shown(known, [*lines, "details of one encoder: unidec encoders NAME"])


@config_app.command("check", epilog="Example: unidec config check --params mine.yaml")
def config_check(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None) -> None:
    """Check the parameters, and whether paths, encoder, device and packages exist; every problem is
    listed.

    Exit code 2 for the parameters, otherwise that of the first problem.
    """
    pipeline.check_before_work(load(params, assignments))
    print(f"{params}: ok")


@command(config_app, "| grep pool", name="keys")
def config_keys() -> None:
    """List every parameter with its default, description, valid values and the results that it
    decides.
    """
    decides = what_decides()
    for key, default, takes, about in describe():
        results = ", ".join(decides[key])
        print(f"{key} = {default}\n    {about} ({takes}); decides: {results}")
    print(f"\nrecipes: {', '.join(recipe_names())}")


@app.command()
def version() -> None:
    """Print the version, and the versions of the packages that results depend on."""
    from importlib import metadata

    print(f"unidec-xmc {__version__}")
    print(f"python {platform.python_version()}")
    for name in _VERSIONED.split():
        with contextlib.suppress(metadata.PackageNotFoundError):
            print(f"{name} {metadata.version(name)}")


def _run(arguments: list[str]) -> None:
    """Run a command. Output that cannot be written is an error only if it was all that the command
    had to do.
    """
    code: Any = 0
    try:
        app(args=arguments, prog_name="unidec")
    except SystemExit as end:
        code = end.code
    if failure := surroundings.output_failure():
        print(
            f"error: the output could not be written: {failure.strerror}",
            file=sys.stderr,
            flush=True,
        )
        code = code or (0 if commands.has_finished_work else 1)
    sys.exit(code)


def _arguments() -> list[str]:
    """The words of the command line, without --debug."""
    return [word for word in sys.argv[1:] if word != "--debug"]


def main() -> None:
    """Entry point: an error that a user can fix is printed as a message, with an exit code and no
    traceback.
    """
    debug = "--debug" in sys.argv[1:]
    mask_logs()
    sys.excepthook = masked_excepthook
    interrupt.guard_work()
    try:
        _run(_arguments())
    except Exception as error:
        told = in_one_message(error, "unidec --debug ...")
        if debug or told is None:
            raise
        message, code = told
        print(message, file=sys.stderr, flush=True)
        threads = threading.enumerate()[1:]
        if isinstance(error, Stopped) and not all(thread.daemon for thread in threads):
            os._exit(code)  # a second Ctrl-C came while a checkpoint was being written
        sys.exit(code)
    except interrupt.Interrupted:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(interrupt.EXIT_CODE)
