"""Credentials in addresses and variables: used where they are meant, and in no output, log, tag or
file.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from flows import reproduce
from unidec.addresses import mask_logs, parse, without_credentials
from unidec.config import load_params
from unidec.errors import ArtifactError, ConfigError
from unidec.tracking.run import RUN_TAGS, Tracker
from unidec.tracking.store import tracking_uri, ui_url

SECRET = "s3cr%40et"  # of s3cr@et


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"https://user:{SECRET}@host:5000/x failed", "https://host:5000/x failed"),
        (
            "API request to http://user:s3cr@et@host/api (and http://a:b@c)",
            "API request to http://host/api (and http://c)",
        ),
        (f"postgresql+psycopg2://u:{SECRET}@127.0.0.1/db", "postgresql+psycopg2://127.0.0.1/db"),
        (
            "postgresql://h/db?user=u&password=s3cret&x=1",
            "postgresql://h/db?user=u&password=***&x=1",
        ),
        ("https://h/blob?X-Amz-Signature=s3cret retry", "https://h/blob?X-Amz-Signature=*** retry"),
        (
            "models:/unidec@champion, a@b.example, http://h/#/x@y",
            "models:/unidec@champion, a@b.example, http://h/#/x@y",
        ),
        ("'https://token@host'", "'https://host'"),
        # characters that should be percent-encoded
        ("postgresql://u:s3c/r@host/db failed", "postgresql://host/db failed"),
        (
            "postgresql+psycopg2://u:s3#c?r'e\"t@host:5432/db x",
            "postgresql+psycopg2://host:5432/db x",
        ),
        ("'mysql://u:s3 cr et@host/db' (mail a@b.example)", "'mysql://host/db' (mail a@b.example)"),
        ("http://u:12/34@h/x", "http://h/x"),
        ("https://s3/cret@host/x", "https://host/x"),
        ("s3://key:s3c/ret@bucket/x and s3://bucket/a@b", "s3://bucket/x and s3://bucket/a@b"),
        ("cut in postgresql://u:s3cret", "cut in postgresql://***"),
        # all that is not known to be harmless
        ("https://h/blob?sv=2022-11&sig=abc%2Fd=&page=2", "https://h/blob?sv=***&sig=***&page=2"),
        ("'https://h/b?AKIAs3cret123', next", "'https://h/b?*** next"),
        ("http://h/cb#access_token=s3cret", "http://h/cb#access_token=***"),
        ("mysql://h/db?charset=utf8&pwd=s3cret", "mysql://h/db?charset=utf8&pwd=***"),
        ("host=h password='s3 cret' user=u", "host=h password=*** user=u"),
        ("AccountName=a;AccountKey=s3c/ret==;Suffix=x", "AccountName=a;AccountKey=***;Suffix=x"),
        ("Authorization: Basic czNjcmV0", "Authorization: Basic ***"),
        # and what is harmless
        (
            "http://127.0.0.1:5000/#/experiments/1?viewStateShareKey=unidec",
            "http://127.0.0.1:5000/#/experiments/1?viewStateShareKey=unidec",
        ),
        (
            "http://h: refused, http://[::1]:80/x, postgresql://db:5432/x",
            "http://h: refused, http://[::1]:80/x, postgresql://db:5432/x",
        ),
        (
            "sqlite:////home/a@b/mlflow.db, git@github.com:o/r",
            "sqlite:////home/a@b/mlflow.db, git@github.com:o/r",
        ),
        ("--set tokens.max_length=16, max_tokens=64", "--set tokens.max_length=16, max_tokens=64"),
    ],
)
def test_only_credentials_are_taken_out(text: str, shown: str) -> None:
    assert without_credentials(text) == shown
    assert (
        str(
            ArtifactError(
                "failed",
                where=text,
                got=OSError(text),
                fix=text,
            )
        ).count(shown)
        == 3
    )


@pytest.mark.parametrize("scheme", ["postgresql", "mysql+pymysql", "http", "https"])
@pytest.mark.parametrize(
    "password", ["a/b", "a#b", "a?b", "a'b", 'a"b', "a b", "a%b", "a:b", "1/2"]
)
def test_the_parts_of_an_address_with_an_unencoded_password(scheme: str, password: str) -> None:
    found = parse(f"{scheme}://me:{password}@host:54/db?x=1")
    # a client connects to port 1 of a host
    is_rfc = scheme.startswith("http") and password == "1/2"
    assert is_rfc or (found.user, found.password, found.host, found.port) == (
        "me",
        password,
        "host",
        54,
    )
    assert is_rfc or found.without_user() == f"{scheme}://host:54/db?x=1"
    assert without_credentials(f"{scheme}://me:{password}@host:54/db") == f"{scheme}://host:54/db"


def test_secrets_of_variables_are_taken_out_of_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a library quotes a part of an address, or encodes it."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://u:s3c/re t@host/db")
    monkeypatch.setenv("UNIDEC_API_KEY", "k3y-of-the-server")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token")
    text = "invalid literal 's3c/re t' or s3c%2Fre+t; got k3y-of-the-server; see /var/run/token"
    assert without_credentials(text) == "invalid literal '***' or ***; got ***; see /var/run/token"


def test_every_logger_masks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.getLogRecordFactory())
    mask_logs()
    try:
        raise ValueError("postgresql://u:s3c/ret@host/db")
    except ValueError:
        logging.getLogger("another.library").exception("cannot open %s", "http://u:s3c/ret@host")
    logging.getLogger("another.library").warning("%s: %d", "kept", 3)
    assert (
        "s3c" not in caplog.text
        and "http://host" in caplog.text
        and "postgresql://host/db" in caplog.text
    )
    assert caplog.records[-1].args == ("kept", 3)


def test_tags_and_parameters_of_a_run_hold_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    tracker = Tracker()
    given = {"a": "https://h/x?sig=s3cret", "b": "postgresql://u:s3c/ret@h/db"}
    tracker.start(tmp_path, given, tags=given)
    tracker.set_tags(given)
    assert "s3c" not in everything_below(tmp_path) and "postgresql://h/db" in everything_below(
        tmp_path
    )


@pytest.mark.parametrize(
    "key", ["source.path", "source.queries", "source.revision", "data.path", "tracking.experiment"]
)
def test_a_parameter_with_a_password_is_refused_by_its_key(key: str) -> None:
    """Parameters are committed, tracked and shown on pages."""
    with pytest.raises(ConfigError, match="a password or token in a parameter") as caught:
        load_params(None, {key: f"https://user:{SECRET}{'x' * 90}@host/data"})
    assert (
        key in str(caught.value)
        and "s3cr" not in str(caught.value)
        and "source.secrets" in str(caught.value)
    )
    with pytest.raises(ConfigError, match="a password or token in a parameter"):
        load_params(None, {key: "https://account.blob.test/data?sv=2022-11-02&sig=s3cret"})
    load_params(None, {"source.secrets": {"AWS_SECRET_ACCESS_KEY": "team-key"}})


def test_a_parameter_with_a_secret_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UNIDEC_API_KEY", "k3y-of-the-server")
    with pytest.raises(ConfigError, match="a password or token in a parameter") as caught:
        load_params(None, {"tracking.experiment": "k3y-of-the-server"})
    assert "tracking.experiment" in str(caught.value) and "k3y" not in str(caught.value)
    monkeypatch.delenv("UNIDEC_API_KEY")
    load_params(None, {"tracking.experiment": "k3y-of-the-server"})


@pytest.fixture
def server() -> Iterator[Any]:
    """Answers everything with 500; `seen`: the headers Authorization that it got."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.seen.append(self.headers["Authorization"])  # type: ignore[attr-defined]
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.seen = []  # type: ignore[attr-defined]
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.shutdown()
    found.server_close()


