"""docs/serving.md says what the server does: routes, keys, limits, metrics, pictures."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from pathlib import Path

import pytest
import requests
import yaml
from helpers.served_bundle import make_served_bundle

pytest.importorskip("prometheus_client")

from unidec.config import Serve
from unidec.serving import schemas
from unidec.serving.app import create_app
from unidec.serving.engine import Engine, Service
from unidec.serving.follow import Follower
from unidec.serving.prometheus import follow_metrics

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text()
# until 2.0.0
PROMISED = yaml.safe_load((ROOT / "tests" / "cli" / "promised.yaml").read_text())["server"]


def table(heading: str) -> list[list[str]]:
    """Rows of the first table after a line that begins so."""
    after = TEXT[TEXT.index(f"\n{heading}") :]
    rows = re.search(r"\|---.*\n((?:\|.*\n)+)", after)
    assert rows is not None
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in rows[1].splitlines()]


def test_every_route_is_there_and_on_the_page() -> None:
    paths = create_app(Service(Serve()), Serve(), "key").openapi()["paths"]
    served = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    written = {re.sub(r"\?.*", "", row[0].strip("`")) for row in table("| route")}
    assert set(PROMISED["routes"]) <= written
    assert {path.replace("{uid:path}", "{uid}") for path in served} | {
        "GET /openapi.json"
    } == written


def test_every_key_of_a_request_and_its_default() -> None:
    fields = schemas.request_models(Serve()).predict.model_fields
    rows = {row[0].strip("`"): row[1].strip("`") for row in table("| key | default")}
    assert set(PROMISED["keys"]) <= set(fields)
    assert set(rows) == set(fields) - {"queries"}
    assert rows["k"] == str(fields["k"].default)
    assert rows["head"] == fields["head"].default
    body = re.search(r"-d '(\{.*\})'", TEXT)
    assert body is not None
    assert schemas.request_models(Serve()).predict.model_validate(json.loads(body[1]))


def test_every_limit_and_its_default() -> None:
    written: dict[str, str] = {}
    for names, values, _ in table("| parameter"):
        keys = [name.removeprefix("serve.") for name in re.findall(r"`([\w.]+)`", names)]
        written.update(
            zip(keys, re.split(r", (?=\w)", values) if len(keys) > 1 else [values], strict=True)
        )
    for name, value in written.items():
        default = getattr(Serve(), name)
        assert value.replace(",", "") == (
            f"{default:g}" if isinstance(default, float) else str(default)
        ), name
    left = set(Serve.model_fields) - set(written) - {"host", "port"}
    assert {name for name in left if f"serve.{name}" not in TEXT} == set()


def test_every_metric_on_the_page_exists() -> None:
    service = Service(Serve())
    create_app(service, Serve())
    service.metrics.watch(lambda: follow_metrics(Follower(service, "bundle", Serve()).state()))
    service.metrics.requests.labels("/predict", "200").inc()
    service.metrics.request_seconds.labels("/predict").observe(0.1)
    service.metrics.error("overload")
    known = {
        line.split()[2]
        for line in service.metrics.page().decode().splitlines()
        if line.startswith("# TYPE")
    }
    known |= {"unidec_model_info", "unidec_model_labels"}  # there once a model is
    known |= {"unidec_follow_look_age_seconds"}  # ... once it was asked
    rows = "\n".join(row[0] for row in table("| name | what"))
    names = set(re.findall(r"`((?:unidec|process)_\w+)", rows))
    names |= {f"unidec_follow{name}" for name in re.findall(r"`(_\w+)`", rows)}
    assert len(names) > 20
    assert names - known == set()
    mine = {
        name
        for name in known
        if name.startswith("unidec_") and "follow" not in name and not name.endswith("_created")
    }
    assert mine - names == set(), "not on the page"
    assert set(PROMISED["metrics"]) <= known


def test_pictures_are_there() -> None:
    for name in re.findall(r"\((images/[\w.-]+)\)", TEXT):
        assert (ROOT / "docs" / name).is_file(), name


def test_the_example_in_python_retries_until_a_model_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    (program,) = re.findall(r"## From Python.*?```python\n(.*?)```", TEXT, re.DOTALL)
    settings = Serve(runtime="torch")
    engine = Engine.load(make_served_bundle(tmp_path), settings)
    service = Service(settings)
    app = create_app(service, settings, api_key="KEY")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", ws="none"))

    def refusals() -> float | None:
        return service.metrics.registry.get_sample_value(
            "unidec_errors_total", {"kind": "not_ready"}
        )

    def loaded_after_the_first_refusal() -> None:
        while not refusals():
            time.sleep(0.01)
        service.swap(engine)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            program = program.replace("127.0.0.1:8080", f"127.0.0.1:{listener.getsockname()[1]}")
            threading.Thread(target=loaded_after_the_first_refusal, daemon=True).start()
            begun = time.monotonic()
            exec(program, {})
            assert time.monotonic() - begun > 1, "the first answer was 503 with Retry-After: 1"
            with pytest.raises(requests.HTTPError, match="422"):  # refused, not retried
                exec(program.replace('"k": 5', '"k": 0'), {})
        finally:
            server.should_exit = True
            thread.join(20)
    expected = engine.bundle.predict(["a text editor"], k=5)
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert printed == expected[0].labels
    assert refusals() == 1
