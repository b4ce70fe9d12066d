"""Prefect's own blocks, on a real server: a notification arrives, a secret reaches DVC's process and nothing else."""

from __future__ import annotations

import http.server
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from unidec.config import Params
from unidec.errors import ConfigError

VALUE = "correct-horse-battery"


@pytest.fixture
def heard() -> Iterator[tuple[str, list[dict]]]:
    """An address, and what was sent there."""
    told: list[dict] = []

    class Listener(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_words: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listener) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook", told
        server.shutdown()
        thread.join()


def test_a_notification_arrives(prefect_server, heard, caplog):
    from prefect.blocks.notifications import CustomWebhookNotificationBlock

    from flows import publish

    address, told = heard
    block = CustomWebhookNotificationBlock(
        name="team", url=address, json_data={"words": "{{subject}} | {{body}}"}, allow_private_urls=True
    )
    block.save("team", overwrite=True)
    params = Params.model_validate({"retrain": {"notify": ["custom-webhook/gone", "custom-webhook/team"]}})
    with caplog.at_level(logging.WARNING):
        publish.tell(params, "promoted", "version 7 is the champion", {}, ["nDCG@5 40.10"])
    assert told == [{"words": "unidec: version 7 is the champion | nDCG@5 40.10"}]
    assert "a notification could not be sent" in caplog.text and "gone" in caplog.text  # and the other was told still


def test_a_secret_is_dvcs_alone(prefect_server, monkeypatch, tmp_path):
    import os
    import subprocess
    import sys

    from prefect.blocks.system import Secret

    from flows import reproduce

    Secret(value=VALUE).save("remote-key", overwrite=True)
    values = reproduce.secret_values({"REMOTE_KEY": "remote-key"})
    assert values == {"REMOTE_KEY": VALUE} and "REMOTE_KEY" not in os.environ
    real = subprocess.Popen

    def speaks(_command, **options):  # DVC that says all it knows
        program = "import os; print('key', os.environ['REMOTE_KEY'])"
        return real([sys.executable, "-c", program], **options)

    monkeypatch.setattr(reproduce.subprocess, "Popen", speaks)
    said: list[str] = []
    assert reproduce.run(["push"], said.append, values) == (0, "key ********\n") and said == ["key ********"]
    assert VALUE not in reproduce.dvc(["push"], None, values)
    with pytest.raises(ConfigError, match=r"source\.secrets\.REMOTE_KEY: no such secret") as caught:
        reproduce.secret_values({"REMOTE_KEY": "no-such-block"})
    assert VALUE not in str(caught.value)
