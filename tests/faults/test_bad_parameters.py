"""Fault 18: bad parameters are all reported at once, with key path and nearest name, exit code 2,
in under 2 s.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

BAD = """\
seed: -1
pool:
  betta: 2
  eta: "6"
loss: {balance: 1.5}
optim: 5
model: {heads: de}
index: {space: clf}
"""
EXPECTED = [
    "seed",
    "pool.betta",
    "nearest: pool.beta",
    "pool.eta",
    "loss.balance",
    "optim",
    "index.space",
    "--set",
]


def run(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "unidec.cli", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.perf_counter() - start


@pytest.mark.parametrize("command", ["data ingest", "train", "evaluate"])
def test_all_at_once_with_exit_code_2_in_2_seconds(tmp_path: Path, command: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(BAD)
    words = (*command.split(), "--params", str(path), "--set", "tokens.max_length=1")
    done, seconds = run(*words)
    for _ in range(4):  # a cold disk cache or a busy neighbour is not the program's own time
        if seconds >= 2:
            done, seconds = run(*words)
    assert done.returncode == 2
    for part in EXPECTED:
        assert part in done.stderr, part
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert seconds < 2


def test_a_parameter_error_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(BAD)
    code = (
        "import sys\nfrom unidec.cli import main\n"
        f"sys.argv = ['unidec', 'train', '--params', {str(path)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert end.code == 2, end.code\n"
        "heavy = {'torch', 'numpy', 'pandas', 'transformers', 'mlflow', 'faiss', 'prefect'} "
        "& set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_yaml_that_does_not_parse_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_text("seed: 1\npool: {beta: 2\nloss: 3\n")
    done, _ = run("config", "check", "--params", str(path))
    assert done.returncode == 2
    assert f"{path}:3" in done.stderr
