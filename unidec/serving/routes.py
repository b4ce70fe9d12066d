"""What the routes do: read a request, have it answered by the current engine, write the answer.

POST /predict is the hot path: its body is checked by pydantic without FastAPI's dependencies, and its answer is written
by hand and not checked again. What one request costs beside the model: `benchmarks/serving_overhead.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Query, Request, Response

from unidec import __version__
from unidec.errors import DataError
from unidec.retrieval.answer import Request as Asked
from unidec.sections import Serve
from unidec.serving import schemas
from unidec.serving.answers import Answer, predict_body
from unidec.serving.batching import Batcher, Job, Overloaded, TooLate
from unidec.serving.cache import AnswerCache
from unidec.serving.errors import RequestError
from unidec.serving.limits import BODY, NO_SNIFFING
from unidec.serving.service import Engine, Explain, Service, work

WATCH_SECONDS = 0.1  # a request that takes longer: is its client still there?
LABEL_REQUESTS = 64  # searches for labels that may wait
MAX_LABELS = 50
FILTERS_KEPT = 100  # an answer with longer lists of labels is not kept
STUCK_SECONDS = 60.0

_JSON = [(b"content-type", b"application/json"), NO_SNIFFING]


class JsonBytes(Response):
    """JSON that is bytes already; without Starlette's search for what the headers lack."""

    def __init__(self, body: bytes, status_code: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.status_code, self.body, self.background = status_code, body, None
        self.raw_headers = [*_JSON, (b"content-length", b"%d" % len(body)), *headers]


class Routes:
    """What the routes do."""

    def __init__(self, service: Service, settings: Serve, api_key: str | None) -> None:
        self.service, self.settings, self.has_key = service, settings, api_key is not None
        self.figures = service.metrics
        self.models = schemas.request_models(settings)
        self.cache = AnswerCache(settings.cache_queries)
        self.batcher: Batcher | None = None
        self.label_threads = ThreadPoolExecutor(1, "unidec-labels")
        self.label_requests = 0
        self.figures.watch(lambda: self.batcher.waiting if self.batcher else 0, lambda: service.current)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        settings = self.settings

        def count(num: int, seconds: float) -> None:
            self.figures.batch_queries.observe(num)
            self.figures.batch_seconds.observe(seconds)

        self.batcher = Batcher(
            work, batch_queries=settings.batch_queries, queue_queries=settings.queue_queries,
            wait_seconds=settings.batch_wait_ms / 1000, timeout_seconds=settings.timeout_seconds,
            on_batch=count, on_drop=self.figures.dropped.inc,
        )  # fmt: skip
        try:
            yield
        finally:
            await self.batcher.stop()
            self.label_threads.shutdown(wait=False, cancel_futures=True)

    # -- predictions -----------------------------------------------------------------------------------------------

    async def predict(self, request: Request) -> Response:
        """Labels for up to `serve.max_queries` texts, best first, answered wholly by the model that is named."""
        engine, asked = self._engine(), self._asked(request, self.models.predict)
        allow = None if asked.allow is None else tuple(asked.allow)
        deny, k, least, head = tuple(asked.deny), asked.k, asked.min_score, asked.head
        queries = [Asked(text, k, allow, deny, least, head) for text in asked.queries]
        _check(engine, queries[0])
        keep = self.cache.size > 0 and len(allow or ()) + len(deny) <= FILTERS_KEPT
        if not keep:
            answers = await self._answers(engine, queries, request)
        else:
            answers = await self._kept_or_new(engine, queries, request)
        self._count(queries[0], answers)
        return JsonBytes(predict_body(engine.model_json, [answer.json for answer in answers]))

    async def explain(self, request: Request) -> Response:
        """Each part of each score with its weight, the nearest training queries, and the query's tokens."""
        engine, asked = self._engine(), self._asked(request, self.models.explain)
        allow = None if asked.allow is None else tuple(asked.allow)
        query = Asked(asked.query, asked.k, allow, tuple(asked.deny), asked.min_score, asked.head)
        _check(engine, query)
        answers = await self._answers(engine, [Explain(query)], request)
        self._count(query, answers)
        return JsonBytes(answers[0].json)

    async def _kept_or_new(self, engine: Engine, queries: list[Asked], request: Request) -> list[Answer]:
        """From the cache what it holds; the rest from the model, and into the cache."""
        sha256 = engine.identity.sha256
        found = [self.cache.get((sha256, query)) for query in queries]
        new = [query for query, answer in zip(queries, found, strict=True) if answer is None]
        self.figures.cache_hits.inc(len(queries) - len(new))
        if new:
            self.figures.cache_misses.inc(len(new))
            made = iter(await self._answers(engine, new, request))
            for i, query in enumerate(queries):
                if found[i] is None:
                    found[i] = answer = next(made)
                    self.cache.put((sha256, query), answer, _num_bytes(query) + len(answer.json))
        return found  # type: ignore[return-value]

    async def _answers(self, engine: Engine, queries: Sequence[Asked | Explain], request: Request) -> list[Answer]:
        """From the model, with others' queries; gives up where the client goes or the time is up."""
        assert self.batcher is not None
        try:
            job = self.batcher.submit(engine, queries, alone=isinstance(queries[0], Explain))
        except Overloaded as error:
            raise RequestError(
                503, "overload", "too many queries wait", got=f"{self.batcher.waiting} queries",
                expected=f"at most {self.batcher.queue_queries}, none longer than {self.settings.timeout_seconds:g} s",
                fix="try again after Retry-After seconds", retry_after=error.retry_after,
            ) from None  # fmt: skip
        watch = _Watch(self.batcher, job, request)
        try:
            return await job.answers
        except TooLate:
            raise RequestError(
                503, "timeout", "no answer in time", expected=f"one within {self.settings.timeout_seconds:g} s",
                fix="try again after Retry-After seconds", retry_after=self.batcher.retry_after(),
            ) from None  # fmt: skip
        except DataError as error:
            raise _not_answerable(error) from error
        finally:
            watch.end()

    def _asked(self, request: Request, model: Any) -> Any:
        kind = request.scope["headers"] and next(
            (value for name, value in request.scope["headers"] if name == b"content-type"), b""
        )
        if kind.partition(b";")[0].strip().lower() != b"application/json":
            raise RequestError(
                415, "content_type", "the body is not declared as JSON", where="header Content-Type",
                got=kind.decode("latin-1"), expected="application/json", fix='send "Content-Type: application/json"',
            )  # fmt: skip
        return schemas.check(model, schemas.read_json(request.scope.pop(BODY)))

    def _count(self, query: Asked, answers: list[Answer]) -> None:
        figures = self.figures
        figures.queries.inc(len(answers))
        figures.tokens.inc(sum(answer.num_tokens for answer in answers))
        if unknown := sum(answer.unknown_tokens for answer in answers):
            figures.unknown_tokens.inc(unknown)
        if empty := sum(answer.best is None for answer in answers):
            figures.empty.inc(empty)
        if query.head == "both" and query.allow is None and not query.deny and query.min_score is None:
            for answer in answers:
                if answer.best is not None:
                    figures.best_score.observe(answer.best)

    # -- labels ----------------------------------------------------------------------------------------------------

    async def find_labels(
        self,
        prefix: Annotated[str, Query(max_length=200, description="how uid, title or a word of it begins")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_LABELS)] = 20,
    ) -> Response:
        """Upper and lower case are one."""
        engine = self._engine()
        labels, more = await self._aside(lambda: engine.labels.find(prefix, limit))
        return JsonBytes(orjson.dumps({"labels": labels, "more": more}))

    async def label(self, uid: str) -> Response:
        """Uid, title, and row in the bundle."""
        engine = self._engine()
        row = await self._aside(lambda: engine.bundle.row_of.get(uid))
        if row is None:
            raise RequestError(
                404, "not_found", "no label has this uid", where="uid", got=uid, fix="GET /labels?prefix= finds labels"
            )
        return JsonBytes(orjson.dumps({"uid": uid, "title": engine.bundle.titles[row].as_py(), "row": row}))

    async def _aside(self, look: Any) -> Any:
        """In a thread: among millions of labels a look takes milliseconds."""
        if self.label_requests >= LABEL_REQUESTS:
            raise RequestError(503, "overload", "too many searches for labels wait", fix="try again", retry_after=1)
        self.label_requests += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.label_threads, look)
        finally:
            self.label_requests -= 1

    # -- facts -----------------------------------------------------------------------------------------------------

    async def alive(self) -> Response:
        """503 where one batch has kept the model busy for a minute: restart it."""
        if self.batcher is not None and self.batcher.stuck(max(STUCK_SECONDS, 10 * self.settings.timeout_seconds)):
            raise RequestError(503, "internal", "the model does not come back", fix="restart the server")
        return JsonBytes(b'{"status":"alive"}')

    async def ready(self) -> Response:
        """503 until a model is loaded and warm, and where a file that it maps was edited: sizes and sampled blocks are
        compared, at most once a second. `follow`: the registry's state; an old model is ready."""
        engine, follow = self.service.current, self._follow()
        model = None if engine is None else asdict(engine.identity)
        changed = "" if engine is None else await asyncio.to_thread(engine.files.changed)
        if engine is not None and not changed:
            return JsonBytes(orjson.dumps({"ready": True, "model": model, "follow": follow}))
        error = _edited(changed) if changed else _not_ready()
        self.figures.error(error.kind)
        body = {"error": error.parts, "ready": False, "model": model, "follow": follow}
        return JsonBytes(orjson.dumps(body), error.status, error.headers)

    async def version(self) -> Response:
        """Of the bundle, its data, the model before it, and this program."""
        engine, previous = self._engine(), self.service.previous
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
        return JsonBytes(orjson.dumps(self._engine().facts() | {"api_key": self.has_key}))

    async def metrics(self) -> Response:
        """Requests, latency, batches, queue, cache, scores, unknown tokens, the model, memory."""
        return Response(self.figures.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def reload(self) -> Response:
        """It looks within a moment; GET /readyz says what came of it."""
        follower = self.service.follower
        if follower is None or not self.has_key:
            what = "nothing is followed here" if self.has_key else "only a server with an API key is told to reload"
            raise RequestError(404, "not_found", what, fix=f"set {self.settings.api_key_env} where the server starts")
        follower.look_soon()
        return JsonBytes(orjson.dumps({"follow": follower.state()}), 202)

    def _follow(self) -> dict[str, Any] | None:
        return None if self.service.follower is None else self.service.follower.state()

    def _engine(self) -> Engine:
        if (engine := self.service.current) is None:
            raise _not_ready()
        return engine


class _Watch:
    """Ends a job whose client goes; begins to look only when the answer takes a while."""

    def __init__(self, batcher: Batcher, job: Job, request: Request) -> None:
        self.batcher, self.job, self.receive = batcher, job, request.receive
        self.task: asyncio.Task[None] | None = None
        self.timer = batcher.loop.call_later(WATCH_SECONDS, self._begin)

    def _begin(self) -> None:
        self.task = self.batcher.loop.create_task(self._look())

    async def _look(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        self.batcher.cancel(self.job)

    def end(self) -> None:
        self.timer.cancel()
        if self.task is not None:
            self.task.cancel()


def _check(engine: Engine, query: Asked) -> None:
    try:
        engine.check(query)
    except DataError as error:
        raise _not_answerable(error) from error


def _not_answerable(error: DataError) -> RequestError:
    """What the bundle cannot do, e.g. a head that it does not have."""
    return RequestError(
        422, "wrong_value", error.what, where=(error.where or "body").removeprefix("request."),
        got=error.got if error.got is not None else "", expected=error.expected or "",
        fix=error.fix or "ask for what this model has: GET /card",
    )  # fmt: skip


def _not_ready() -> RequestError:
    fix = "try again; GET /readyz says how it goes"
    return RequestError(503, "not_ready", "no model is loaded yet", fix=fix, retry_after=1)


def _edited(name: str) -> RequestError:
    return RequestError(
        503, "edited_file", "a file of the bundle was edited while it is served", where=name,
        expected="the bytes that were loaded", retry_after=60,
        fix="restore the bundle and restart the server; replace bundles by renaming, never in place",
    )  # fmt: skip


def _num_bytes(query: Asked) -> int:
    """Of a cache's key."""
    return 4 * (len(query.text) + sum(map(len, query.allow or ())) + sum(map(len, query.deny)))
