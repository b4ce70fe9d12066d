"""Batches the queries of concurrent requests: one thread runs the model, while the event loop reads
and writes.

While the model works, requests queue up and become the next batch. After a batch of several
queries, an idle model waits `wait_seconds` for more. A lone query that takes only milliseconds is
answered in the event loop itself: switching to another thread and back takes a third longer.

- Bounded: at most `queue_queries` queries wait, and a request that would time out at the current
  pace is rejected. A request that timed out, or whose client disconnected, leaves the queue.
- Fair: waiting requests take turns, query by query, so a request of 256 queries does not delay
  requests of one query.
- All queries of a batch go to one engine: the one that was current when they arrived.
- The requests of a failed batch are retried one by one, so only the request that caused it fails.
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

from unidec.serving.request_error import ClientGone, RequestError

log = logging.getLogger(__name__)

Work = Callable[[Any, Sequence[Any]], Sequence[Any]]
_PACE = 0.2  # weight of the newest batch in the moving average
_LONE_SECONDS = 0.015  # how long a lone query may block the event loop


@dataclass(eq=False)
class _Job:
    """The queries of one request; `next` indexes the first query that is not in a batch yet."""

    engine: Any
    queries: Sequence[Any]
    answers: asyncio.Future[list[Any]]
    found: list[Any] = field(default_factory=list)
    next: int = 0

    def left(self) -> int:
        return len(self.queries) - self.next

    def take(self, outcome: Any) -> None:
        """Store the answer to the next query, or fail with an error."""
        if isinstance(outcome, Exception):
            self.lose(outcome)
            return
        self.found.append(outcome)
        if len(self.found) == len(self.queries) and not self.answers.done():
            self.answers.set_result(self.found)

    def lose(self, error: Exception) -> None:
        if not self.answers.done():
            self.answers.set_exception(error)


_Batch = list[tuple[_Job, Any]]  # a job, and one of its queries; or the answer to it


class Batcher:
    """Created and used in one event loop.

    Args:
        work: (engine, queries) -> answers; never called concurrently.
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
        self.waiting = 0  # queries not in a batch yet
        # moving average of seconds per batch; too low after small batches: more is then accepted
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
            RequestError: 503, the request was rejected or timed out. ClientGone. Any error that
            `work` raises.
        """
        if not queries:
            return []
        ahead = self.waiting + len(queries)
        is_late = self._seconds(ahead) > self.timeout_seconds
        if self.waiting and (ahead > self.queue_queries or is_late):
            raise self._unavailable(
                "overload",
                "too many queries waiting",
                got=f"{self.waiting} queries",
                expected=f"at most {self.queue_queries}, "
                f"none longer than {self.timeout_seconds:g} s",
            )
        job = _Job(engine, queries, self._loop.create_future())
        self._jobs.append(job)
        self.waiting = ahead
        self._arrived.set()
        gone = None
        try:
            # by then a single quick query is answered; its client need not be watched
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
        """A 503 with Retry-After: estimated seconds until the queue is answered, 1 to 30."""
        seconds = math.ceil(self._seconds(self.waiting))
        fix = "retry after Retry-After seconds"
        wait = min(max(seconds, 1), 30)
        return RequestError(503, kind, what, fix=fix, retry_after=wait, **parts)

    def is_stuck(self, seconds: float) -> bool:
        """Whether the current batch has taken longer than this."""
        return self.busy_since is not None and time.monotonic() - self.busy_since > seconds

    async def stop(self) -> None:
        """Answer the waiting queries, then end the thread; takes at most a request's timeout."""
        until = self._loop.time() + self.timeout_seconds
        while self._loop.time() < until and (self.busy_since or self.waiting):
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
            is_lone = len(batch) == 1 and not self.waiting
            if is_lone and self._lone_seconds < _LONE_SECONDS:
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
            for job, outcome in outcomes:
                job.take(outcome)
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
                batch.append((job, job.queries[job.next]))
                job.next += 1
                if job.left():
                    self._jobs.append(job)
        self._jobs.extendleft(reversed(other_engines))
        return batch

    def _timed(self, batch: _Batch) -> tuple[_Batch, float]:
        """Each job of the batch with its query's answer or error, and the seconds that the model
        took, without thread switches.
        """
        begun = time.perf_counter()
        return self._answers_of(batch), time.perf_counter() - begun

    def _answers_of(self, batch: _Batch) -> _Batch:
        """Runs in the model's thread, or in the event loop's."""
        jobs = [job for job, _ in batch]
        try:
            answers = self.work(jobs[0].engine, [query for _, query in batch])
            return list(zip(jobs, answers, strict=True))
        except Exception as error:
            requests = list(dict.fromkeys(jobs))
            if len(requests) == 1:
                return [(job, error) for job in jobs]
            text = "a batch of %d requests failed (%s); retrying each request alone"
            log.warning(text, len(requests), error)
            outcomes: _Batch = []
            for request in requests:
                outcomes += self._answers_of([entry for entry in batch if entry[0] is request])
            return outcomes
