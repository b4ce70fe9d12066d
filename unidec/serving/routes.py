"""The routes: read a request, have the current engine answer it, write the answer.

POST /predict is the hot path: pydantic checks its body without FastAPI's dependencies, and its
answer is assembled as bytes and not checked again. `benchmarks/results/serving.md` has the cost of
a request apart from the model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from cachetools import LRUCache
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse

from unidec.bundle.answer import LabelQuery
from unidec.config import Serve
from unidec.data.line_file import append_line
from unidec.errors import DataError
from unidec.serving import schemas
from unidec.serving.batching import Batcher
from unidec.serving.engine import Engine, Service
from unidec.serving.middleware import BODY
from unidec.serving.prometheus import model_metrics
from unidec.serving.request_error import RequestError
from unidec.serving.schemas import Answer, answer_of, explain_json, predict_json
from unidec.version import __version__

MAX_LABELS = 50
# room for each cached answer; an answer of five labels takes 800. Longer requests are not cached
CACHED_BYTES = 4096
STUCK_SECONDS = 60.0


class JsonBytes(JSONResponse):
    """A response of JSON as bytes."""

    def render(self, content: bytes) -> bytes:
        return content


class Routes:
    """Handlers of the routes."""

    def __init__(self, service: Service, settings: Serve, api_key: str | None) -> None:
        self.service = service
        self.settings = settings
        self.has_key = api_key is not None
        self.figures = service.metrics
        self.models = schemas.request_models(settings)
        self.cache: LRUCache[tuple[str, LabelQuery], Answer] = LRUCache(
            settings.cache_queries * CACHED_BYTES,
            lambda answer: max(CACHED_BYTES, len(answer.json)),
        )
        self.batcher: Batcher | None = None
        self.side_thread = ThreadPoolExecutor(1, "unidec-side")
        self.figures.watch(self._model_metrics)

    def _model_metrics(self) -> Iterable[Any]:
        waiting = self.batcher.waiting if self.batcher else 0
        return model_metrics(self.service.current, waiting)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        settings = self.settings
        self.batcher = Batcher(
            lambda engine, batch: [answer_of(prediction) for prediction in engine.answer(batch)],
            batch_queries=settings.batch_queries,
            queue_queries=settings.queue_queries,
            wait_seconds=settings.batch_wait_ms / 1000,
            timeout_seconds=settings.timeout_seconds,
            on_batch=self._count_batch,
        )
        try:
            yield
        finally:
            await self.batcher.stop()
            self.side_thread.shutdown(wait=False, cancel_futures=True)

    async def predict(self, request: Request) -> Response:
        """Labels for up to `serve.max_queries` texts, best first; the named model answers all of
        them.
        """
        engine = self._engine()
        body = _read_request(request, self.models.predict)
        queries = _queries(engine, body.queries, body)
        answers = await self._cached_or_new(engine, queries, request)
        self._count(queries[0], answers)
        return JsonBytes(predict_json(engine.model_json, [answer.json for answer in answers]))

    async def explain(self, request: Request) -> Response:
        """Each part of each score with its weight, the nearest training queries, and the query's
        tokens.
        """
        engine = self._engine()
        body = _read_request(request, self.models.explain)
        (query,) = _queries(engine, [body.query], body)
        explanation = await self._aside(lambda: engine.explain(query))
        self._count(query, [answer_of(explanation.prediction)])
        return JsonBytes(explain_json(engine.model_json, explanation))

    async def feedback(self, request: Request) -> Response:
        """Append a person's judgement to the file `serve.feedback`, which `unidec models monitor`
        reads.
        """
        engine = self._engine()
        mark = _read_request(request, self.models.feedback)
        if mark.label not in engine.bundle.row_of:
            raise _no_such_label(mark.label)
        facts = mark.model_dump() | {"bundle": engine.identity.sha256, "at": datetime.now(UTC)}
        line = orjson.dumps(facts, option=orjson.OPT_APPEND_NEWLINE)
        await self._aside(lambda: _append(self.settings, line))
        return JsonBytes(b'{"kept":true}')

    async def _cached_or_new(
        self, engine: Engine, queries: list[LabelQuery], request: Request
    ) -> list[Answer]:
        """Answers from the cache, which is keyed by the bundle's hash and the query; missing ones
        are computed by the model and cached.
        """
        filters = [*(queries[0].allow or ()), *queries[0].deny]
        longest = max(len(query.text) for query in queries)
        if not self.cache.maxsize or sum(map(len, filters)) + longest > CACHED_BYTES:
            return await self._answers(engine, queries, request)
        sha256 = engine.identity.sha256
        answers = {}
        for query in queries:
            if answer := self.cache.get((sha256, query)):
                answers[query] = answer
        new = list(dict.fromkeys(query for query in queries if query not in answers))
        self.figures.cache_hits.inc(len(queries) - len(new))
        self.figures.cache_misses.inc(len(new))
        for query, answer in zip(new, await self._answers(engine, new, request), strict=True):
            answers[query] = answer
            with contextlib.suppress(ValueError):  # larger than the whole cache
                self.cache[sha256, query] = answer
        return [answers[query] for query in queries]

    async def _answers(
        self, engine: Engine, queries: Sequence[LabelQuery], request: Request
    ) -> list[Answer]:
        """Answers from the model, in batches with other requests."""
        assert self.batcher is not None

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        try:
            return await self.batcher.answer(engine, queries, disconnected)
        except DataError as error:
            raise _not_answerable(error) from error

    def _count_batch(self, num_queries: int, seconds: float) -> None:
        self.figures.batch_queries.observe(num_queries)
        self.figures.batch_seconds.observe(seconds)

    def _count(self, query: LabelQuery, answers: list[Answer]) -> None:
        figures = self.figures
        figures.queries.inc(len(answers))
        figures.tokens.inc(sum(answer.num_tokens for answer in answers))
        figures.unknown_tokens.inc(sum(answer.unknown_tokens for answer in answers))
        figures.empty.inc(sum(answer.best is None for answer in answers))
        if query == LabelQuery(query.text, query.k):  # no filter
            for answer in answers:
                if answer.best is not None:
                    figures.best_score.observe(answer.best)

    async def labels(
        self,
        prefix: Annotated[
            str, Query(max_length=200, description="prefix of the uid, the title, or a word in it")
        ] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LABELS)] = 20,
    ) -> Response:
        """Case-insensitive."""
        engine = self._engine()
        labels, more = await self._aside(lambda: engine.labels.find(prefix, limit))
        return JsonBytes(orjson.dumps({"labels": labels, "more": more}))

    async def label(self, uid: str) -> Response:
        """Uid, title, and row in the bundle."""
        engine = self._engine()
        row = await self._aside(lambda: engine.bundle.row_of.get(uid))
        if row is None:
            raise _no_such_label(uid)
        facts = {"uid": uid, "title": engine.bundle.titles[row].as_py(), "row": row}
        return JsonBytes(orjson.dumps(facts))

    async def _aside(self, work: Callable[[], Any]) -> Any:
        """Run work in a separate thread, so that it does not wait for the model's."""
        assert self.batcher is not None
        try:
            running = asyncio.get_running_loop().run_in_executor(self.side_thread, work)
            return await asyncio.wait_for(running, self.settings.timeout_seconds)
        except TimeoutError:
            raise self.batcher.too_late() from None

    async def healthz(self) -> Response:
        """503 if the model has hung for a minute."""
        if self.batcher is not None and self.batcher.is_stuck(STUCK_SECONDS):
            raise RequestError(503, "internal", "the model hangs", fix="restart the server")
        return JsonBytes(b'{"status":"alive"}')

    async def readyz(self) -> Response:
        """503 until a model is loaded and warmed up, and if one of its memory-mapped files was
        edited (size, modification time or sampled content changed). `follow`: the registry's state;
        an outdated model is ready.
        """
        engine = self.service.current
        facts: dict[str, Any] = {"ready": True, "model": None, "follow": self._follow()}
        error = _not_ready()
        if engine is not None:
            facts["model"] = asdict(engine.identity)
            changed = engine.files.changed()
            if not changed:
                return JsonBytes(orjson.dumps(facts))
            error = RequestError(
                503,
                "edited_file",
                "a file of the bundle was edited while being served",
                where=changed,
                expected="the bytes that were loaded",
                retry_after=60,
                fix="restore the bundle and restart the server; replace bundles by renaming, never "
                "in place",
            )
        self.figures.error(error.kind)
        body = {"error": error.parts} | facts | {"ready": False}
        return JsonBytes(orjson.dumps(body), error.status, error.headers)

    async def version(self) -> Response:
        """Versions of the bundle, its data, the previous model, and this program."""
        engine = self._engine()
        previous = self.service.previous
        info = engine.bundle.info
        facts = {
            "model": asdict(engine.identity),
            "previous": None if previous is None else asdict(previous.identity),
            "unidec": __version__,
            "runtime": engine.runtime,
            "index": {"kind": info.index_kind, "width": info.width},
            "num_labels": engine.bundle.num_labels,
            "follow": self._follow(),
        }
        return JsonBytes(orjson.dumps(facts))

    async def card(self) -> Response:
        """Data, sizes, metrics, limits."""
        facts = dict(self._engine().card)
        facts |= {"api_key": self.has_key, "feedback": bool(self.settings.feedback)}
        return JsonBytes(orjson.dumps(facts))

    async def metrics(self) -> Response:
        """Requests, latency, batches, queue, cache, scores, unknown tokens, the model, memory."""
        return Response(self.figures.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _follow(self) -> dict[str, Any] | None:
        return None if self.service.follower is None else self.service.follower.state()

    def _engine(self) -> Engine:
        if (engine := self.service.current) is None:
            raise _not_ready()
        return engine


def _read_request(request: Request, model: Any) -> Any:
    """The request's body as an instance of `model`."""
    given = request.headers.get("content-type", "")
    kind, _, _ = given.partition(";")
    if kind.strip().lower() != "application/json":
        raise RequestError(
            415,
            "content_type",
            "the Content-Type is not JSON",
            where="header Content-Type",
            got=given,
            expected="application/json",
            fix='send "Content-Type: application/json"',
        )
    return schemas.parse_request(model, request.scope.pop(BODY))


def _no_such_label(uid: str) -> RequestError:
    return RequestError(
        404,
        "not_found",
        "no label has this uid",
        where="uid",
        got=uid,
        fix="GET /labels?prefix= finds labels",
    )


def _append(settings: Serve, line: bytes) -> None:
    """Append a whole line to a file that only its owner can read; raises a RequestError if that is
    not possible, e.g. because the disk is full.
    """
    got = f"{settings.feedback_bytes} bytes at most"
    fix = "move the file away after reading it, or raise serve.feedback_bytes"
    try:
        if append_line(settings.feedback, line, settings.feedback_bytes):
            return
    except OSError as error:
        got = error.strerror or str(error)
        fix = "free some space, or set serve.feedback to another file"
    raise RequestError(
        507, "feedback", "the feedback was not saved", where="serve.feedback", got=got, fix=fix
    )


def _queries(engine: Engine, texts: Sequence[str], body: Any) -> list[LabelQuery]:
    """One LabelQuery per text with the request's options; raises a RequestError if the bundle does
    not support them, e.g. lacks a head.
    """
    allow = None if body.allow is None else tuple(body.allow)
    first = LabelQuery(
        texts[0],
        body.k,
        allow,
        deny=tuple(body.deny),
        min_score=body.min_score,
        head=body.head,
        tail=body.tail,
    )
    queries = [replace(first, text=text) for text in texts]
    try:
        engine.check(first)
    except DataError as error:
        raise _not_answerable(error) from error
    return queries


def _not_answerable(error: DataError) -> RequestError:
    return RequestError(
        422,
        "wrong_value",
        error.what,
        where=(error.where or "body").removeprefix("request."),
        got=error.got or "",
        expected=error.expected or "",
        fix=error.fix or "see GET /card for what this model has",
    )


def _not_ready() -> RequestError:
    return RequestError(
        503,
        "not_ready",
        "no model is loaded yet",
        fix="try again; GET /readyz shows the progress",
        retry_after=1,
    )
