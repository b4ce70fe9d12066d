"""What the flow asks of DVC, as its command line: reproduce a stage, say what is stale, record what was made."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unidec.errors import ArtifactError, ConfigError, DataError, TrainingError, UnidecError, without_credentials

MODEL_STAGES = ("train", "index", "evaluate")
_BY_EXIT_CODE = {error.exit_code: error for error in (ConfigError, DataError, ArtifactError, TrainingError)}
_KILL_AFTER = 10.0  # seconds between SIGTERM and SIGKILL for a command that is cancelled
_NOISE = re.compile(  # DVC's own lines around those of a stage
    r"Running stage|> |ERROR: failed to reproduce|Stage '|Updating lock|To track|Use `dvc|\s*git add|\s*dvc config"
)


class CommandError(RuntimeError):
    """A command that failed and may succeed when retried (a lock held by another process, a full table)."""


def check_repository() -> None:
    """DVC can work here.

    Raises:
        ConfigError: it cannot.
    """
    if not Path(".dvc").is_dir() or not Path("dvc.yaml").is_file():
        raise ConfigError(
            "no DVC repository", where=str(Path.cwd()), expected=".dvc/ and dvc.yaml",
            fix="unidec init --project writes them; --no-dvc trains without",
        )  # fmt: skip


def reproduce(stages: Sequence[str], say: Callable[[str], None]) -> None:
    """`dvc repro <stages>`; the error of a stage that fails is raised here.

    Raises:
        UnidecError: of the kind that the stage's exit code means, with the stage's message.
        CommandError: DVC itself failed.
    """
    check_repository()
    code, output = run(["repro", *stages], say)
    if code == 0:
        return
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    spoken = "\n".join(line for line in lines if not _NOISE.match(line))
    words = (spoken or " ".join(line for line in lines if line.startswith("ERROR")))[-4000:]
    if found := re.search(r"exited with (\d+)", output):
        raise _BY_EXIT_CODE.get(int(found[1]), UnidecError)(words)
    if "are missing from 'params.yaml'" in output:
        raise ConfigError(words, where="params.yaml", fix="add them: DVC requires each key that dvc.yaml names")
    raise CommandError(f"dvc repro {' '.join(stages)} ended with {code}: {words}")


def stale(data_stages: tuple[str, ...] = ()) -> tuple[bool, list[str]]:
    """What is out of date, by one `dvc status`.

    Model outputs that are only missing are taken from DVC's cache first, when it has them.

    Returns:
        whether one of the data stages must be reproduced; and of the model's stages, which follow one another, the
        first that changed and all after it (to be asked for again once the data stages are reproduced).
    """
    try:
        status = _status((*data_stages, *MODEL_STAGES))
    except CommandError:
        if not data_stages:
            raise
        return True, []  # `dvc repro` reports what is wrong
    if any(stage in status for stage in data_stages):
        return True, []
    if status and all(_only_missing(changes) for changes in status.values()):
        run(["checkout", *MODEL_STAGES])
        status = _status(MODEL_STAGES)
    first = next((number for number, stage in enumerate(MODEL_STAGES) if stage in status), len(MODEL_STAGES))
    return False, list(MODEL_STAGES[first:])


def _status(stages: tuple[str, ...]) -> dict[str, Any]:
    check_repository()
    lines = [line for line in dvc(["status", "--json", *stages]).splitlines() if line.startswith("{")]
    if not lines:
        raise CommandError("dvc status reported nothing")
    return json.loads(lines[-1])


def _only_missing(changes: list[Any]) -> bool:
    """Whether nothing is changed but files that are gone."""
    if not all(isinstance(change, dict) for change in changes):
        return False  # "always changed", a changed command
    kinds = [kind for change in changes for part in change.values() for kind in part.values()]
    return bool(kinds) and all(kind == "deleted" for kind in kinds)  # a parameter's kind is a dictionary


def commit(stages: Sequence[str]) -> None:
    """Records what the stages' outputs are now in dvc.lock and the cache, so that `dvc status` agrees.

    Raises:
        CommandError: DVC failed.
    """
    dvc(["commit", "--force", *stages])


def inputs_state() -> dict[str, tuple[int, ...]]:
    """Size, time of change and inode of each file that the model's stages read, by path; not of what they write.

    Taken before and after a training: where it differs, somebody edited the inputs meanwhile, and a lock file written
    now would record inputs that did not make the model. DVC hashes them only afterwards.
    """
    params = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")) or {}
    described = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]

    def paths(kind: str) -> set[str]:
        entries = [entry for stage in MODEL_STAGES for entry in described[stage].get(kind, [])]
        names = [next(iter(entry)) if isinstance(entry, dict) else entry for entry in entries]
        return {re.sub(r"\$\{([^}]+)\}", value, name).rstrip("/") for name in names}

    def value(found: re.Match[str]) -> str:
        return str(functools.reduce(operator.getitem, found[1].strip().split("."), params))

    read = {"params.yaml", "dvc.yaml"} | paths("deps") - paths("outs")
    roots = [Path(path) for path in read]
    files = [file for root in roots for file in (root.rglob("*") if root.is_dir() else [root])]
    facts = {str(file): file.stat() for file in files if file.is_file() and "__pycache__" not in file.parts}
    return {name: (fact.st_size, fact.st_mtime_ns, fact.st_ino) for name, fact in facts.items()}


def dvc(
    words: Sequence[str], say: Callable[[str], None] | None = None, secrets: Mapping[str, str] | None = None
) -> str:
    """The output of `dvc <words>`; arguments as for `run`.

    Raises:
        CommandError: it failed.
    """
    code, output = run(words, say, secrets)
    if code:
        raise CommandError(f"dvc {words[0]} ended with {code}: {output[-2000:]}")
    return output


def run(
    words: Sequence[str], say: Callable[[str], None] | None = None, secrets: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """`dvc <words>` in a process group of its own, which ends with us. Returns exit code and output.

    Args:
        words: the command and its arguments.
        say: receives each line.
        secrets: environment variables of that process alone: their values are masked in its output.
    """
    # our flow run's own identity is not the child's
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
    hidden = sorted(filter(None, (secrets or {}).values()), key=len, reverse=True)
    lines = []
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                for value in hidden:
                    line = line.replace(value, "********")
                lines.append(without_credentials(line))
                if say and line.strip():
                    say(lines[-1].rstrip())
        return process.wait(), "".join(lines)
    except BaseException:  # cancelled: no child may outlive us
        for how in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, how)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER)
                break
        raise
