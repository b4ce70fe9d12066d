"""Calls of DVC's command line: fetch new data, list stale stages, reproduce stages, record outputs.

Secrets are Prefect blocks named in `source.secrets`. Their values are passed only to DVC's
processes, as environment variables, and `run` masks them in DVC's output."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import yaml
from prefect.blocks.system import Secret

from flows import lifecycle
from unidec import pipeline
from unidec.addresses import without_credentials
from unidec.cli.init import matches_git
from unidec.config import Params, Source
from unidec.data.shards import is_dividing
from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError, UnidecError
from unidec.pipeline import paths
from unidec.tracking.repository import is_inside

MODEL_STAGES = ("train", "index", "evaluate")
DIVIDED = ("ingest", "validate", "tokens")  # data stages that a runner divides
# inputs of the model's stages: parameters, code, and for the data folders their manifests, which
# contain hashes
_INPUTS = (
    "params.yaml",
    "dvc.yaml",
    "data/*",
    "data/*/manifest.json",
    "unidec/**/*.py",
    "unidec/recipes/*",
)
_BY_EXIT_CODE = {
    error.exit_code: error for error in (ConfigError, DataError, ArtifactError, TrainingError)
}
_LAST_CODE = 128  # above it: a shell's exit code for a command that a signal ended
# in DVC's messages: locks of another process, networks and servers that may recover
_PASSING = re.compile(
    r"(?i)unable to acquire lock|is busy|timed? ?out|connection "
    r"(refused|reset|aborted|error)|connect call failed|"
    r"temporar(y failure|ily)|unreachable|name resolution|could not (resolve|connect)|cannot "
    r"connect|"
    r"service unavailable|bad gateway|too many requests|slow ?down|incomplete read|broken pipe"
)
_KILL_AFTER = 10.0  # seconds between SIGTERM and SIGKILL when a command is cancelled
_NOISE = re.compile(  # lines that DVC prints around a stage's output
    r"Running stage|> |(Generating|Updating) lock|ERROR: failed to reproduce|Stage '|"
    r"To (track|enable)|Use `dvc|\s*git add|\s*dvc config"
)
# and lines of the error that `make_data` raises
_UNTOLD = re.compile(rf"{_NOISE.pattern}|error: |\s")

log = logging.getLogger("unidec.flows")
Say = Callable[[str], None] | None  # receives each line of a command's output


def failure(
    words: Sequence[str], code: int, message: str, stage_code: int | None = None
) -> UnidecError:
    """The error of a failed `dvc <words>`.

    Args:
        code: DVC's exit code, negative if a signal ended it.
        message: what it printed.
        stage_code: exit code of the stage that failed; negative, or above 128 from a shell, if a
            signal ended it.

    Returns:
        `MayRecover` if a process was killed, a lock is held or a network failed, since only these
        are worth a retry; otherwise the class of the stage's exit code, or a ConfigError if DVC
        itself refuses.
    """
    command = f"dvc {' '.join(words)}"
    if code < 0 or (stage_code is not None and not 0 <= stage_code <= _LAST_CODE):
        fix = "run again: finished work is kept (check dmesg for a lack of memory)"
        return lifecycle.MayRecover(f"{command} was killed", got=message or None, fix=fix)
    if stage_code is not None:
        return _BY_EXIT_CODE.get(stage_code, UnidecError)(message)
    if _PASSING.search(message):
        fix = "run again when the other process has ended, or the network or the server responds"
        return lifecycle.MayRecover(f"{command} failed", got=message, fix=fix)
    return ConfigError(
        f"{command} failed",
        where="dvc",
        got=message,
        fix="correct the named file or setting",
    )


def check_repository() -> None:
    """Check that this folder is a DVC repository, and that DVC looks for git only if it is there; a
    warning if DVC does not use git.

    Raises:
        ConfigError: it is no DVC repository, or DVC requires git and there is none.
    """
    if not Path(".dvc").is_dir() or not Path("dvc.yaml").is_file():
        fix = "unidec init --project writes .dvc/ and dvc.yaml"
        raise ConfigError("no DVC repository", where=Path.cwd(), fix=fix)
    if matches_git(Path()):
        return
    if not is_inside(Path()):
        fix = "run `unidec init --project`, which sets it, or `git init`"
        raise ConfigError(
            "DVC requires git, and there is none", where="core.no_scm (.dvc/config.local)", fix=fix
        )
    _warn_of_unused_git()


@functools.cache  # once in a process
def _warn_of_unused_git() -> None:
    fix = "unidec init --project removes it"
    log.warning("DVC does not use this folder's git repository: core.no_scm is set (%s)", fix)


def make_data(stages: Sequence[str]) -> dict[str, str]:
    """Run `dvc repro` of the data stages; meanwhile a thread imports the modules of training, which
    takes seconds.

    Returns:
        the results that the stages printed: {"propensity: a": "0.55", ...}.

    Raises:
        UnidecError: a stage failed; the subclass with the stage's exit code, with the stage's
            message.
        MayRecover: DVC or a stage was killed, or DVC waits for a lock or a network.
    """
    # importing the modules of training takes seconds
    threading.Thread(target=pipeline.import_training).start()

    def tell(line: str) -> None:
        (log.info if _UNTOLD.match(line) else lifecycle.say)(line)

    code, output = run(["repro", *stages], tell)
    if code == 0:
        return dict(re.findall(r"^([\w-]+: [^=\n]+) = (.*)$", output, re.MULTILINE))
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    stage_output = "\n".join(line for line in lines if not _NOISE.match(line))
    stage_output = stage_output.rpartition("\nerror: ")[2]
    shown = stage_output or output
    found = re.search(r"exited with (-?\d+)", output)
    stage_code = int(found[1]) if found else None
    raise failure(["repro", *stages], code, shown[-4000:], stage_code)


def stale(data_stages: tuple[str, ...] = ()) -> tuple[bool, list[str]]:
    """The stages that are out of date, according to one call of `dvc status`.

    Returns:
        whether a data stage must be reproduced (True if there is no data set yet); and the model's
        stages from the first one that changed to the last (after reproducing the data stages, call
        again).
    """
    check_repository()
    if data_stages and not paths.DATASET.is_dir():
        return True, []
    code, output = run(["status", "--json", *data_stages, *MODEL_STAGES])
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code or not lines:
        if data_stages:
            return True, []  # `dvc repro` reports what is wrong
        raise failure(["status"], code, output[-2000:])
    status = json.loads(lines[-1])
    work = itertools.dropwhile(lambda stage: stage not in status, MODEL_STAGES)
    return not status.keys().isdisjoint(data_stages), list(work)


def commit(stages: Sequence[str]) -> None:
    """Record the stages' current outputs, and those of the stage `inputs`, in dvc.lock and the
    cache.
    """
    dvc(["commit", "--force", "inputs", *stages])


def inputs_state() -> dict[str, tuple[int, ...]]:
    """Size, modification time and inode of the input files of the model's stages, by path.

    If they differ after a training, dvc.lock would record other inputs than the model was trained
    on."""
    state = {}
    for pattern in _INPUTS:
        for file in Path().glob(pattern):
            if file.is_file():
                fact = file.stat()
                state[str(file)] = (fact.st_size, fact.st_mtime_ns, fact.st_ino)
    return state


def dvc(words: Sequence[str], say: Say = None, secrets: Mapping[str, str] | None = None) -> str:
    """The output of `dvc <words>`, or its `failure`; arguments as for `run`."""
    code, output = run(words, say, secrets)
    if code:
        raise failure(words, code, output[-2000:])
    return output


def run(
    words: Sequence[str], say: Say = None, secrets: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run `dvc <words>` in a separate process group, which is killed on cancellation. Returns exit
    code and output.

    `say` receives each line; `secrets`: environment variables of that process only, whose values
    are masked."""
    # the process must not report as this flow run
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT__")}
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**inherited, **(secrets or {})},
        start_new_session=True,
    )
    masked = sorted(filter(None, (secrets or {}).values()), key=len, reverse=True)
    lines = []
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                for value in masked:
                    line = line.replace(value, "********")
                lines.append(without_credentials(line))
                if say and line.strip():
                    say(lines[-1].rstrip())
        return process.wait(), "".join(lines)
    except BaseException:  # cancelled: no process may outlive this one
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER)
                break
        raise


