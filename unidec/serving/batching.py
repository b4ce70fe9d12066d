"""Queries of many requests are answered together, by one thread, while the event loop reads and writes.

While the model works, requests gather; when it is done, what has gathered is the next batch. An idle model may wait for
others, and only for as many as came together just before: a client that is alone never waits. A lone query that takes
but a few milliseconds is answered by the event loop itself: to wake another thread and be woken takes a third more.

- Bounded: at most `queue_queries` queries wait, and none is taken that could not be answered in time at the pace of
  late; a request whose time is up, or whose client went, leaves the queue.
- Fair: each waiting request gets its share of a batch, so that one of 256 queries does not hold up those of one.
- Wholly from one model: a batch holds queries for one engine, the one that served when the request came.
- A batch that fails is tried again request by request: only the one that is the cause fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

Work = Callable[[Any, Sequence[Any]], Sequence[Any]]
_FORGET_SECONDS = 0.25  # so long after a batch others are still expected to come together
_PACE = 0.2  # weight of the newest batch in the pace
_HERE_SECONDS = 0.004  # so long the event loop may be kept by a lone query


class Overloaded(Exception):
    """The queue is full, or too slow to answer in time.

    Args:
        retry_after: whole seconds until what waits now will have been answered.
    """

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"overloaded: try again in {retry_after} s")
        self.retry_after = retry_after


class TooLate(Exception):
    """The time of a request is up."""


class ClientGone(Exception):
    """Nobody waits for the answer."""


class Job:
    """The queries of one request.

    Attributes:
        answers: an asyncio future of the list of answers, in the order of the queries; raises `TooLate`, `ClientGone`,
            or what the work raised.
    """

    __slots__ = ("alone", "answers", "engine", "found", "missing", "next", "queries", "timer")

    def __init__(self, engine: Any, queries: Sequence[Any], alone: bool, answers: asyncio.Future[list[Any]]) -> None:
        self.engine, self.queries, self.alone, self.answers = engine, queries, alone, answers
        self.found: list[Any] = [None] * len(queries)
        self.next, self.missing = 0, len(queries)  # the first query not in a batch yet; those without an answer
        self.timer: asyncio.TimerHandle | None = None

    @property
    def left(self) -> int:
        """Queries that are in no batch yet."""
        return len(self.queries) - self.next


@dataclass(frozen=True)
class Part:
    """Queries of one job in a batch: `start` to `stop`."""

    job: Job
    start: int
    stop: int

    @property
    def queries(self) -> Sequence[Any]:
        return self.job.queries[self.start : self.stop]


class Batcher:
    """Made and used in one event loop; the work runs in a thread of its own, but for lone queries that are quick.

    Args:
        work: (engine, queries) -> their answers; never called twice at once.
        batch_queries: queries answered together at most.
        queue_queries: queries that may wait.
        wait_seconds: how long an idle model waits for others.
        timeout_seconds: of a request, from `submit` on.
        on_batch: (number of queries, seconds) after each batch, where it was worked on.
        on_drop: number of queries that were not answered.
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
        on_drop: Callable[[int], None] = lambda queries: None,
    ) -> None:
        self.work, self.on_batch, self.on_drop = work, on_batch, on_drop
        self.batch_queries, self.queue_queries = batch_queries, queue_queries
        self.wait_seconds, self.timeout_seconds = wait_seconds, timeout_seconds
        self.loop = asyncio.get_running_loop()
        self.waiting = 0  # queries in no batch yet
        self.pace = 0.0  # seconds a batch, of late; where those were small it is too low, and more is taken
        self.lone_pace = math.inf  # seconds that a lone query takes, of late; unknown before the first
        self.busy_since: float | None = None
        self._jobs: deque[Job] = deque()
        self._together, self._ended = 1, -math.inf  # queries of the last batch, and when it ended
        self._timer: asyncio.Handle | None = None  # begins the next batch
        self._soon = False  # it does so in the loop's next round
        self._todo: queue.SimpleQueue[list[Part] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="unidec-model", daemon=True)
        self._thread.start()

    def submit(self, engine: Any, queries: Sequence[Any], alone: bool = False) -> Job:
        """Put a request into the queue.

        Args:
            alone: the work is given these queries and no others.

        Raises:
            Overloaded: it cannot be taken now.
        """
        num = len(queries)
        if self.waiting and (
            self.waiting + num > self.queue_queries or self._seconds(self.waiting + num) > self.timeout_seconds
        ):
            raise Overloaded(self.retry_after())
        job = Job(engine, queries, alone, self.loop.create_future())
        if not num:
            job.answers.set_result([])
            return job
        job.timer = self.loop.call_later(self.timeout_seconds, self._expire, job)
        self._jobs.append(job)
        self.waiting += num
        self._kick()
        return job

    def cancel(self, job: Job) -> None:
        """The client went: what is not in a batch yet is not answered."""
        if not job.answers.done():
            self._leave(job)
            job.answers.set_exception(ClientGone())

    def retry_after(self) -> int:
        """Whole seconds until what waits now will have been answered, 1 to 30."""
        return min(max(math.ceil(self._seconds(self.waiting)), 1), 30)

    def stuck(self, seconds: float) -> bool:
        """Whether one batch has been worked on for longer than this."""
        return self.busy_since is not None and time.monotonic() - self.busy_since > seconds

    async def stop(self) -> None:
        """Answer what waits, then end the thread; bounded by the time that requests have."""
        until = self.loop.time() + self.timeout_seconds
        while (self.busy_since is not None or self.waiting) and self.loop.time() < until:
            await asyncio.sleep(0.01)
        self._todo.put(None)
        await self.loop.run_in_executor(None, self._thread.join, 1.0)

    def _seconds(self, num: int) -> float:
        """How long the model will take for so many queries."""
        return math.ceil(num / self.batch_queries) * self.pace

    # -- in the event loop -----------------------------------------------------------------------------------------

    def _kick(self) -> None:
        """Begin a batch if the model is idle: now, or when those who came together before are here."""
        if self.busy_since is not None or not self.waiting or self._soon:
            return
        recent = self.loop.time() - self._ended < _FORGET_SECONDS
        expected = min(self._together, self.batch_queries) if recent else 1
        if self.wait_seconds and self.waiting < expected:
            if self._timer is None:
                self._timer = self.loop.call_later(self.wait_seconds, self._begin)
        elif self.waiting == 1 and self.lone_pace < _HERE_SECONDS:
            self._soon = True  # what has been read already comes first, and may be a second query
            self._timer = self.loop.call_soon(self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._soon = False
        if self.busy_since is not None:
            return
        batch = self._next_batch()
        if not batch:
            return
        num = sum(part.stop - part.start for part in batch)
        self.waiting -= num
        self.busy_since = time.monotonic()
        lone = num == 1 and not self.waiting and not batch[0].job.alone
        if lone and self.lone_pace < _HERE_SECONDS:
            outcomes, seconds = self._worked(batch)
            self._finished(outcomes, num, seconds)
            self.on_batch(num, seconds)
        else:
            self._todo.put(batch)

    def _next_batch(self) -> list[Part]:
        """Parts of waiting jobs for one engine, each job its share of the room, then who came first what is left."""
        room, batch = self.batch_queries, []
        others: list[Job] = []  # for another engine, or alone: in their place before the rest
        again: list[Job] = []
        first: Job | None = None
        while self._jobs and room:
            job = self._jobs.popleft()
            if job.answers.done():
                continue
            if first is None:
                first = job
            elif first.alone or job.alone or job.engine is not first.engine:
                others.append(job)
                continue
            num = job.left if job.alone else min(job.left, max(1, room // (len(self._jobs) + 1)))
            batch.append(self._part(job, num))
            room -= num
            if job.left:
                again.append(job)
        for job in again:
            if room > 0 and (num := min(job.left, room)):
                batch.append(self._part(job, num))
                room -= num
        self._jobs.extendleft(reversed(others))
        self._jobs.extend(job for job in again if job.left)
        return batch

    @staticmethod
    def _part(job: Job, num: int) -> Part:
        part = Part(job, job.next, job.next + num)
        job.next += num
        return part

    def _finished(self, outcomes: list[tuple[Part, Sequence[Any] | BaseException]], num: int, seconds: float) -> None:
        self.busy_since = None
        self._together, self._ended = num, self.loop.time()
        self.pace = (1 - _PACE) * self.pace + _PACE * seconds  # from 0: the first batches are slow
        if num == 1 and not outcomes[0][0].job.alone:
            known = self.lone_pace < math.inf
            self.lone_pace = (1 - _PACE) * self.lone_pace + _PACE * seconds if known else seconds
        if self.waiting:  # first, so that the thread works while the answers are written
            self._begin()
        for part, outcome in outcomes:
            job = part.job
            if job.answers.done():
                continue
            if isinstance(outcome, BaseException):
                self._leave(job)
                job.answers.set_exception(outcome)
                continue
            job.found[part.start : part.stop] = outcome
            job.missing -= part.stop - part.start
            if not job.missing:
                self._forget_timer(job)
                job.answers.set_result(job.found)

    def _expire(self, job: Job) -> None:
        if not job.answers.done():
            self._leave(job)
            job.answers.set_exception(TooLate())

    def _leave(self, job: Job) -> None:
        """Out of the queue: its place there is skipped when it comes up."""
        self._forget_timer(job)
        self.waiting -= job.left
        self.on_drop(job.missing)
        job.next = len(job.queries)

    @staticmethod
    def _forget_timer(job: Job) -> None:
        if job.timer is not None:
            job.timer.cancel()
            job.timer = None

    # -- in the thread, or where a lone query is answered --------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._todo.get()) is not None:
            num = sum(part.stop - part.start for part in batch)
            outcomes, seconds = self._worked(batch)
            try:
                self.loop.call_soon_threadsafe(self._finished, outcomes, num, seconds)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits for the answers
                return
            del batch, outcomes  # no engine is held while the thread waits
            self.on_batch(num, seconds)

    def _worked(self, batch: list[Part]) -> tuple[list[tuple[Part, Sequence[Any] | BaseException]], float]:
        begun = time.perf_counter()
        outcomes = self._answer(batch)
        return outcomes, time.perf_counter() - begun

    def _answer(self, batch: list[Part]) -> list[tuple[Part, Sequence[Any] | BaseException]]:
        engine = batch[0].job.engine
        try:
            answers = self.work(engine, [query for part in batch for query in part.queries])
        except Exception as error:
            if len({id(part.job) for part in batch}) == 1:
                return [(part, error) for part in batch]
            log.warning("a batch of %d requests failed (%s): each is tried alone", len(batch), error)
            return [outcome for part in batch for outcome in self._answer([part])]
        outcomes: list[tuple[Part, Sequence[Any] | BaseException]] = []
        place = 0
        for part in batch:
            num = part.stop - part.start
            outcomes.append((part, answers[place : place + num]))
            place += num
        return outcomes
