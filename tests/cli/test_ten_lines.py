"""README's "Your own data, in ten lines", as written there: parsed and begun here, run to a served
champion if slow.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import typer.main
from helpers.ports import free_port

from unidec import cli
from unidec.config import load_params
from unidec.data.dataset import XMCDataset

ROOT = Path(__file__).resolve().parents[2]
UNIDEC = "unidec "
ACTIVATE = "source .venv/bin/activate"


def commands() -> list[str]:
    """The lines of the block, without their comments."""
    text = (
        (ROOT / "README.md").read_text(encoding="utf-8").split("## Your own data, in ten lines")[1]
    )
    block = re.search(r"```sh\n(.*?)```", text, re.DOTALL)
    assert block is not None
    return [line.split("  #")[0].strip() for line in block[1].splitlines()]


def one(part: str) -> str:
    """The only command with this in it."""
    (found,) = [command for command in commands() if part in command]
    return found


def environment(root: Path) -> dict[str, str]:
    """This process's environment without its own settings; imports the code of `root`, whatever is
    installed.
    """
    drop = ("GIT_", "DVC_", "PREFECT_", "MLFLOW_", "UNIDEC_", "MAKE", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    kept["PATH"] = f"{root / '.venv' / 'bin'}:{kept['PATH']}"  # what ACTIVATE does
    return kept | {
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "true",
    }


def test_every_command_is_one_that_exists() -> None:
    assert 5 <= len(commands()) <= 10
    program = typer.main.get_command(cli.app)
    for command in commands():
        words = shlex.split(command)
        if command.startswith(UNIDEC):
            parsed = program.make_context("unidec", words[1:])
            assert isinstance(program, typer.core.TyperGroup)
            name, subcommand, rest = program.resolve_command(parsed, words[1:])
            assert subcommand is not None and name
            if name != "config":
                # refuses options and arguments that it has not
                subcommand.make_context(name, rest, parent=parsed)
        elif words[0] == "make":
            subprocess.run(
                ["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True, timeout=60
            )
        elif command != ACTIVATE:
            assert shutil.which(words[0])
    assert ACTIVATE in commands()


def test_the_environment_is_named_once_for_all_pages() -> None:
    """README activates it; no command on any page repeats its path."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    named = [
        line
        for page in pages
        for line in page.read_text(encoding="utf-8").splitlines()
        if ".venv/bin/" in line
    ]
    others = [line for line in named if ACTIVATE not in line and "ExecStart=" not in line]
    assert not others and len(named) > len(others)


@pytest.mark.parametrize("variables", [[], ["VENV=.venv"]])
def test_make_setup_ends_with_what_to_do_next(tmp_path: Path, variables: list[str]) -> None:
    """Also where nothing had to be installed; each command that it names exists."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    use_this_environment(tmp_path)
    command = ["make", "setup", *variables]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    first, *lines = done.stdout.splitlines()
    named = [line.partition("#")[0].strip() for line in lines]
    assert (
        first == ".venv is up to date. Next:"
        and named[0] == ACTIVATE
        and (tmp_path / ACTIVATE.split()[1]).is_file()
    )
    returncode = subprocess.run(
        ["make", "-n", *named[1].split()[1:]], cwd=ROOT, capture_output=True, timeout=60
    ).returncode
    assert returncode == 0
    program = typer.main.get_command(cli.app)
    assert isinstance(program, typer.core.TyperGroup)
    name, subcommand, rest = program.resolve_command(
        program.make_context("unidec", ["version"]), named[2].split()[1:]
    )
    assert subcommand is not None and subcommand.make_context(name, rest)


def test_init_and_ingest_read_the_example(tmp_path: Path) -> None:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copytree(ROOT / "data" / "examples", tmp_path / "data" / "examples")
    for words in (
        [*shlex.split(one(" init "))[1:]],
        ["config", "check"],
        ["data", "ingest"],
    ):
        subprocess.run(
            [sys.executable, "-m", "unidec.cli", *words],
            cwd=tmp_path,
            env=environment(ROOT),
            check=True,
            capture_output=True,
            timeout=120,
        )
    assert load_params(tmp_path / "params.yaml").data.path == "data/examples/debian"
    dataset = XMCDataset.open(tmp_path / "data" / "dataset")
    assert len(dataset.rows("test")) > 100
    assert dataset.num_labels == 100
    files = [path for path in (ROOT / "data" / "examples").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_from_a_clean_clone_to_a_served_champion(tmp_path: Path) -> None:
    root = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(root)], check=True, timeout=120)
    use_this_environment(root)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=root,
            env=environment(root),
            capture_output=True,
            text=True,
            timeout=1200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    serve = one(" serve ")
    printed = {command: run(command) for command in commands() if command != serve}
    summary = printed["make train"].splitlines()[-11:]
    assert (
        "version 1 of unidec is the champion" in summary
        and "report: outputs/report.html" in summary
    )
    assert any(line.startswith("TF-IDF kNN + label match") for line in summary)
    assert len(printed[one('predict "')].splitlines()) == 1 + 5
    output = shlex.split(one("--output"))[-1]
    assert (root / output).is_file()
    serving = one(" serve ")
    port = free_port()
    server = subprocess.Popen(
        [*shlex.split(serving), "--port", str(port)],
        cwd=root,
        env=environment(root),
        start_new_session=True,
    )
    try:
        answer = ask(f"http://127.0.0.1:{port}/predict", shlex.split(one('predict "'))[2])
        assert answer["model"]["version"] == "1"
        assert len(answer["predictions"][0]["labels"]) == 5
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
    assert run(f"{UNIDEC}runs doctor").startswith("healthy")


def use_this_environment(root: Path) -> None:
    """What `make setup` would install, from the environment of this process."""
    (root / ".venv").mkdir()
    for name in ("bin", "lib", "pyvenv.cfg"):
        if (Path(sys.prefix) / name).exists():
            (root / ".venv" / name).symlink_to(Path(sys.prefix) / name)
    (root / ".venv" / ".installed").touch()


def ask(url: str, query: str) -> dict:
    body = json.dumps({"queries": [query], "k": 5}).encode()
    for _ in range(240):
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except OSError:  # not listening yet, or not ready
            time.sleep(0.5)
    raise AssertionError("the server did not answer")


@pytest.mark.parametrize(("cache", "without"), [("missing", "1"), (".", "")])
def test_uv_installs_without_a_cache_where_home_cannot_be_written(
    tmp_path: Path, cache: str, without: str
) -> None:
    """Service accounts and containers often have no home folder; uv itself then stops."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, text in {"python": "", "uv": 'echo "UV_NO_CACHE=$UV_NO_CACHE"; exit 1'}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    environment = os.environ | {"UV_CACHE_DIR": str(tmp_path / cache)}
    command = ["make", "setup", "INSTALLER=uv", f"PYTHON='{sys.executable}'"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert f"UV_NO_CACHE={without}\n" in done.stdout