def prepare_data(params: Params, stages: tuple[str, ...]) -> list[str]:
    """Fetch raw data and bring the data stages up to date; returns the model's stages that are then
    out of date.
    """
    pipeline.inputs(params)
    if params.source.kind == "dvc":
        lifecycle.say(f"fetch: {lifecycle.run('fetch', fetch, params.source, retry=True)}")
    elif params.source.kind != "none":
        lifecycle.say(f"fetch: {lifecycle.run('fetch', pipeline.fetch, params, retry=True).reason}")
    changed, work = stale(stages)
    if not changed:
        lifecycle.say("the data is up to date")
        return work
    if is_dividing():  # a process that DVC starts has no runner
        for stage in DIVIDED:
            if stale((stage,))[0]:
                lifecycle.run(stage, getattr(pipeline, stage), params)
                commit([stage])
    lifecycle.run("prepare data", make_data, stages, retry=True)
    return stale()[1]


def fetch(source: Source) -> str:
    """Pull data that DVC tracks, or update it if it is an import; returns the command.

    Raises:
        ConfigError: there is no .dvc file for it. DataError: it is missing or damaged at its
            source.
    """
    target = dvc_file(source)
    content = yaml.safe_load(target.read_text(encoding="utf-8"))
    imported = any("repo" in dep or "path" in dep for dep in content.get("deps", []))
    words = ["update", str(target)] if imported else ["pull", "--force", str(target)]
    if imported and source.revision:
        words += ["--rev", source.revision]
    if "verify = " not in Path(".dvc/config").read_text(encoding="utf-8"):
        code, remote = run(["config", "core.remote"])
        if code == 0:  # DVC verifies hashes of downloaded files only if this is set
            dvc(["config", "--local", f"remote.{remote.strip()}.verify", "true"])
    secrets = secret_values(source.secrets)
    try:
        dvc(words, log.info, secrets)
    except ConfigError as error:
        raise DataError(
            "DVC cannot fetch this data: missing or damaged",
            where=target,
            got=error.got,
            fix=(
                "run dvc push where the data is complete, or fix the remote (dvc remote list); "
                "nothing was trained"
            ),
        ) from error
    return f"dvc {' '.join(words)}"


