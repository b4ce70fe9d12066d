"""The command of the compose file's service `serve`, run as it stands there."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from helpers import compose
from helpers.ports import free_port
from helpers.served_bundle import make_served_bundle

pytest.importorskip("uvicorn")


@pytest.mark.slow
def test_the_service_answers_with_its_key_and_ends_when_told(tmp_path: Path) -> None:
    import sys

    bundle = make_served_bundle(tmp_path / "made")
    port = free_port()
    (tmp_path / "serve").write_text("the key")
    service = compose.compose({"SERVE_MODEL": str(bundle)})["services"]["serve"]
    places = {
        "/run/secrets": str(tmp_path),
        "0.0.0.0": "127.0.0.1",
        "8080": str(port),
        "/srv/unidec": str(tmp_path),
    }
    command, probe = (
        compose.outside(part, places)
        for part in (service["command"], service["healthcheck"]["test"][1:])
    )
    settings = compose.outside(service["environment"], places)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **settings, "PATH": path, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, cwd=tmp_path)
    try:
        probe[0] = sys.executable
        end = time.monotonic() + 120
        while subprocess.run(probe, env=environment, capture_output=True).returncode:
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.2)
        body = json.dumps({"queries": ["redcar"]}).encode()
        kind = {"Content-Type": "application/json"}
        address = f"http://127.0.0.1:{port}/predict"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(address, body, kind), timeout=20)
        assert refused.value.code == 401
        refused.value.close()
        asked = urllib.request.Request(address, body, {**kind, "Authorization": "Bearer the key"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert len(json.load(answer)["predictions"][0]["labels"]) == 5
    finally:
        running.terminate()
        ended = running.wait(20)
    assert ended == 0
