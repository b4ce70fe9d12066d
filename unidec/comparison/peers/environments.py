"""Environments of their own for peers whose pins are not ours: made on demand, kept, and used by child processes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unidec.data.storage import write_json
from unidec.errors import ArtifactError, TrainingError
from unidec.progress import progress

VARIABLE = "UNIDEC_PEER_ENVIRONMENTS"
"""Environment variable: a folder where several comparisons share these environments."""

READY = "ready.json"
_SHOWN = 15  # lines of a log in an error


@dataclass(frozen=True)
class Environment:
    """What is installed.

    Attributes:
        packages: as pip takes them. bare: packages installed without what they ask for, because most of it is never
            imported here: libpecos brings PyTorch and transformers (6 GB) for parts that XR-Linear does not use,
            napkinxc a downloader of data sets.
        pythons: versions whose wheels there are, the best first.
    """

    packages: tuple[str, ...]
    bare: tuple[str, ...]
    pythons: tuple[str, ...]

    @property
    def key(self) -> str:
        """Changes with what is installed."""
        return hashlib.sha256("\n".join([*self.packages, "", *self.bare]).encode()).hexdigest()[:8]


ENVIRONMENTS = {
    # libpecos 1.2.8 needs numpy < 2; its sparse code needs scipy < 1.12
    "xr-linear": Environment(
        ("numpy==1.26.4", "scipy==1.11.4", "scikit-learn>=1.3,<2"), ("libpecos==1.2.8",), ("3.11", "3.10", "3.12")
    ),
    "plt": Environment(("numpy>=2,<3", "scipy>=1.13,<2"), ("napkinxc==0.7.2",), ("3.11", "3.12", "3.13")),
}


def place(name: str, folder: Path) -> Path:
    """Folder of an environment below `folder`, or below the one that the environment variable names."""
    root = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else folder
    return root.absolute() / f"{name}-{ENVIRONMENTS[name].key}"


def is_ready(name: str, folder: Path) -> bool:
    """It was made to the end."""
    return (place(name, folder) / READY).is_file()


def install(name: str, folder: Path) -> Path:
    """Make an environment unless it is there. Returns its Python.

    Several processes may ask at once: one makes it, the others wait. A half-made one is made anew.

    Raises:
        ArtifactError: no fitting Python, or pip fails (no network, no such package).
    """
    from filelock import FileLock

    root, wanted = place(name, folder), ENVIRONMENTS[name]
    root.parent.mkdir(parents=True, exist_ok=True)
    python = root / "bin" / "python"
    with FileLock(root.parent / f".{root.name}.lock"):
        if (root / READY).is_file():
            return python
        shutil.rmtree(root, ignore_errors=True)
        log = root.parent / f"{root.name}.log"
        steps: list[tuple[str, list[str]]] = [("venv", [_base_python(wanted.pythons), "-m", "venv", str(root)])]
        pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
        steps += [("packages", [*pip, *wanted.packages]), ("bare", [*pip, "--no-deps", *wanted.bare])]
        for step, command in steps:
            code = _wait(command, log, f"{name}: {step}", dict(os.environ), append=step != "venv")
            if code:
                raise ArtifactError(
                    f"the environment of {name} could not be made",
                    where=str(log),
                    got=f"exit code {code}: {_tail(log)}",
                    fix=f"run it where packages can be had: {' '.join(command)}; or leave this peer out",
                )
        listed = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
        found = json.loads(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)
        write_json(root / READY, {item["name"]: item["version"] for item in found})
    return python


def versions(name: str, folder: Path) -> dict[str, str]:
    """Packages of an environment and their versions."""
    return json.loads((place(name, folder) / READY).read_text(encoding="utf-8"))


def run_program(python: Path, program: Path, arguments: Sequence[str], log: Path, threads: int, desc: str) -> None:
    """A program in another environment, in this process's group: whoever ends the group ends it too.

    Raises:
        TrainingError: it fails; with the end of its log.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    kept |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    code = _wait([str(python), "-s", str(program), *arguments], log, desc, kept)
    if code:
        raise TrainingError(
            f"{desc} failed", where=str(log), got=f"exit code {code}: {_tail(log)}",
            fix="its whole log says more; a negative code is a signal, -9 often the system's lack of memory",
        )  # fmt: skip


def _base_python(versions: Sequence[str]) -> str:
    """A Python of one of these versions: ours, or one on the path."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    if own in versions:
        return sys.executable
    for version in versions:
        found = shutil.which(f"python{version}")
        # a shim of a version manager may be there for a version that is not
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    raise ArtifactError(
        "no Python for this peer", got=f"{own}, and no other on the path", expected=f"one of {', '.join(versions)}"
    )


def _wait(command: list[str], log: Path, desc: str, environment: dict[str, str], append: bool = False) -> int:
    """Runs a command, its output in `log`; ends it when this process is interrupted. Returns its exit code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab" if append else "wb") as file, progress(desc=desc, unit="second") as bar:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                try:
                    return child.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    bar.update(1)
        finally:
            if child.poll() is None:
                child.terminate()
                try:
                    child.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n    ".join(["", *lines[-_SHOWN:]])