def push(source: Source) -> None:
    """Run `dvc push`, with retries; a ConfigError if the remote refuses."""
    secrets = secret_values(source.secrets)
    try:
        lifecycle.run("dvc push", dvc, ["push"], log.info, secrets, retry=True)
    except ConfigError as error:
        raise ConfigError(
            error.what,
            where="retrain.push",
            got=error.got,
            fix="fix the remote (dvc remote list), or set retrain.push: false",
        ) from error


def dvc_file(source: Source) -> Path:
    """The .dvc file of `source.path`, or a ConfigError."""
    path = Path(source.path.removesuffix(".dvc") + ".dvc")
    if not path.is_file():
        raise ConfigError(
            "no such .dvc file",
            where="source.path",
            got=str(path),
            fix="dvc import (from a repository), dvc import-url or dvc add; commit the .dvc file",
        )
    return path


def secret_values(names: Mapping[str, str]) -> dict[str, str]:
    """Environment variable -> value, from Prefect's Secret blocks; a ConfigError, without any value
    in its message, if one is missing.
    """
    values = {}
    for variable, block in names.items():
        try:
            values[variable] = str(Secret.load(block.removeprefix("secret/")).get())  # type: ignore[union-attr]
        except Exception as error:  # Prefect's client has no common error
            raise ConfigError(
                "no such secret",
                where=f"source.secrets.{variable}",
                got=f"{block} ({type(error).__name__})",
                fix="create a block of type Secret on Prefect's page Blocks",
            ) from None
    return values
