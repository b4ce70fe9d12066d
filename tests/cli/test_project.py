"""The wheel, installed where there is no checkout: what it occupies, a project, a training of 200
queries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import yaml
from helpers.raw_files import write_raw

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("PREFECT_", "MLFLOW_", "DVC_", "GIT_", "UNIDEC_", "PYTHON", "VIRTUAL_ENV", "CONDA_")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel; everything else comes from this one's packages, without its
    editable install.
    """
    folder = tmp_path_factory.mktemp("wheel")
    listed = [
        "git",
        "-C",
        str(ROOT),
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "-z",
    ]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in names:
        if (
            name
            and not name.startswith(("tests/", "docs/", "data/", "benchmarks/", "outputs/"))
            and (ROOT / name).is_file()
        ):
            (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "source" / name)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *options, "-w", str(folder), str(folder / "source")],
        check=True,
        timeout=240,
    )
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    others = ascii(sysconfig.get_paths()["purelib"])  # Python 3.12 reads the file in the locale
    (packages / "others.pth").write_text(f"import sys; sys.path.append({others})\n")
    (wheel,) = folder.glob("unidec_xmc-*.whl")
    subprocess.run(
        [
            *pip,
            "--python",
            str(folder / "env" / "bin" / "python"),
            "install",
            "--no-deps",
            "--no-index",
            str(wheel),
        ],
        check=True,
        timeout=240,
        env=clean(folder / "env"),
    )
    return folder / "env"


def clean(environment: Path) -> dict[str, str]:
    """Variables as of somebody who has activated the environment and nothing else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
    kept |= {
        "PATH": f"{environment / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "DO_NOT_TRACK": "1",
    }
    return kept | {"VIRTUAL_ENV": str(environment), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run(environment: Path, folder: Path, *words: str, code: int = 0, seconds: int = 200) -> str:
    done = subprocess.run(
        [str(environment / "bin" / words[0]), *words[1:]],
        cwd=folder,
        env=clean(environment),
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == code, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def test_the_wheel_takes_one_name_and_brings_a_project(environment: Path, tmp_path: Path) -> None:
    (packages,) = (environment / "lib").glob("python*/site-packages")
    assert not (packages / "flows").exists()
    assert (packages / "unidec" / "__init__.py").is_file()
    said = run(
        environment, tmp_path, "unidec", "init", "shop", "--project", "--data-path", "data/raw/shop"
    )
    shop = tmp_path / "shop"
    assert "dvc.yaml" in said and "python -m flows.train" in said
    for name in (
        "dvc.yaml",
        "prefect.yaml",
        "params.yaml",
        ".gitignore",
        ".dvc/config",
        "flows/train.py",
    ):
        assert (shop / name).is_file(), name
    described = yaml.safe_load((shop / "dvc.yaml").read_text())["stages"]
    used = {path for stage in described.values() for path in stage["deps"]}
    outs = [out for stage in described.values() for out in stage["outs"]]
    made = {out if isinstance(out, str) else next(iter(out)) for out in outs}
    assert {path for path in used if not any(path.startswith(out) for out in made)} == {
        "${data.path}",
        "params.yaml",
        "data/start.json",
    }
    assert set(described) == set(yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"])
    home = run(
        environment, shop, "python", "-c", "import flows, os; print(os.environ['PREFECT_HOME'])"
    )
    assert Path(home.strip()) == shop.resolve() / ".prefect"

    # again: what is there stays
    (shop / "dvc.yaml").write_text("mine")
    assert "nothing, all files exist" in run(environment, shop, "unidec", "init", "--project")
    assert (shop / "dvc.yaml").read_text() == "mine"


def test_without_a_dvc_repository_the_error_is_one_line(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    run(environment, tmp_path, "unidec", "init", "--project", "--data-path", "shop")
    shutil.rmtree(tmp_path / ".dvc")
    said = run(environment, tmp_path, "python", "-m", "flows.train", code=2)
    assert (
        "no DVC repository" in said and "unidec init --project" in said and "Traceback" not in said
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_queries_train_in_a_project(
    environment: Path, tmp_path: Path, raw_factory
) -> None:
    write_raw(raw_factory(160, 40, 40), tmp_path / "data" / "raw" / "shop", "tables")
    run(environment, tmp_path, "unidec", "init", "--project", "--data-path", "data/raw/shop")
    text = (tmp_path / "params.yaml").read_text()
    (tmp_path / "params.yaml").write_text(text.replace("optim: {epochs,", "optim: {epochs: 2,"))
    run(environment, tmp_path, "python", "-m", "flows.train", seconds=800)
    assert (tmp_path / "dvc.lock").is_file() and (
        tmp_path / "outputs" / "bundle" / "manifest.json"
    ).is_file()
    assert (tmp_path / ".prefect").is_dir()
    assert (tmp_path / "mlflow" / "mlflow.db").is_file()
    assert "champion" in run(environment, tmp_path, "unidec", "models", "list")
    assert "up to date" in run(environment, tmp_path, "python", "-m", "dvc", "status")
