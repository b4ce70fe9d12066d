"""What each extra needs, by the metadata of installed packages, and errors that name the extra of a
missing package.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from helpers.served_bundle import make_served_bundle
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from unidec.errors import _EXTRAS, DataError, UnidecError, missing_package

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


OF_A_GPU = ("cuda-", "nvidia-", "triton")


def closure(*extras: str) -> set[str]:
    """Distributions that `pip install unidec-xmc[extras]` installs here, by the metadata of
    installed packages; without those that only torch for a GPU requires.
    """
    pending = [
        Requirement(text)
        for text in [*PROJECT["dependencies"], *(t for e in extras for t in EXTRAS[e])]
    ]
    seen: set[tuple[str, str]] = set()
    while pending:
        need = pending.pop()
        for extra in ("", *need.extras):
            key = (canonicalize_name(need.name), extra)
            wanted = need.marker is None or need.marker.evaluate({"extra": ""})
            if key in seen or not wanted:
                continue
            seen.add(key)
            for text in metadata.requires(need.name) or []:
                child = Requirement(text)
                if child.marker is None or child.marker.evaluate({"extra": extra}):
                    child.marker = None
                    pending.append(child)
    return {name for name, _ in seen if not name.startswith(OF_A_GPU)}


def test_a_server_needs_no_orchestration_no_tracking_server_and_no_checks_of_data() -> None:
    heavy = {
        "prefect",
        "dvc",
        "mlflow",
        "great-expectations",
        "sqlalchemy",
        "scikit-learn",
        "matplotlib",
    }
    serve = closure("cpu", "serve")
    registry = closure("cpu", "serve", "registry")
    assert not heavy & registry and "mlflow-skinny" in registry - serve
    assert len(serve) <= 64 and len(registry) <= 87
    assert heavy <= closure("cpu", "pipeline")  # the closure sees what is there


def blocked(folder: Path, *extras: str) -> dict[str, str]:
    """An environment in which Python finds no module of a distribution outside these extras."""
    kept = closure(*extras)
    shown = {"unidec-xmc"} | kept
    names = [
        name
        for name, owners in metadata.packages_distributions().items()
        if not shown & {canonicalize_name(owner) for owner in owners}
        and re.fullmatch(r"\w+", name)
        and name not in sys.stdlib_module_names
    ]
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        f"from importlib.machinery import PathFinder\n\nHIDDEN = {set(names)!r}\nfind = "
        "PathFinder.find_spec\n"
        "PathFinder.find_spec = classmethod(lambda cls, name, path=None, target=None: "
        "None if name.partition('.')[0] in HIDDEN else find(name, path, target))\n"
    )
    return os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}


def run(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_the_other_extras_a_bundle_answers_and_errors_name_the_extra(
    tmp_path: Path,
) -> None:
    bundle = str(make_served_bundle(tmp_path))
    environment = blocked(tmp_path / "blocked", "cpu", "serve")
    answered = run(
        tmp_path, environment, "-m", "unidec.cli", "predict", "redcar", "--bundle", bundle
    )
    assert answered.returncode == 0 and "redcar" in answered.stdout, answered.stderr
    app = run(
        tmp_path, environment, "-c", "import unidec.serving.app, unidec.serving.serve, unidec.api"
    )
    assert app.returncode == 0, app.stderr
    for words, extra in [
        (["-m", "unidec.cli", "serve", "models:/unidec@champion"], "registry"),
        (["-m", "flows.train"], "pipeline"),
    ]:
        refused = run(tmp_path, environment, *words)
        assert refused.returncode == 1 and refused.stdout == "", refused.stderr
        assert f"unidec-xmc[{extra}]" in refused.stderr, refused.stderr
        assert "Traceback" not in refused.stderr, refused.stderr
    estimator = run(tmp_path, environment, "-c", "import unidec; unidec.UniDECClassifier")
    assert "UnidecError: the package sklearn is not installed" in estimator.stderr
    assert "unidec-xmc[pipeline]" in estimator.stderr


def test_an_error_that_is_not_of_an_extra_stays_as_it_is() -> None:
    error = ModuleNotFoundError(name="of_somebody_else")
    assert missing_package(error) is error
    assert isinstance(missing_package(ModuleNotFoundError(name="prefect.flows")), UnidecError)


@pytest.mark.parametrize("extra", _EXTRAS)
def test_packages_that_errors_name_are_in_that_extra(extra: str) -> None:
    modules = set(_EXTRAS[extra].split())
    installed = closure(extra)
    owners = {
        name: {canonicalize_name(n) for n in found}
        for name, found in metadata.packages_distributions().items()
    }
    assert all(owners[name] & installed for name in modules)
    assert not any(owners[name] <= closure() for name in modules), (
        "what every installation has is never missing"
    )


def test_the_place_of_an_error_in_a_trial_is_one_of_the_project(tmp_path: Path) -> None:
    page = tmp_path / "data" / "index.html"
    page.parent.mkdir()
    page.touch()
    for where, seen in (
        ("data/index.html", str(page)),
        ("data/index.html:3", f"{page}:3"),
        ("data.path", "data.path"),
        (str(page), str(page)),
        (None, None),
    ):
        error = DataError("wrong", where=where, got=1, fix="right")
        error.seen_from_above(tmp_path)
        assert error.where == seen
        assert str(error) == (f"{seen}: wrong" if seen else "wrong") + "\n  got: 1\n  fix: right"