def everything_below(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_a_run_keeps_and_logs_none_and_its_next_process_still_has_them(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = f"http://127.0.0.1:{server.server_port}"
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", plain.replace("://", f"://user:{SECRET}@"))
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv(
        RUN_TAGS, json.dumps({"prefect.flow_run_url": f"http://user:{SECRET}@prefect.test/runs/1"})
    )
    caplog.set_level(logging.DEBUG)
    tracker = Tracker()
    tracker.start(tmp_path, {"seed": 0}, tags={"a": "b"})
    tracker.log(1, {"loss": 1.0})
    Tracker.resume(tmp_path).finish("FAILED")
    assert set(server.seen) == {"Basic " + base64.b64encode(b"user:s3cr@et").decode()}
    state = json.loads((tmp_path / "tracking.json").read_text())
    assert state["tags"]["prefect.flow_run_url"] == "http://prefect.test/runs/1"
    monkeypatch.setenv("UNIDEC_MLFLOW_UI", f"http://user:{SECRET}@pages.test/")
    assert (
        tracking_uri() == plain
        and ui_url(plain, "1", "2") == "http://pages.test/#/experiments/1/runs/2"
    )
    assert "s3cr" not in everything_below(tmp_path) + caplog.text
    assert "is unreachable" in caplog.text


def test_a_databases_password_stays_out_of_the_file_which_is_private_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"postgresql://user:{SECRET}@127.0.0.1:1/mlflow"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    modes = []
    replace = os.replace
    monkeypatch.setattr(
        os, "replace", lambda a, b: (modes.append(stat.S_IMODE(os.stat(a).st_mode)), replace(a, b))
    )
    tracker = Tracker()
    tracker.start(tmp_path, {})
    tracker.log(1, {"loss": 1.0})
    assert set(modes) == {0o600}, "before it has its name"
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert {"tracking.json", "tracking.jsonl"} <= files.keys()
    assert set(files.values()) == {0o600}
    assert "s3cr" not in everything_below(tmp_path)
    assert Tracker.resume(tmp_path).uri == uri


def test_commands_print_none(server: Any, tmp_path: Path, warm_python: list[str]) -> None:
    """Also where MLflow's own error, with its address, ends the command by a traceback."""
    address = f"user:{SECRET}@127.0.0.1:{server.server_port}"
    environment = os.environ | {
        "MLFLOW_TRACKING_URI": f"http://{address}",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "UNIDEC_MLFLOW_UI": f"http://{address}/ui",
        "PREFECT_API_URL": f"http://{address}/api",
    }
    (tmp_path / "params.yaml").write_text("recipe: unidec\n")
    commands = [["models", "list"], ["serve", "models:/unidec@champion", "--port", "0"]]
    started = [
        subprocess.Popen(
            [*warm_python, "-m", "unidec.cli", *words],
            cwd=tmp_path,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for words in commands
    ]
    for words, process in zip(commands, started, strict=True):
        output = process.communicate(timeout=120)[0]
        assert "s3cr" not in output, (words, output)
        assert f"127.0.0.1:{server.server_port}" in output, (words, output)
    assert "s3cr" not in everything_below(tmp_path)
    assert len(server.seen) >= 2


def test_prefect_and_dvc(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import flows, os; print(os.environ['PREFECT_API_URL'], "
        "os.environ['PREFECT_API_AUTH_STRING'])"
    )
    environment = os.environ | {"PREFECT_API_URL": f"https://user:{SECRET}@host/api"}
    environment.pop("PREFECT_API_AUTH_STRING", None)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True
    )
    assert done.stdout.split() == ["https://host/api", "user:s3cr@et"]
    said = f"ERROR: failed to push to https://user:{SECRET}@host/x: key"
    done = subprocess.Popen(
        [sys.executable, "-c", f"print({said!r})"], stdout=subprocess.PIPE, text=True
    )
    monkeypatch.setattr(reproduce.subprocess, "Popen", lambda *_words, **_options: done)
    assert (
        reproduce.run([], None, {"KEY": "key"})[1]
        == "ERROR: failed to push to https://host/x: ********\n"
    )
