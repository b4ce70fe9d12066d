"""An application asked without a socket, and an engine that answers without a model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from unidec.config import Serve
from unidec.errors import DataError
from unidec.ranking.ranker import Prediction
from unidec.serving.app import create_app
from unidec.serving.engine import Identity, Service
from unidec.serving.serve import hosts_of

JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class StubEngine:
    """Answers each text with labels named after it; the score says which engine it was.

    Attributes:
        batches: the texts of each batch. gate: while cleared, answering waits.
    """

    runtime = "stub"

    def __init__(self, sha: str = "a", score: float = 1.0) -> None:
        self.identity = Identity(sha * 64, "m", sha)
        self.model_json = json.dumps({"sha256": sha * 64, "version": sha}).encode()
        uids = [f"L{i}" for i in range(30)]
        self.bundle = SimpleNamespace(
            num_labels=30,
            uids=pa.array(uids),
            titles=pa.array([f"title {i}" for i in range(30)]),
            row_of={uid: i for i, uid in enumerate(uids)},
            info=SimpleNamespace(index_kind="flat", width=8),
        )
        self.score = score
        self.batches = []
        self.files = SimpleNamespace(changed=lambda: "")
        self.gate = threading.Event()
        self.gate.set()

    def check(self, request: Any) -> None:
        if request.head == "clf":
            raise DataError(
                "this bundle does not rank by that head", got="clf", expected="both, de"
            )

    def answer(self, requests: Sequence[Any]) -> list[Prediction]:
        self.batches.append([request.text for request in requests])
        assert self.gate.wait(10)
        if any("poison" in request.text for request in requests):
            raise RuntimeError("poisoned")
        return [
            Prediction(
                [f"{request.text}-{i}" for i in range(request.k)],
                ["t"] * request.k,
                [self.score] * request.k,
                [self.score] * request.k,
                [],
                num_tokens=3,
                unknown_tokens=1,
            )
            for request in requests
        ]

    card = {"stub": True}


class AppClient:
    """A running application."""

    def __init__(self, service: Service, settings: Serve, api_key: str | None) -> None:
        self.service = service
        self.app = create_app(service, settings, api_key, hosts_of(settings, api_key))

    async def ask(
        self,
        path: str,
        what: Any = None,
        *,
        method: str | None = None,
        headers: dict[str, str] | None = None,
        chunks: Sequence[bytes] | None = None,
        query: str = "",
        ends: bool = True,
        leaves: asyncio.Event | None = None,
    ) -> Reply:
        """One request; `what`: JSON of its body, or bytes. `ends`: the last chunk says so, else it
        is waited for.

        Args:
            leaves: the client disconnects when this is set.
        """
        body = (
            b"" if what is None else what if isinstance(what, bytes) else json.dumps(what).encode()
        )
        pieces = [body] if chunks is None else list(chunks)
        given = dict(JSON if what is not None or chunks is not None else {}) | (headers or {})
        given.setdefault("host", "localhost")
        if chunks is not None:
            given.setdefault("transfer-encoding", "chunked")
        elif body:
            given.setdefault("content-length", str(len(body)))
        messages: list[Any] = []
        scope = {
            "type": "http",
            "method": method or ("GET" if what is None and chunks is None else "POST"),
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "http_version": "1.1",
            "scheme": "http",
            "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
            "root_path": "",
            "asgi": {"version": "3.0"},
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "state": {},
        }

        async def receive() -> Any:
            if pieces:
                return {
                    "type": "http.request",
                    "body": pieces.pop(0),
                    "more_body": bool(pieces) or not ends,
                }
            if leaves is None:
                await asyncio.sleep(60)
            else:
                await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            messages.append(message)

        await self.app(scope, receive, send)
        if not messages:
            return Reply(0, {}, b"")
        found = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        return Reply(
            messages[0]["status"], found, b"".join(m.get("body", b"") for m in messages[1:])
        )

    async def predict(self, *texts: str, **more: Any) -> Reply:
        """POST /predict."""
        return await self.ask("/predict", {"queries": list(texts), **more})

    def figure(self, name: str, **labels: str) -> float:
        """A metric's value; 0 where nothing was counted."""
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0


@contextlib.asynccontextmanager
async def running(
    engine: Any = None, api_key: str | None = None, service: Service | None = None, **settings: Any
) -> AsyncIterator[AppClient]:
    """An application within its lifespan."""
    section = Serve(**settings)
    service = service or Service(section)
    if engine is not None:
        service.swap(engine)
    asked = AppClient(service, section, api_key)
    async with asked.app.router.lifespan_context(asked.app):
        yield asked


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine, for at most half a minute."""
    asyncio.run(asyncio.wait_for(main(), 30))
