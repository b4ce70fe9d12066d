"""`make ui` on any port, and the addresses of pages that finished runs print."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from helpers.ports import free_port
from helpers.working_folder import at

from unidec.tracking.store import tracking_uri, ui_url

ROOT = Path(__file__).resolve().parents[2]
RUN = "0a1b"

# a fake server: answers every request with the settings in its environment
SERVER = """#!/bin/sh
"exec" '{python}' "$0" "$@"
import http.server, json, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        told = {{"api_url": os.environ.get("PREFECT_SERVER_UI_API_URL")}}
        self.wfile.write(json.dumps(told).encode())
    def log_message(self, *words): pass
port = sys.argv[-1] if "--port" in sys.argv else os.environ["MLFLOW_PORT"]
http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Answer).serve_forever()
"""


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with what bin/ui reads, a store that is there already, and programs that stand in
    for the servers.
    """
    for name in ("MLFLOW_TRACKING_URI", "UNIDEC_MLFLOW_UI", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mlflow").mkdir()
    shutil.copy(ROOT / "mlflow" / "server.env", tmp_path / "mlflow")
    (tmp_path / "programs").mkdir()
    for name in ("mlflow", "prefect"):
        (tmp_path / "programs" / name).write_text(SERVER.format(python=sys.executable))
    (tmp_path / "programs" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for program in (tmp_path / "programs").iterdir():
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def run_ui(project: Path, programs: Path, mlflow: int, prefect: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["bash", str(ROOT / "bin" / "ui")],
        cwd=project,
        env={
            **os.environ,
            "BIN": str(programs),
            "PORT_MLFLOW": str(mlflow),
            "PORT_PREFECT": str(prefect),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def printed(ui: subprocess.Popen[str]) -> str:
    """What it prints until both servers run."""
    assert ui.stdout is not None
    lines = []
    for line in ui.stdout:
        lines.append(line)
        if "Ctrl-C" in line:
            break
    return "".join(lines)


def stop(ui: subprocess.Popen[str]) -> None:
    ui.send_signal(signal.SIGTERM)
    ui.communicate(timeout=30)
    assert ui.returncode == 0


def test_both_servers_on_ports_of_ones_own(project):
    (project / "mlflow" / "mlflow.db").write_text("there already: nothing to create")
    mlflow = free_port()
    prefect = free_port()
    ui = run_ui(project, project / "programs", mlflow, prefect)
    try:
        text = printed(ui)
        assert (
            f"http://127.0.0.1:{mlflow}/#/experiments" in text
            and f"http://127.0.0.1:{mlflow}/#/models" in text
        )
        assert (
            f"pages   http://127.0.0.1:{prefect}\n" in text
            and f"API     http://127.0.0.1:{prefect}/api\n" in text
        )
        assert "4200" not in text and "5000" not in text
        with urllib.request.urlopen(
            f"http://127.0.0.1:{prefect}/ui-settings", timeout=10
        ) as answer:
            api_url = json.load(answer)["api_url"]
            assert api_url == f"http://127.0.0.1:{prefect}/api"
        modes = [
            stat.S_IMODE(log.stat().st_mode) for log in (project / ".prefect").glob("ui-*.log")
        ]
        assert modes == [0o600, 0o600]
    finally:
        stop(ui)


def test_a_port_that_is_in_use_is_named(project):
    (project / "mlflow" / "mlflow.db").write_text("there already: nothing to create")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ui = run_ui(project, project / "programs", port, free_port())
        text, _ = ui.communicate(timeout=60)
    assert ui.returncode == 1
    assert f"make ui PORT_MLFLOW={port + 1}" in text


def test_a_run_has_an_address_where_a_server_is_named(project, monkeypatch):
    assert ui_url(at(project, tracking_uri), "1", RUN) is None
    assert (
        ui_url("http://u:p@host:5000", "1", RUN) == f"http://host:5000/#/experiments/1/runs/{RUN}"
    )
    monkeypatch.setenv("UNIDEC_MLFLOW_UI", "https://mlflow.example.com/")
    assert (
        ui_url(at(project, tracking_uri), "1", RUN)
        == f"https://mlflow.example.com/#/experiments/1/runs/{RUN}"
    )


@pytest.mark.slow
def test_the_real_servers_on_ports_of_ones_own(project, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(project / "prefect"))
    mlflow = free_port()
    prefect = free_port()
    ui = run_ui(project, Path(sys.executable).parent, mlflow, prefect)
    try:
        assert f"http://127.0.0.1:{prefect}" in printed(ui)
        with urllib.request.urlopen(
            f"http://127.0.0.1:{prefect}/ui-settings", timeout=30
        ) as answer:
            api_url = json.load(answer)["api_url"]
            assert api_url == f"http://127.0.0.1:{prefect}/api"
        with urllib.request.urlopen(f"http://127.0.0.1:{mlflow}/health", timeout=30) as answer:
            assert answer.status == 200
    finally:
        stop(ui)
