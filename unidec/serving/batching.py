"""Batches the queries of concurrent requests: one thread answers them, while the event loop reads
and writes.

While the model works, requests gather; when it is done, they become the next batch. After a batch
of several queries an idle model waits `wait_seconds` for more. A lone query that takes a few
milliseconds is answered in the event loop itself: waking another thread, and having it wake the
loop, takes a third longer.

- Bounded: at most `queue_queries` queries wait, and a request that could not be answered in time at
  the current pace is rejected. A request that timed out, or whose client disconnected, leaves the
  queue.
- Fair: waiting requests take turns, query by query, so a request of 256 queries does not delay
  those of one.
- A batch holds queries for one engine: the one that was current when the request arrived.
- A batch that fails is retried request by request, so only the request that caused it fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from unidec.serving.errors import ClientGone, RequestError

log = logging.getLogger(__name__)

Work = Callable[[Any, Sequence[Any]], Sequence[Any]]
_PACE = 0.2  # weight of the newest batch in the moving average
_LONE_SECONDS = 0.015  # how long a lone query may block the event loop


@dataclass(eq=False)
class _Job:
    """The queries of one request; `next` is the first one that is not in a batch yet."""

    engine: Any
    queries: Sequence[Any]
    answers: asyncio.Future[list[Any]]
    found: dict[int, Any] = field(default_factory=dict)
    next: int = 0

    def left(self) -> int:
        return len(self.queries) - self.next

    def lose(self, error: Exception) -> None:
        if not self.answers.done():
            self.answers.set_exception(error)


_Batch = list[tuple[_Job, int]]  # a job, and the place of one of its queries


class Batcher:
    """Created and used in one event loop.

    Args:
        work: (engine, queries) -> their answers; never called concurrently.
        batch_queries: maximum queries per batch. queue_queries: maximum queries in the queue.
        wait_seconds: how long an idle model waits for more queries. timeout_seconds: timeout of a
        request.
        on_batch: called with (number of queries, seconds) after each batch.
    """

    def __init__(
        self,
        work: Work,
        *,
        batch_queries: int,
        queue_queries: int,
        wait_seconds: float,
        timeout_seconds: float,
        on_batch: Callable[[int, float], None] = lambda queries, seconds: None,
    ) -> None:
        self.work = work
        self.on_batch = on_batch
        self.batch_queries = batch_queries
        self.queue_queries = queue_queries
        self.wait_seconds = wait_seconds
        self.timeout_seconds = timeout_seconds
        self.waiting = 0  # queries in no batch yet
        # moving average of seconds per batch; too low after small ones, then more is accepted
        self.pace = 0.0
        self.busy_since: float | None = None
        self._together = 1  # queries of the last batch
        self._lone_seconds = math.inf  # of the last lone query; unknown before the first
        self._jobs: deque[_Job] = deque()
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1, "unidec-model")
        self._task = self._loop.create_task(self._run())

    async def answer(
        self,
        engine: Any,
        queries: Sequence[Any],
        disconnected: Callable[[], Awaitable[Any]] | None = None,
    ) -> list[Any]:
        """The answers, in the order of the queries.

        Args:
            disconnected: returns when the client disconnects.

        Raises:
            RequestError: 503, the request is rejected for now, or timed out. ClientGone. Whatever
            `work` raises.
        """
        if not queries:
            return []
        ahead = self.waiting + len(queries)
        if self.waiting and (
            ahead > self.queue_queries or self._seconds(ahead) > self.timeout_seconds
        ):
            limit = f"at most {self.queue_queries}, none longer than {self.timeout_seconds:g} s"
            raise self._unavailable(
                "overload",
                "too many queries waiting",
                got=f"{self.waiting} queries",
                expected=limit,
            )
        job = _Job(engine, queries, self._loop.create_future())
        self._jobs.append(job)
        self.waiting = ahead
        self._arrived.set()
        gone = None
        try:
            # a single quick query is answered by then, and its client need not be watched
            await asyncio.sleep(0)
            if disconnected is not None and not job.answers.done():
                gone = asyncio.ensure_future(disconnected())
                gone.add_done_callback(lambda _: job.lose(ClientGone()))
            async with asyncio.timeout(self.timeout_seconds):
                return await job.answers
        except TimeoutError:
            raise self.too_late() from None
        finally:
            if gone is not None:
                gone.cancel()
            self.waiting -= job.left()  # abandoned queries are skipped when their turn comes
            job.next = len(queries)

    def too_late(self) -> RequestError:
        """The error of a request that timed out."""
        return self._unavailable(
            "timeout", "no answer in time", expected=f"one within {self.timeout_seconds:g} s"
        )

    def _unavailable(self, kind: str, what: str, **parts: Any) -> RequestError:
        """A 503 with Retry-After: whole seconds until the present queue will be
        answered, 1 to 30.
        """
        seconds = min(max(math.ceil(self._seconds(self.waiting)), 1), 30)
        return RequestError(
            503, kind, what, fix="retry after Retry-After seconds", retry_after=seconds, **parts
        )

    def is_stuck(self, seconds: float) -> bool:
        """Whether the current batch has taken longer than this."""
        return self.busy_since is not None and time.monotonic() - self.busy_since > seconds

    async def stop(self) -> None:
        """Answer the waiting queries, then end the thread; takes at most the timeout of
        a request.
        """
        until = self._loop.time() + self.timeout_seconds
        while (self.busy_since is not None or self.waiting) and self._loop.time() < until:
            await asyncio.sleep(0.01)
        self._task.cancel()
        self._executor.shutdown(wait=False)

    def _seconds(self, num: int) -> float:
        return math.ceil(num / self.batch_queries) * self.pace

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            if self.wait_seconds and self._together > 1:
                await asyncio.sleep(self.wait_seconds)
            batch = self._next_batch()
            self.waiting -= len(batch)
            if not self.waiting:
                self._arrived.clear()
            if not batch:
                continue
            self.busy_since = time.monotonic()
            if len(batch) == 1 and not self.waiting and self._lone_seconds < _LONE_SECONDS:
                outcomes, seconds = self._timed(batch)
            else:
                outcomes, seconds = await self._loop.run_in_executor(
                    self._executor, self._timed, batch
                )
            self.busy_since = None
            self._together = len(batch)
            self.pace += _PACE * (seconds - self.pace)
            if len(batch) == 1:
                self._lone_seconds = seconds
            for (job, place), outcome in outcomes:
                _deliver(job, place, outcome)
            self.on_batch(len(batch), seconds)
            # a reference would keep an engine in memory while the queue is empty
            del batch, outcomes, job, outcome

    def _next_batch(self) -> _Batch:
        """Queries of waiting jobs for one engine, taken from each job in turn."""
        batch: _Batch = []
        other_engines: list[_Job] = []
        while self._jobs and len(batch) < self.batch_queries:
            job = self._jobs.popleft()
            if batch and job.engine is not batch[0][0].engine:
                other_engines.append(job)
            elif job.left():  # else it was abandoned
                batch.append((job, job.next))
                job.next += 1
                if job.left():
                    self._jobs.append(job)
        self._jobs.extendleft(reversed(other_engines))
        return batch

    def _timed(self, batch: _Batch) -> tuple[list[tuple[tuple[_Job, int], Any]], float]:
        """Each query with its answer or error, and the model's seconds, without the time to wake a
        thread.
        """
        begun = time.perf_counter()
        outcomes = self._answers_of(batch)
        return outcomes, time.perf_counter() - begun

    def _answers_of(self, batch: _Batch) -> list[tuple[tuple[_Job, int], Any]]:
        """Each query with its answer or error; in the model's thread, or the event loop's."""
        try:
            answers = self.work(batch[0][0].engine, [job.queries[place] for job, place in batch])
            return list(zip(batch, answers, strict=True))
        except Exception as error:
            jobs = {id(job): job for job, _ in batch}
            if len(jobs) == 1:
                return [(entry, error) for entry in batch]
            log.warning(
                "a batch of %d requests failed (%s); retrying each request alone", len(jobs), error
            )
            alone = ([entry for entry in batch if entry[0] is job] for job in jobs.values())
            return [outcome for part in alone for outcome in self._answers_of(part)]


def _deliver(job: _Job, place: int, outcome: Any) -> None:
    if isinstance(outcome, Exception):
        job.lose(outcome)
        return
    job.found[place] = outcome
    if len(job.found) == len(job.queries) and not job.answers.done():
        job.answers.set_result([job.found[i] for i in range(len(job.queries))])
