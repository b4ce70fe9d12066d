"""The client against a server whose every answer is scripted, and against what it cannot reach."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from unidec import client as module
from unidec.client import Answer, Client, Label, ServerError, Unavailable

GONE = (0, None, {})  # the connection is cut before an answer
MODEL = {"sha256": "ab" * 32, "version": "7"}


def prediction(text: str) -> dict:
    label = {"uid": f"uid of {text}", "title": "ø", "score": 1.5, "de": 0.5, "clf": None, "knn": None}
    return {"labels": [label], "unknown_tokens": len(text), "unknown_filters": 0}


class Script:
    """Answers of the server, and what it was asked.

    Attributes:
        answers: functions of the request's body, used up one by one; then every query is answered.
        seen: (method, path, headers, body). connections: how many were opened.
    """

    def __init__(self) -> None:
        self.answers: list = []
        self.seen: list[tuple] = []
        self.connections = 0


def answering(script: Script) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            script.connections += 1

        def do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            told = json.loads(body) if body else None
            script.seen.append((self.command, self.path, dict(self.headers), told))
            if script.answers:
                status, found, headers = script.answers.pop(0)
            else:
                status, headers = 200, {}
                found = {"model": MODEL, "predictions": [prediction(text) for text in (told or {}).get("queries", [])]}
            if status == 0:  # no answer at all
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            if "X-Then-Close" in headers:  # without saying so: as a server does with an idle connection
                self.close_connection = True

        do_GET = do_POST = do

        def log_message(self, *words: object) -> None:
            pass

    return Handler


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def url(script):
    server = ThreadingHTTPServer(("127.0.0.1", 0), answering(script))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def pauses(monkeypatch):
    """Seconds that were slept."""
    slept: list[float] = []
    monkeypatch.setattr(module.time, "sleep", slept.append)
    return slept


def test_what_is_sent_and_what_comes_back(script, url) -> None:
    with Client(f"{url}/behind/proxy/", api_key="secret") as client:
        found = client.predict(["é", "b"], k=3, allow=[], deny=["x"], min_score=0.5, head="de")
        assert found[1] == Answer([Label("uid of b", "ø", 1.5, 0.5, None, None)], 1, 0, MODEL)
        assert client.predict_one("a").labels[0].uid == "uid of a"
    (method, path, headers, body), plain = script.seen
    assert (method, path) == ("POST", "/behind/proxy/predict")
    assert headers["Authorization"] == "Bearer secret" and headers["Content-Type"] == "application/json"
    assert body == {"queries": ["é", "b"], "k": 3, "allow": [], "deny": ["x"], "min_score": 0.5, "head": "de"}
    assert plain[3] == {"queries": ["a"]}  # what was not given is the server's to choose
    assert script.connections == 1


def test_the_other_routes(script, url) -> None:
    script.answers = [
        (200, {"labels": [], "weights": {"de": 1.0}}, {}),
        (200, {"uid": "a/b c", "title": "t"}, {}),
        (404, {"error": {"what": "no such label", "where": "x", "got": "", "expected": "", "fix": ""}}, {}),
        (200, {"labels": [{"uid": "u", "title": "t"}], "more": False}, {}),
        (200, {"runtime": "onnx"}, {}),
        (503, {"ready": False}, {"Retry-After": "1"}),
        (200, {"ready": True}, {}),
    ]
    client = Client(url)
    assert client.explain("q", head="clf")["weights"] == {"de": 1.0}
    assert client.label("a/b c") == {"uid": "a/b c", "title": "t"}
    assert client.label("none") is None
    assert client.labels("gi&t", limit=3) == [{"uid": "u", "title": "t"}]
    assert client.version() == {"runtime": "onnx"}
    assert [client.ready(), client.ready()] == [False, True]
    paths = [path for _, path, _, _ in script.seen]
    assert paths == [
        "/explain", "/labels/a%2Fb%20c", "/labels/none", "/labels?prefix=gi%26t&limit=3", "/version", "/readyz",
        "/readyz",
    ]  # fmt: skip
    assert script.seen[0][3] == {"query": "q", "head": "clf"}
    client.close()


def test_a_busy_server_is_asked_again_after_the_pause_it_asks_for(script, url, pauses) -> None:
    busy = {"error": {"what": "too many queries wait", "where": "", "got": "", "expected": "", "fix": "later"}}
    script.answers = [(503, busy, {"Retry-After": "3"}), GONE, GONE, (502, b"<html>", {}), (503, busy, {})]
    with Client(url) as client:
        assert len(client.predict(["a"])) == 1
    assert len(script.seen) == 6 and len(pauses) == 4  # the first that was dropped may have been an idle connection
    assert pauses[0] == 3.0 and all(0.05 <= seconds <= 1.5 for seconds in pauses[1:])
    assert pauses[3] > pauses[1]  # they grow: 0.1, 0.2, 0.4, 0.8, each between its half and one and a half


def test_it_gives_up_with_the_servers_words(script, url, pauses) -> None:
    busy = {"error": {"what": "too many queries wait", "where": "queue", "got": "9", "expected": "", "fix": "later"}}
    script.answers = [(503, busy, {"Retry-After": "1"})] * 9
    with Client(url, retries=2) as client, pytest.raises(Unavailable, match="too many queries wait") as error:
        client.predict(["a"])
    assert len(script.seen) == 3 and error.value.status == 503 and error.value.fix == "later"
    script.answers = [(503, busy, {"Retry-After": "9"})] * 9
    with Client(url, retries=9, deadline=5) as client, pytest.raises(Unavailable):
        client.predict(["a"])
    assert len(script.seen) == 4  # the next attempt would have begun after the deadline


@pytest.mark.parametrize("header", ["nan", "-5", "1e99", "Fri, 31 Dec 1999 23:59:59 GMT", "soon"])
def test_no_pause_is_endless(script, url, pauses, header) -> None:
    script.answers = [(503, {}, {"Retry-After": header})]
    with Client(url) as client:
        client.predict(["a"])
    assert 0 < pauses[0] <= 10


def test_what_is_wrong_with_a_request_is_said_and_not_asked_again(script, url, pauses) -> None:
    said = {"what": "k is too large", "where": "k", "got": "1000", "expected": "1 to 100", "fix": "ask for fewer"}
    script.answers = [
        (422, {"error": said}, {}),
        (401, {"error": "x"}, {}),
        (200, b"<html>hello", {}),
        (200, b"[]", {}),
    ]
    with Client(url) as client:
        with pytest.raises(ServerError, match=r"422: k is too large\n  where: k\n  got: 1000") as error:
            client.predict(["a"], k=1000)
        assert not isinstance(error.value, Unavailable) and error.value.expected == "1 to 100"
        with pytest.raises(ServerError, match="401: Unauthorized"):
            client.predict(["a"])
        for _ in range(2):
            with pytest.raises(ServerError, match="not an answer of unidec serve"):
                client.predict(["a"])
    assert len(script.seen) == 4 and not pauses


def test_a_connection_that_the_server_closed_is_no_failed_attempt(script, url, pauses) -> None:
    fine = {"model": MODEL, "predictions": []}
    script.answers = [(200, fine, {"X-Then-Close": "1"}), (200, fine, {"Connection": "close"})]
    with Client(url, retries=0) as client:
        for _ in range(3):
            client.predict([])
    assert script.connections == 3 and not pauses


def test_nobody_there(pauses) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    client = Client(url, retries=2)
    with pytest.raises(Unavailable, match=r"does not answer[\s\S]*127\.0\.0\.1") as error:
        client.predict(["a"])
    assert error.value.status == 0 and len(pauses) == 2
    assert client.ready() is False
    with pytest.raises(Unavailable, match="not ready"):
        client.wait_until_ready(0)


def test_a_server_that_is_silent_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.1, retries=0)
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="TimeoutError"):
            client.version()
        assert time.monotonic() - begun < 5


def test_threads_share_a_client(script, url) -> None:
    with Client(url) as client, ThreadPoolExecutor(8) as pool:
        texts = [f"text {number}" for number in range(200)]
        answers = list(pool.map(lambda text: client.predict_one(text).labels[0].uid, texts))
        assert answers == [f"uid of {text}" for text in texts]
        assert script.connections <= 8
        client.close()
        assert client.predict_one("again").labels[0].uid == "uid of again"


def test_wrong_arguments_are_refused_before_anything_is_sent(script, url) -> None:
    client = Client(url)
    for call in (lambda: client.predict("text"), lambda: client.predict(["a"], deny="uid")):
        with pytest.raises(TypeError, match="list"):
            call()
    with pytest.raises(ValueError, match="JSON compliant"):
        client.predict(["a"], min_score=float("nan"))
    for address in ("127.0.0.1:8080", "ftp://host", "http://", "http://host/?a=b"):
        with pytest.raises(ValueError, match="not an address"):
            Client(address)
    assert script.seen == []
    client.predict(["\ud800"])  # the server's to refuse
    assert script.seen[0][3] == {"queries": ["\ud800"]}
    client.close()


def test_the_standard_library_is_enough() -> None:
    program = f"import runpy, sys; runpy.run_path({module.__file__!r}); print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert "'http.client'" in done.stdout and "numpy" not in done.stdout and "'unidec" not in done.stdout


# -- the real server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bundle(helper, tmp_path_factory):
    return helper("served_bundle").make_served_bundle(tmp_path_factory.mktemp("served"), num_labels=120)


@pytest.fixture
def served(bundle):
    """Address of the application over a real bundle, on loopback, with an API key; and the engine within."""
    uvicorn = pytest.importorskip("uvicorn")
    from unidec.sections import Serve
    from unidec.serving.app import create_app
    from unidec.serving.engine import Engine, Service

    settings = Serve(max_queries=8, runtime="torch")
    service = Service(settings)
    app = create_app(service, settings, api_key="sesame")
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on", ws="none"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        engine = Engine.load(bundle, settings)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", lambda: service.swap(engine), engine
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


def test_the_real_server(served) -> None:
    url, make_ready, engine = served
    with Client(url, api_key="sesame", retries=0) as client:
        while True:  # it comes up, and has no model yet
            try:
                client.predict(["a"])
            except Unavailable as error:
                if error.status == 503:
                    break
        assert client.ready() is False
        make_ready()
        client.wait_until_ready(20)
        bundle = engine.bundle
        texts = [bundle.titles[row].as_py() for row in range(5)]
        for answer, expected in zip(client.predict(texts, k=4), bundle.predict(texts, k=4), strict=True):
            assert [label.uid for label in answer.labels] == expected.labels
            assert [label.score for label in answer.labels] == pytest.approx(expected.scores, rel=1e-4)
            assert [label.knn for label in answer.labels] == pytest.approx(expected.knn_scores, abs=1e-4)
            assert answer.model["sha256"] == bundle.sha256
        one = client.predict_one(texts[0], k=3, allow=["L7", "L9", "nobody"], deny=["L9"], head="de")
        assert [label.uid for label in one.labels] == ["L7"] and one.unknown_filters == 1
        assert client.predict_one(texts[0], min_score=1e6).labels == []
        assert client.explain(texts[0], k=2)["labels"][0]["uid"] == "L0"
        assert client.label("L3") == client.label("L3") and client.label("L3")["title"] == bundle.titles[3].as_py()
        assert client.label("nobody/at all") is None
        assert [label["uid"] for label in client.labels("L11", limit=2)] == ["L11", "L110"]
        assert client.version()["model"]["sha256"] == bundle.sha256
        for call in (
            lambda: client.predict(["a"] * 9), lambda: client.predict(["a"], k=101),
            lambda: client.predict(["a"], head="tail"), lambda: client.predict(["\ud800"]),
        ):  # fmt: skip
            with pytest.raises(ServerError, match="fix") as error:
                call()
            assert 400 <= error.value.status < 500 and error.value.what
    with Client(url, retries=0) as stranger:
        with pytest.raises(ServerError, match="401"):
            stranger.predict(["a"])
        assert stranger.ready() is True  # health needs no key
