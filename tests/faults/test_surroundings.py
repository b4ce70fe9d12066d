"""Fault 35: proxies, locales, terminals, file systems and variables of other tools: a command
works, or says why not.

A quick command runs in every environment; the slow tests run those that import MLflow and Great
Expectations."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from unidec.tracking.store import open_client, prepare_store

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "data/examples/debian"
PROXY = "http://127.0.0.1:9"
NAME = "modèle → ü"  # a parameter that no ASCII terminal can show

# variable -> value; None: not set
ENVIRONMENTS: dict[str, dict[str, str | None]] = {
    "proxies": {
        "HTTP_PROXY": PROXY,
        "HTTPS_PROXY": PROXY,
        "http_proxy": PROXY,
        "https_proxy": PROXY,
    },
    "proxy for all": {"ALL_PROXY": "socks5://127.0.0.1:9", "all_proxy": "socks5://127.0.0.1:9"},
    "mlflow elsewhere": {
        "MLFLOW_REGISTRY_URI": "foo://x",
        "MLFLOW_RUN_ID": "zz",
        "MLFLOW_EXPERIMENT_NAME": "zz",
    },
    "mlflow address": {"MLFLOW_TRACKING_URI": "garbage"},
    "mlflow scheme": {"MLFLOW_TRACKING_URI": "foo://user:s3cret/x@host"},
    "mlflow refused": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"},
    "database refused": {"MLFLOW_TRACKING_URI": "postgresql://u:s3cret/x@127.0.0.1:9/db"},
    "prefect": {
        "PREFECT_API_URL": "garbage",
        "PREFECT_HOME": "/dev/null/x",
        "PREFECT_LOGGING_LEVEL": "LOUD",
    },
    "dvc": {"DVC_ROOT": "/nonexistent", "DVC_EXP_NAME": "x", "DVC_STUDIO_TOKEN": "x"},
    "git": {"GIT_DIR": "/nonexistent", "GIT_CONFIG_GLOBAL": "/nonexistent"},
    "own": {"UNIDEC_LOCK": "x", "UNIDEC_MLFLOW_UI": "x", "UNIDEC_RUN_TAGS": "[1]"},
    "no temporary folder": {
        "TMPDIR": "/nonexistent",
        "TEMP": "/nonexistent",
        "TMP": "/nonexistent",
    },
    "no home": {"HOME": None, "USER": None, "LOGNAME": None},
    "home gone": {
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/dev/null/x",
        "XDG_CONFIG_HOME": "/dev/null/x",
    },
    "dumb terminal": {"TERM": "dumb", "COLUMNS": "0", "LINES": "0", "NO_COLOR": "1"},
    "no terminal": {"TERM": None, "COLUMNS": "wide", "LINES": "-3", "FORCE_COLOR": "1"},
    "zone by its offset": {"TZ": "UTC-3"},
    "no such locale": {"LANG": "zz_ZZ.utf99", "LC_ALL": "zz_ZZ.utf99", "LANGUAGE": "zz"},
    "ascii": {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "ascii output": {"PYTHONIOENCODING": "ascii"},
    "latin-1 output": {"PYTHONIOENCODING": "latin-1:strict"},
    "threads": {"OMP_NUM_THREADS": "many", "MKL_NUM_THREADS": "-1", "OPENBLAS_NUM_THREADS": ""},
    "hashes": {"PYTHONHASHSEED": "7", "PYTHONOPTIMIZE": "0", "PYTHONUNBUFFERED": "1"},
    "notebook": {"MPLBACKEND": "module://matplotlib_inline.backend_inline"},
    "plots": {"MPLBACKEND": "nothing", "MPLCONFIGDIR": "/dev/null/x", "HF_HOME": "/dev/null/x"},
}
NEED_SERVER = ("mlflow address", "mlflow scheme", "mlflow refused", "database refused")
SLOW = (
    ["runs", "list"],
    ["models", "list"],
    ["models", "lineage"],
    ["predict", "a text"],
    ["data", "ingest"],
    ["data", "validate"],
)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with parameters and a store that holds a version."""
    folder = tmp_path_factory.mktemp("project")
    text = (
        f"recipe: unidec\ndata: {{path: '{DATA}'}}\ntracking: {{experiment: '{NAME}', "
        f"model_name: 'modèle'}}\n"
    )
    (folder / "params.yaml").write_text(text, encoding="utf-8")
    client = open_client(prepare_store(f"sqlite:///{folder}/mlflow/mlflow.db"))
    client.create_registered_model("modèle")
    version = client.create_model_version("modèle", source="file:///x", tags={"gate.reasons": "→"})
    client.set_registered_model_alias("modèle", "champion", version.version)
    return folder


