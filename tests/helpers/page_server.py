"""The routes that the page asks, answered from twelve titles: what a test wants to go wrong goes
wrong.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from unidec.serving.page import page_routes

TITLES = [
    "red car",
    "green car",
    "blue car",
    "red boat",
    "green boat",
    "blue boat",
    "old house",
    "new house",
    "big house",
    "old red house",
    "<img src=x onerror='document.title=1'>",
    'größer, "neu"\nund <b>rot</b> 🚗',
]
UIDS = [*(f"L{i}" for i in range(11)), "a/b c?"]
WEIGHTS = {"de": 1.0, "clf": 2.0, "knn": 0.5}


class PageServer:
    """The server of a test.

    Attributes:
        bodies: of the requests to /predict, in order. headers: of all requests.
        marks: bodies of the requests to /feedback; None: there are no buttons. The third is
        refused.
        key: asked for where it is set. busy: so many requests are answered with 503. held: requests
            for "red" alone get no answer meanwhile. model: the hash that answers. fused: a fusion
            ranks, by another score than the sum of the parts. calibrated: labels have
            probabilities.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str | None] = []
        self.key = ""
        self.busy = 0
        self.held = False
        self.model = "1" * 64
        self.fused = False
        self.calibrated = True
        self.marks: list[dict[str, Any]] | None = None
        routes = [
            Route("/predict", self._predict, methods=["POST"]),
            Route("/explain", self._explain, methods=["POST"]),
            Route("/labels", self._labels),
            Route("/labels/{uid:path}", self._label),
            Route("/card", self._card),
            Route("/feedback", self._feedback, methods=["POST"]),
        ]
        self.app = Starlette(routes=[*page_routes(), *routes])

    def reset(self) -> None:
        """As it was at first."""
        self.bodies = []
        self.authorizations = []
        self.marks = None
        self.key = ""
        self.busy = 0
        self.held = False
        self.model = "1" * 64
        self.fused = False
        self.calibrated = True

    def ranked(self, asked: dict[str, Any], text: str) -> list[dict[str, Any]]:
        """Labels by shared words, as the server names them; the classifier's part is negative for
        even rows.
        """
        found = []
        for row, (uid, title) in enumerate(zip(UIDS, TITLES, strict=True)):
            de = len(set(text.split()) & set(title.split())) / 2 + 0.01 * row
            label: dict[str, Any] = {
                "de": de,
                "clf": -0.05 if row % 2 == 0 else 0.1,
                "knn": 0.2 if row == 3 else 0.0,
            }
            head = asked.get("head", "both")
            score = (
                label[head]
                if head != "both"
                else sum(WEIGHTS[name] * label[name] for name in WEIGHTS)
            )
            if self.fused and head == "both":
                score = 0.2 * row - 3 - de  # a logit, in another order than the sums
            wanted = asked.get("allow") is None or uid in asked["allow"]
            if wanted and uid not in asked.get("deny", []) and score >= asked.get("min_score", -9):
                likely = None
                if head == "both" and self.calibrated:
                    likely = min(1.0, 4.0**score if self.fused else max(0.0, score / 2))
                found.append(
                    {"uid": uid, "title": title, "score": score, "probability": likely, **label}
                )
        return sorted(found, key=lambda label: -label["score"])[: asked["k"]]

    def _refusal(self, request: Request) -> JSONResponse | None:
        self.authorizations.append(request.headers.get("authorization"))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _wrong(401, what="an API key is required")
        if self.busy:
            self.busy -= 1
            return _wrong(
                503,
                what="too many queries waiting",
                got="1024",
                fix="retry after Retry-After seconds",
            )
        return None

    async def _predict(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        asked = await request.json()
        self.bodies.append(asked)
        text = asked["queries"][0]
        while text == "red" and self.held:
            await asyncio.sleep(0.01)
        if text == "bad":
            return _wrong(
                422,
                what="the query is wrong",
                where="queries.0",
                got="<b>bad</b>",
                fix="write another one",
            )
        unknown = sum(word == "zzz" for word in text.split())
        answer = {"labels": self.ranked(asked, text), "unknown_tokens": unknown}
        return JSONResponse(
            {"model": {"sha256": self.model, "version": "3"}, "predictions": [answer]}
        )

    async def _explain(self, request: Request) -> JSONResponse:
        if refusal := self._refusal(request):
            return refusal
        asked = await request.json()
        head = asked.get("head", "both")
        pieces = asked["query"].split()
        near = {
            "uid": "Q1",
            "title": "a <i>red</i> one",
            "cosine": 0.9,
            "labels": [{"uid": "L0", "title": "red car"}],
        }
        return JSONResponse(
            {
                "labels": self.ranked(asked, asked["query"]),
                "weights": WEIGHTS
                if head == "both"
                else {name: float(name == head) for name in WEIGHTS},
                "nearest": [near],
                "tokens": [{"piece": piece, "unknown": piece == "zzz"} for piece in pieces],
                "unknown_tokens": pieces.count("zzz"),
                "truncated": len(pieces) > 6,
            }
        )

    async def _feedback(self, request: Request) -> JSONResponse:
        assert self.marks is not None
        if len(self.marks) == 2:
            return _wrong(507, what="the feedback was not saved", fix="move the file away")
        self.marks.append(await request.json())
        return JSONResponse({"kept": True})

    async def _labels(self, request: Request) -> JSONResponse:
        words = request.query_params["prefix"].lower()
        found = [
            {"uid": uid, "title": title}
            for uid, title in zip(UIDS, TITLES, strict=True)
            if title.lower().startswith(words) or f" {words}" in title.lower()
        ]
        return self._refusal(request) or JSONResponse({"labels": found, "more": False})

    async def _label(self, request: Request) -> JSONResponse:
        uid = request.path_params["uid"]
        if uid not in UIDS:
            return _wrong(404, what="no such label", got=uid)
        return self._refusal(request) or JSONResponse(
            {"uid": uid, "title": TITLES[UIDS.index(uid)]}
        )

    async def _card(self, request: Request) -> JSONResponse:
        return self._refusal(request) or JSONResponse(
            {
                "model": {
                    "sha256": self.model,
                    "name": "unidec",
                    "version": "3",
                    "alias": "champion",
                },
                "unidec": "0.1.0",
                "runtime": "torch",
                "index": {"kind": "flat", "width": 12},
                "encoder": "bag",
                "recipe": None,
                "data": {"name": "tiny <b>", "sha256": "0" * 64, "rows": {"train": 1234}},
                "num_labels": len(UIDS),
                "num_neighbours": 30,
                "text": "title",
                "heads": ["de", "clf"],
                "space": "both",
                "weights": WEIGHTS,
                "fused": self.fused,
                "metrics": {"validation": {"P@1": 50.0, "odd": 1.0}},
                "score_quantiles": [i / 100 for i in range(101)],
                "api_key": bool(self.key),
                "feedback": self.marks is not None,
                "limits": {"max_k": 12, "max_query_chars": 100},
                "examples": ["red car", "old house"],
            }
        )


def _wrong(status: int, **error: str) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": error}, status, headers=headers)


class RunningApp:
    """An application on a free port of this machine, in a thread."""

    def __init__(self, app: Any) -> None:
        import uvicorn

        config = uvicorn.Config(
            app, port=0, log_config=None, ws="none", lifespan="auto", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        end = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < end and self._thread.is_alive()
            time.sleep(0.01)
        self.address = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        """Ends it and waits for that."""
        self._server.should_exit = True
        self._thread.join(30)
