"""What the flow asks of DVC, as its command line: reproduce a stage, say what is stale, record what was made."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from unidec.errors import (
    ArtifactError,
    ConfigError,
    DataError,
    TrainingError,
    UnidecError,
    without_credentials,
)
from unidec.pipeline.lock import one_at_a_time

__all__ = ["CommandError", "check_repository", "commit", "inputs_state", "one_at_a_time", "reproduce", "run", "stale"]

MODEL_STAGES = ("train", "index", "evaluate")
_BY_EXIT_CODE = {error.exit_code: error for error in (ConfigError, DataError, ArtifactError, TrainingError)}
_KILL_AFTER = 10.0  # seconds between SIGTERM and SIGKILL for a command that is cancelled


class CommandError(RuntimeError):
    """A command that failed in a way that trying again may mend (a lock held by another process, a full table)."""


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


def reproduce(stages: Sequence[str], say: Callable[[str], None] = print) -> None:
    """`dvc repro <stages>`; the error of a stage that fails is raised here.

    Raises:
        UnidecError: of the kind that the stage's exit code means, with the stage's message.
        CommandError: DVC itself failed.
    """
    check_repository()
    code, output = run(["repro", *stages], say)
    if code == 0:
        return
    found = re.search(r"exited with (\d+)", output)
    kind = _BY_EXIT_CODE.get(int(found.group(1))) if found else None
    words = _stage_words(output)
    if kind is not None:
        raise kind(words)
    if found:
        raise UnidecError(f"a stage failed\n{words}")
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


def commit(stages: list[str]) -> None:
    """Records what the stages' outputs are now in dvc.lock and the cache, so that `dvc status` agrees.

    Raises:
        CommandError: DVC failed.
    """
    code, output = run(["commit", "--force", *stages])
    if code:
        raise CommandError(f"dvc commit ended with {code}: {output[-2000:]}")


def push(secrets: Mapping[str, str] | None = None, say: Callable[[str], None] | None = None) -> str:
    """`dvc push`: what was made goes to the remote. Returns DVC's last words.

    Args:
        secrets: environment variables for DVC's process alone.
        say: receives each line.

    Raises:
        CommandError: DVC failed.
    """
    code, output = run(["push"], say, secrets)
    if code:
        raise CommandError(f"dvc push ended with {code}: {output[-2000:]}")
    return (output.strip().splitlines() or ["done"])[-1]


def inputs_state(stages: tuple[str, ...] = MODEL_STAGES) -> dict[str, tuple[int, ...]]:
    """Size, time of change and inode of each file that these stages read, by path; not of what they write.

    Taken before and after a training: where it differs, somebody edited the inputs meanwhile, and a lock file written
    now would record inputs that did not make the model. DVC hashes them only afterwards.
    """
    params = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8")) or {}
    described = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    paths, written = {"params.yaml", "dvc.yaml"}, set()
    for stage in stages:
        paths |= {_path_of(entry, params) for entry in described[stage].get("deps", [])}
        outputs = (described[stage].get(kind, []) for kind in ("outs", "metrics", "plots"))
        written |= {_path_of(entry, params) for kind in outputs for entry in kind}
    found = {}
    for path in paths - written:
        for file in _files(Path(path)):
            facts = file.stat()
            found[str(file)] = (facts.st_size, facts.st_mtime_ns, facts.st_ino)
    return found


def run(
    words: list[str], say: Callable[[str], None] | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """`dvc <words>` in a process group of its own, which ends with us. Returns exit code and output.

    Args:
        words: the command and its arguments.
        say: receives each line.
        environment: secrets of that process alone: their values are masked in its output.
    """
    # our flow run's own identity is not the child's
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT__")}
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**inherited, **(environment or {})},
        start_new_session=True,
    )
    lines = []
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                line = _crossed_out(line, environment or {})
                lines.append(line)
                if say and line.strip():
                    say(line.rstrip())
        return process.wait(), "".join(lines)
    except BaseException:  # cancelled: no child may outlive us
        _end(process)
        raise


def _crossed_out(line: str, secrets: Mapping[str, str]) -> str:
    for value in sorted(filter(None, secrets.values()), key=len, reverse=True):
        line = line.replace(value, "********")
    return without_credentials(line)


def _end(process: subprocess.Popen[str]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_AFTER)
            return


def _status(stages: tuple[str, ...]) -> dict[str, Any]:
    check_repository()
    code, output = run(["status", "--json", *stages])
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if code or not lines:
        raise CommandError(f"dvc status ended with {code}: {output[-2000:]}")
    return json.loads(lines[-1])


def _only_missing(changes: list[Any]) -> bool:
    """Whether nothing is changed but files that are gone."""
    if not all(isinstance(change, dict) for change in changes):
        return False  # "always changed", a changed command
    kinds = [kind for change in changes for part in change.values() for kind in part.values()]
    return bool(kinds) and all(kind == "deleted" for kind in kinds)  # a parameter's kind is a dictionary


def _stage_words(output: str) -> str:
    """The last lines of a stage, without DVC's own around them; where no stage spoke, DVC's reason."""
    noise = ("Running stage", "> ", "ERROR: failed to reproduce", "Stage '", "Updating lock", "To track", "Use `dvc")
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not line.startswith(noise)]
    words = "\n".join(line for line in lines if not line.lstrip().startswith(("git add", "dvc config")))
    return words[-4000:] or " ".join(line for line in output.splitlines() if line.startswith("ERROR"))[-4000:]


def _path_of(entry: Any, params: dict[str, Any]) -> str:
    """A dependency's or output's path, with `${section.key}` replaced as DVC does it."""
    path = next(iter(entry)) if isinstance(entry, dict) else str(entry)

    def value(found: re.Match[str]) -> str:
        return str(functools.reduce(lambda section, key: section[key], found.group(1).strip().split("."), params))

    return re.sub(r"\$\{([^}]+)\}", value, path).rstrip("/")


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = (file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
        return sorted(found)
    return [path] if path.is_file() else []