def run(
    project: Path, words: list[str], changes: dict[str, str | None], **options: Any
) -> tuple[subprocess.CompletedProcess, float]:
    if changes.get("PYTHONUTF8") == "0" and not sys.prefix.isascii():
        pytest.skip("Python itself finds no packages below a path that its locale cannot spell")
    drop = ("GIT_", "DVC_", "PREFECT_", "MLFLOW_", "UNIDEC_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    for name, value in changes.items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    begin = time.perf_counter()
    given = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "timeout": 120,
    } | options
    command = [sys.executable, "-m", "unidec.cli", *words]
    done = subprocess.run(command, cwd=project, env=environment, check=False, **given)
    return done, time.perf_counter() - begin


def is_worked_or_one_message(done: subprocess.CompletedProcess) -> bool:
    messages = done.stderr.decode(errors="replace")
    is_message = done.returncode != 0 and 0 < len(messages.splitlines()) <= 8
    return (
        "Traceback" not in messages
        and "s3cret" not in messages
        and (done.returncode == 0 or is_message)
    )


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_quick_command(name: str, project: Path) -> None:
    done, _ = run(project, ["config", "show"], ENVIRONMENTS[name])
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def usual(project: Path) -> dict[str, tuple[int, float]]:
    """Exit code and seconds of each command in the tests' own environment."""
    found = {}
    for words in SLOW:
        done, seconds = run(project, words, {})
        found[" ".join(words)] = (done.returncode, seconds)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW, ids=" ".join)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_commands_with_heavy_packages(
    name: str, words: list[str], project: Path, usual: dict[str, tuple[int, float]]
) -> None:
    usual_code, usual_seconds = usual[" ".join(words)]
    done, seconds = run(project, words, ENVIRONMENTS[name])
    assert is_worked_or_one_message(done), done.stderr[-3000:]
    assert done.returncode == usual_code or name in NEED_SERVER, done.stderr[-3000:]
    assert seconds < usual_seconds * 2 + 5


def test_a_notebooks_backend_is_not_loaded(project: Path) -> None:
    program = (
        "from unidec import surroundings; surroundings.settle(); "
        "import matplotlib; print(matplotlib.get_backend())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=project,
        env=os.environ | ENVIRONMENTS["notebook"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip().lower() == "agg"


@pytest.mark.parametrize("name", ["mlflow address", "mlflow refused", "database refused"])
def test_the_registry(name: str, project: Path) -> None:
    done, _ = run(project, ["models", "list"], ENVIRONMENTS[name])
    assert is_worked_or_one_message(done), done.stderr[-3000:]
    if name in NEED_SERVER:
        assert done.returncode != 0 and b"MLFLOW_TRACKING_URI" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [{"PYTHONIOENCODING": "ascii"}, {"PYTHONIOENCODING": "latin-1:strict"}, ENVIRONMENTS["ascii"]],
    ids=["ascii", "latin-1", "C"],
)
def test_what_the_terminal_cannot_show_is_escaped(
    changes: dict[str, str | None], project: Path
) -> None:
    done, _ = run(project, ["config", "show"], changes)
    assert done.returncode == 0 and rb"\u2192" in done.stdout, done.stderr


def test_a_reader_that_leaves(project: Path) -> None:
    """As `| head -1`: also with output that is larger than a pipe."""
    for words in (["config", "keys"], ["config", "show"]):
        reader, writer = os.pipe()
        os.close(reader)
        done, _ = run(project, words, {}, stdout=writer)
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, b""), words


def test_a_full_disk_below_the_output(project: Path) -> None:
    """Finished work is not reported as failed; a command that only prints is."""
    with open("/dev/full", "wb") as full:
        done, _ = run(project, ["config", "show"], {}, stdout=full)
        assert (
            done.returncode == 1
            and b"No space left" in done.stderr
            and b"Traceback" not in done.stderr
        )
        done, _ = run(project, ["data", "ingest"], {}, stdout=full)
        assert (
            done.returncode == 0
            and b"No space left" in done.stderr
            and (project / "data/dataset").is_dir()
        )
        done, _ = run(
            project,
            ["config", "nonsense"],
            {},
            stdout=full,
            stderr=full,
        )
        assert done.returncode == 2


def test_closed_streams(project: Path) -> None:
    """`>&- 2>&- <&-`: no file that is opened later gets their numbers, and with them what is
    printed.
    """
    words = f"{shlex.quote(sys.executable)} -m unidec.cli data ingest >&- 2>&- <&-"
    returncode = subprocess.run(
        ["sh", "-c", words], cwd=project, timeout=120, check=False
    ).returncode
    assert returncode == 0
    printed = [
        path for path in project.rglob("*") if path.is_file() and b"ingest: " in path.read_bytes()
    ]
    assert printed == []


@pytest.mark.skipif(sys.platform != "linux", reason="umask of a child")
def test_a_strict_umask(project: Path) -> None:
    done, _ = run(project, ["data", "ingest"], {}, umask=0o077)
    assert done.returncode == 0, done.stderr
