"""How a peer's script is started: with packages of its own, as its head names them (PEP 723).

A package under `[[tool.uv.dependency-metadata]]` with an empty `requires-dist` is installed without what it asks for:
libpecos would bring PyTorch and transformers (6 GB) for parts that XR-Linear does not use.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from unidec.errors import ArtifactError, TrainingError

_HEAD = re.compile(r"(?m)^# /// script$\s(?P<text>(^#(| .*)$\s)+)^# ///$")  # as PEP 723 gives it
_PYTHON = ".".join(map(str, sys.version_info[:3]))


@dataclass(frozen=True)
class Requirements:
    """The head of a script: requirements as pip takes them, those without their own requirements apart."""

    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    python: str = ""

    @property
    def key(self) -> str:
        """Changes with what is installed."""
        return hashlib.sha256("\n".join([*self.packages, "", *self.bare]).encode()).hexdigest()[:12]

    def fits_this_python(self) -> bool:
        """Whether the script runs with this Python's version."""
        return SpecifierSet(self.python).contains(_PYTHON)

    def satisfied_here(self) -> bool:
        """Whether this very interpreter has all of it."""
        try:
            wanted = [Requirement(package) for package in (*self.packages, *self.bare)]
            here = all(one.specifier.contains(metadata.version(one.name), prereleases=True) for one in wanted)
        except metadata.PackageNotFoundError:
            return False
        return here and self.fits_this_python()


def requirements(script: Path) -> Requirements:
    """What the script's head asks for; nothing where it has none."""
    found = _HEAD.search(script.read_text(encoding="utf-8"))
    if found is None:
        return Requirements()
    head = tomllib.loads("\n".join(re.sub(r"^# ?", "", line) for line in found["text"].splitlines()))
    known = head.get("tool", {}).get("uv", {}).get("dependency-metadata", [])
    bare = {entry["name"] for entry in known if not entry.get("requires-dist")}
    packages = head.get("dependencies", [])
    return Requirements(
        tuple(one for one in packages if Requirement(one).name not in bare),
        tuple(one for one in packages if Requirement(one).name in bare),
        head.get("requires-python", ""),
    )


def start_command(script: Path, environments: Path, log: Path) -> list[str]:
    """How to start a script: by this interpreter where it has all packages, by `uv run`, or in a venv made by pip.

    Args:
        environments: folder of the environments that are made without uv, one for each set of requirements.
        log: takes what pip prints.

    Raises:
        ArtifactError: without uv, this Python does not fit, or pip fails (no network, no such package).
    """
    wanted = requirements(script)
    if wanted.satisfied_here():
        return [sys.executable, str(script)]
    if uv := shutil.which("uv"):
        return [uv, "run", "--no-progress", "--script", str(script)]
    if not wanted.fits_this_python():
        raise ArtifactError(
            f"{script.name} needs another Python",
            got=_PYTHON,
            expected=wanted.python,
            fix="install uv, which finds one",
        )
    return [str(_environment(script.stem, wanted, environments, log)), str(script)]


def _environment(name: str, wanted: Requirements, environments: Path, log: Path) -> Path:
    """The Python of a venv with these requirements; one process makes it, others wait."""
    from filelock import FileLock

    root = environments.absolute() / f"{name}-{wanted.key}"
    environments.mkdir(parents=True, exist_ok=True)
    python, ready = root / "bin" / "python", root / "ready"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    steps = [[sys.executable, "-m", "venv", "--clear", str(root)], [*pip, *wanted.packages]]
    steps += [[*pip, "--no-deps", *wanted.bare]] if wanted.bare else []
    with FileLock(f"{root}.lock"):
        for step in [] if ready.is_file() else steps:
            if run_logged(step, log, os.environ):
                raise ArtifactError(
                    f"the environment of {name} could not be made", where=str(log), got=last_lines(log),
                    fix=f"run it where packages can be had: {' '.join(step)}; or leave this peer out",
                )  # fmt: skip
        ready.touch()
    return python


def run_script(command: Sequence[str], log: Path, threads: int) -> None:
    """Run a peer's script in this process's group: whoever ends the group ends it too.

    Raises:
        TrainingError: it fails; with the end of its log.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    if code := run_logged(command, log, kept):
        raise TrainingError("the peer's script failed", where=str(log), got=f"exit code {code}: {last_lines(log)}")


def run_logged(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> int:
    """Run a command, its output at the end of `log`; returns its exit code."""
    with open(log, "ab") as file:
        return subprocess.run(
            command, stdout=file, stderr=subprocess.STDOUT, env=dict(environment), check=False
        ).returncode


def last_lines(log: Path) -> str:
    """The end of a log, in one line."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    return " | ".join(line.strip() for line in lines[-8:] if line.strip())[-800:]
