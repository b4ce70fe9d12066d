"""The command line: every stage of the pipeline, prediction, and a look at the parameters.

Parameters are read and checked before anything heavy is imported, so that a mistake in them shows at once.
"""

from __future__ import annotations

from unidec import interrupt  # before all that takes time: from now on Ctrl-C ends with a line

# isort: split
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from unidec.cli import data, export, index, init, labels, models, predict, runs, serve
from unidec.cli.options import DEFAULT_PARAMS, AsJson, Assignments, ParamsFile, load
from unidec.cli.output import show, show_table
from unidec.cli.stage import add_stage
from unidec.config import describe, parse_overrides, recipe_names, to_yaml
from unidec.errors import ConfigError, Stopped, UnidecError, without_credentials
from unidec.version import __version__

app = typer.Typer(
    name="unidec",
    help="Extreme multi-label classification with a dual encoder and a classifier trained together.",
    epilog="In a checkout, `make train` runs all stages, and only those that are out of date.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show, check and explain the parameters.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="show the traceback of an error (anywhere on the line)")
    ] = False,
) -> None:
    """Options before the command."""


# -- training and evaluation ------------------------------------------------------------------------------------------

init.add_to(app)


@app.command(
    epilog="Examples: unidec train --set optim.epochs=3  |  unidec train --resume  |  "
    "unidec train --resume 3f2a --accept optim.lr_clf --accept code"
)
def train(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="with --resume: a run's name, or its first letters")
    ] = None,
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    resume: Annotated[bool, typer.Option("--resume", help="resume RUN, or the newest unfinished run")] = False,
    accept: Annotated[
        list[str] | None,
        typer.Option("--accept", metavar="KEY", help="resume although this differs from how the run began; repeatable"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train in this process, without Prefect; re-run the command to resume a training that was stopped or killed."""
    if run is not None and not resume:
        raise ConfigError("a run to resume needs --resume", where="unidec train", fix=f"unidec train --resume {run}")
    loaded = load(params, assignments)
    from unidec import pipeline

    result = pipeline.train(loaded, (run or "") if resume else None, tuple(accept or ()))
    if result:
        show("train", result, as_json)


add_stage(
    app,
    "evaluate",
    "evaluate",
    "Compute every metric on the test split; report and plots in outputs/.",
    "unidec evaluate --json",
)
predict.add_to(app)
serve.add_to(app)


@app.command(
    epilog="Examples: unidec compare comparison/small.yaml  |  unidec compare comparison/small.yaml --list  |  "
    'unidec compare comparison/full.yaml --only "lf-debian titles/unidec/0" --jobs 2'
)
def compare(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="comparison file (docs/comparing.md)")],
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CELL", help="cell, data/cell or data/cell/seed; repeatable")
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="list the runs and whether they are done; run nothing")] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="runs at a time: their times are then no measure")] = 1,
    report_only: Annotated[bool, typer.Option("--report-only", help="write the report of what there is")] = False,
    assignments: Assignments = None,
    accept: Annotated[
        str | None,
        typer.Option("--accept", metavar="code", help="results by other versions of the code are taken as done"),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="of the workspace, instead of runs/compare/<name>")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option("--metrics", metavar="FILE", help="write the figures of the one run of --only as JSON"),
    ] = None,
) -> None:
    """Run every system of a comparison file on the same data and seeds, and report; what is done is not run again."""
    if accept not in (None, "code"):
        raise ConfigError("cannot be accepted", where="--accept", got=accept, expected="code")
    from unidec.comparison import results
    from unidec.comparison.plan import load_comparison, select
    from unidec.comparison.workspace import Workspace

    comparison = load_comparison(file, parse_overrides(assignments or []))
    chosen = select(comparison, only or [])
    workspace = Workspace.of(comparison, folder)
    if show:
        show_table(["run", "what", "state"], results.listing(chosen, workspace, accept == "code"))
    elif report_only:
        print(f"report: {results.write_report(workspace)}")
    else:  # in this process's place, so that signals and the exit code are the flow's
        options = {"--only": only, "--set": assignments, "--jobs": [jobs], "--accept": [accept], "--folder": [folder],
                   "--metrics": [metrics]}  # fmt: skip
        given = [f"{name}={value}" for name, values in options.items() for value in values or () if value is not None]
        os.execv(sys.executable, [sys.executable, "-m", "flows.compare", str(file), *given])


@app.command(
    epilog="Examples: unidec plan  |  unidec plan --set run.table_place=host --json  |  unidec plan --set "
    "recipe=unidec-gpu --labels 1300000 --queries 2248619 --tokens 32 --device-memory 48GiB --no-measure"
)
def plan(
    params: ParamsFile = DEFAULT_PARAMS,
    assignments: Assignments = None,
    as_json: AsJson = False,
    labels: Annotated[int | None, typer.Option(min=1, help="sizes by hand instead of data/dataset: labels")] = None,
    queries: Annotated[int | None, typer.Option(min=1, help="training queries")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="tokens of each text")] = None,
    pairs: Annotated[int | None, typer.Option(min=0, help="positive pairs; by default 5 a query")] = None,
    encoder_config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="config.json of an encoder that is not on this machine")
    ] = None,
    device_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="plan for a GPU of this size: 16GiB")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="host memory, instead of what is free")
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="SIZE", help="disk, instead of what is free")] = None,
    measure: Annotated[bool, typer.Option(help="time a few real steps on random ids, on this machine")] = True,
    terms: Annotated[bool, typer.Option("--terms", help="every amount, also of a training that fits easily")] = False,
) -> None:
    """Memory and time of a training before it starts, term by term, and what would fit; exit code 1: too large."""
    loaded = load(params, assignments)
    from unidec.pipeline.plan import Place, plan_command

    sizes = {"labels": labels, "queries": queries, "tokens": tokens, "pairs": pairs}
    free: dict[Place, str | None] = {"device": device_memory, "host": host_memory, "disk": disk}
    sys.exit(0 if plan_command(loaded, sizes, free, encoder_config, measure, as_json, terms) else 1)


# -- parameters -------------------------------------------------------------------------------------------------------


@config_app.command("show", epilog="Example: unidec config show --set recipe=depsl")
def config_show(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None, as_json: AsJson = False) -> None:
    """Print every parameter as it will be used: file over recipe over default."""
    loaded = load(params, assignments)
    print(json.dumps(loaded.model_dump(), indent=2) if as_json else to_yaml(loaded), end="\n" if as_json else "")


@config_app.command("check", epilog="Example: unidec config check --params mine.yaml")
def config_check(params: ParamsFile = DEFAULT_PARAMS, assignments: Assignments = None) -> None:
    """Check the parameters: all that is wrong is listed, exit code 2."""
    load(params, assignments)
    print(f"{params}: ok")


@config_app.command("keys", epilog="Example: unidec config keys | grep pool")
def config_keys() -> None:
    """Explain every parameter: default, what it takes, what it does."""
    for key, default, takes, about in describe():
        print(f"{key} = {default}\n    {about} ({takes})")
    print(f"\nrecipes: {', '.join(recipe_names())}")


@app.command()
def version() -> None:
    """Print the version, and those of what results depend on."""
    from importlib import metadata

    print(f"unidec-xmc {__version__}")
    print(f"python {sys.version.split()[0]}")
    for name in ("torch", "transformers", "tokenizers", "faiss-cpu", "faiss-gpu", "numpy", "mlflow", "prefect", "dvc"):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} -")


for name, group in (
    ("data", data.data_app), ("models", models.models_app), ("labels", labels.labels_app), ("index", index.index_app),
    ("export", export.export_app), ("runs", runs.runs_app), ("config", config_app),
):  # fmt: skip
    app.add_typer(group, name=name)


# -- the program ---------------------------------------------------------------------------------------------------


def _exit_if_threads_run(exit_code: int) -> None:
    """End here if a thread still works: a second Ctrl-C came while a checkpoint was being written."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        os._exit(exit_code)


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """As Python's own, without the credentials of addresses in messages."""
    text = "".join(traceback.format_exception(kind, error, trace))
    print(without_credentials(text), end="", file=sys.stderr, flush=True)


def main() -> None:
    """Entry point: an error that a user can mend is a message and an exit code, not a traceback."""
    debug = "--debug" in sys.argv[1:]
    arguments = [word for word in sys.argv[1:] if word != "--debug"]
    run: Callable[..., Any] = app
    sys.excepthook = _print_traceback
    interrupt.guard_work()
    try:
        run(args=arguments, prog_name="unidec")
    except UnidecError as error:
        if debug:
            raise
        print(error if isinstance(error, Stopped) else f"error: {error}", file=sys.stderr, flush=True)
        if isinstance(error, Stopped):
            _exit_if_threads_run(error.exit_code)
        sys.exit(error.exit_code)
    except interrupt.Interrupted:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(interrupt.EXIT_CODE)
