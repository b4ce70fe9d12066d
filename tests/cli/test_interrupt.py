"""Ctrl-C at a program's start: one line and exit code 130, whatever is being imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import importlib.abc, os, runpy, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {at!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["-m", *{words!r}]
runpy.run_module({module!r}, run_name="__main__", alter_sys=False)
"""


@pytest.mark.parametrize(
    ("module", "at", "words"),
    [
        ("unidec.cli", "typer", ["data", "ingest"]),
        ("unidec.cli", "unidec.config", ["data", "ingest"]),
        ("unidec.cli", "unidec.pipeline.data_stages", ["data", "ingest"]),  # within the command
        ("unidec.cli", "pyarrow.compute", ["data", "ingest"]),
        ("flows.train", "prefect", []),
    ],
)
def test_ctrl_c_during_an_import(module: str, at: str, words: list[str]) -> None:
    code = RUN.format(at=at, module=module, words=words)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # returns when Prefect's temporary server has ended, too
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_ctrl_c_in_a_command(tmp_path: Path) -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["unidec", "version"]
from unidec import cli
from importlib import metadata
metadata.version = lambda name: os.kill(os.getpid(), signal.SIGINT)
cli.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_other_programs_keep_their_handler() -> None:
    code = (
        "import signal, unidec.cli; assert signal.getsignal(signal.SIGINT) is "
        "signal.default_int_handler"
    )
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); " + code
    returncode = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode
    assert returncode == 0
