"""Batches: what goes together, what waits, what is refused, what fails alone."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from unidec.serving.batching import Batcher
from unidec.serving.request_error import ClientGone, RequestError


class Model:
    """Doubles numbers, remembers its batches, and waits while its gate is closed."""

    def __init__(self) -> None:
        self.batches: list[tuple[Any, list[int]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.began = threading.Semaphore(0)

    def __call__(self, engine: Any, queries: Sequence[int]) -> list[int]:
        self.batches.append((engine, list(queries)))
        self.began.release()
        assert self.gate.wait(10)
        if -1 in queries:
            raise ValueError("minus one")
        return [2 * query for query in queries]


def batcher(model: Model, **more: Any) -> Batcher:
    settings = {
        "batch_queries": 8,
        "queue_queries": 100,
        "wait_seconds": 0.0,
        "timeout_seconds": 10.0,
    } | more
    return Batcher(model, **settings)


def submit(
    batches: Batcher, engine: Any, queries: Sequence[Any], gone: Any = None
) -> asyncio.Task[list[Any]]:
    """A request, in a task of its own as the server's are."""
    return asyncio.create_task(batches.answer(engine, queries, gone))


async def begun(model: Model) -> None:
    """Until the model works on a batch."""
    assert await asyncio.get_running_loop().run_in_executor(None, model.began.acquire, True, 5)


def test_every_query_gets_its_own_answer_in_its_place_whatever_it_was_batched_with() -> None:
    async def main() -> None:
        model = Model()
        batches = batcher(model)
        jobs = [
            submit(batches, "e", list(range(start, start + num)))
            for start, num in ((0, 1), (10, 20), (50, 3))
        ]
        assert [await job for job in jobs] == [[0], [2 * i for i in range(10, 30)], [100, 102, 104]]
        assert all(len(queries) <= 8 for _, queries in model.batches)
        assert sorted(query for _, queries in model.batches for query in queries) == [
            0,
            *range(10, 30),
            50,
            51,
            52,
        ]
        assert batches.waiting == 0
        await batches.stop()

    asyncio.run(main())


def test_requests_gather_while_the_model_works() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        jobs = [submit(batches, "e", [0])]
        await begun(model)
        jobs += [submit(batches, "e", [i]) for i in range(1, 7)]
        model.gate.set()
        expected = [[2 * i] for i in range(7)]
        assert [await job for job in jobs] == expected
        assert [queries for _, queries in model.batches] == [[0], [1, 2, 3, 4, 5, 6]]
        await batches.stop()

    asyncio.run(main())


def test_a_client_alone_never_waits_and_those_who_came_together_wait_for_others() -> None:
    async def main() -> None:
        model = Model()
        batches = batcher(model, wait_seconds=0.2)
        began = time.monotonic()
        for i in range(5):
            assert await submit(batches, "e", [i]) == [2 * i]
        assert time.monotonic() - began < 0.2, "it waited for others"
        await asyncio.gather(submit(batches, "e", [10]), submit(batches, "e", [11]))
        first = submit(batches, "e", [20])
        await asyncio.sleep(0.01)
        assert await submit(batches, "e", [21]) == [42]
        assert await first == [40]
        assert model.batches[-1][1] == [20, 21]
        await batches.stop()

    asyncio.run(main())


class Threads:
    """Says in which thread each batch was answered."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[tuple[int, list[int]]] = []

    def __call__(self, engine: Any, queries: Sequence[int]) -> list[int]:
        self.batches.append((threading.get_ident(), list(queries)))
        if -1 in queries:
            raise ValueError("minus one")
        time.sleep(self.seconds)
        return list(queries)

    def here(self) -> list[list[int]]:
        """What the thread that asks answered itself."""
        return [queries for thread, queries in self.batches if thread == threading.get_ident()]


def test_a_lone_query_that_is_quick_is_answered_by_the_event_loop_and_no_other_is() -> None:
    async def main() -> None:
        model = Threads()
        sizes = []
        batches = batcher(model, on_batch=lambda num, seconds: sizes.append(num))
        assert await submit(batches, "e", [1]) == [1]
        assert model.here() == [], "how long one takes is not known yet"
        assert await submit(batches, "e", [2]) == [2]
        assert model.here() == [[2]]
        with pytest.raises(ValueError, match="minus one"):
            await submit(batches, "e", [-1])
        assert model.here() == [[2], [-1]]
        await submit(batches, "e", [4, 5])
        await asyncio.gather(*(submit(batches, "e", [i]) for i in range(6, 9)))
        assert model.here() == [[2], [-1]]
        assert [queries for _, queries in model.batches[3:]] == [[4, 5], [6, 7, 8]]
        model.seconds = 0.05
        await submit(batches, "e", [9])
        await submit(batches, "e", [10])
        expected = [[2], [-1], [9]]
        assert model.here() == expected, "it keeps the loop no second time"
        await batches.stop()
        assert sorted(sizes) == [1, 1, 1, 1, 1, 2, 3], (
            "each batch is counted, wherever it was answered"
        )

    asyncio.run(main())


def test_one_query_a_batch_of_many_waiting_keeps_the_event_loop_free() -> None:
    async def main() -> None:
        model = Threads()
        batches = batcher(model, batch_queries=1, queue_queries=5000)
        for i in range(2):
            await submit(batches, "e", [i])
        jobs = [submit(batches, "e", [i]) for i in range(2000)]
        expected = [[i] for i in range(2000)]
        assert await asyncio.gather(*(job for job in jobs)) == expected
        assert model.here() in ([[1]], [[1], [1999]])
        await batches.stop()

    asyncio.run(main())


def test_a_large_request_leaves_room_for_small_ones() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        first = submit(batches, "e", [0])
        await begun(model)
        large = submit(batches, "e", list(range(100, 150)))
        small = [submit(batches, "e", [i]) for i in range(1, 5)]
        model.gate.set()
        await asyncio.gather(*(job for job in (first, *small)))
        assert set(range(1, 5)) <= set(model.batches[1][1]), (
            "the small ones are in the first batch after"
        )
        assert len(model.batches[1][1]) == 8, "which is full"
        expected = [2 * i for i in range(100, 150)]
        assert await large == expected
        await batches.stop()

    asyncio.run(main())


def test_a_batch_is_of_one_engine_and_engines_keep_their_turn() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        jobs = [submit(batches, "old", [0])]
        await begun(model)
        jobs += [submit(batches, "old" if i % 2 else "new", [i]) for i in range(1, 9)]
        model.gate.set()
        await asyncio.gather(*(job for job in jobs))
        assert model.batches == [
            ("old", [0]),
            ("old", [1, 3, 5, 7]),
            ("new", [2, 4, 6, 8]),
        ]
        await batches.stop()

    asyncio.run(main())


def test_a_request_that_fails_fails_alone() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        jobs = [submit(batches, "e", [0])]
        await begun(model)
        jobs += [
            submit(batches, "e", [1]),
            submit(batches, "e", [-1, 7]),
            submit(batches, "e", [2]),
        ]
        model.gate.set()
        answers = await asyncio.gather(*(job for job in jobs), return_exceptions=True)
        assert answers[0] == [0]
        assert answers[1] == [2]
        assert answers[3] == [4]
        assert isinstance(answers[2], ValueError)
        assert await submit(batches, "e", [5]) == [10], "the thread lives"
        await batches.stop()

    asyncio.run(main())


def test_the_queue_is_bounded_and_recovers() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model, queue_queries=10)
        jobs = [submit(batches, "e", [0])]
        await begun(model)
        jobs += [submit(batches, "e", list(range(10)))]  # as many as may wait
        with pytest.raises(RequestError, match="too many queries waiting") as refused:
            await submit(batches, "e", [1])
        assert 1 <= int(refused.value.headers["retry-after"]) <= 30
        assert batches.waiting == 10
        model.gate.set()
        await asyncio.gather(*(job for job in jobs))
        assert await submit(batches, "e", list(range(50))) == list(range(0, 100, 2)), (
            "none waits: any size"
        )
        await batches.stop()

    asyncio.run(main())


def test_what_could_not_be_answered_in_time_is_refused_at_once() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model, timeout_seconds=2.0)
        batches.pace = 1.5  # seconds a batch of eight
        jobs = [submit(batches, "e", [0])]
        await begun(model)
        jobs.append(submit(batches, "e", list(range(7))))
        jobs.append(submit(batches, "e", [7]))
        with pytest.raises(RequestError, match="too many queries waiting"):
            await submit(batches, "e", [8])
        model.gate.set()
        await asyncio.gather(*(job for job in jobs))
        assert batches.pace < 1.5, "it learns that the model is faster"
        await batches.stop()

    asyncio.run(main())


def test_time_is_up_also_while_the_model_works_and_the_queue_forgets_it() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model, timeout_seconds=0.1)
        jobs = [submit(batches, "e", [0])]
        await begun(model)
        jobs += [submit(batches, "e", [1, 2])]
        for job in jobs:
            with pytest.raises(RequestError, match="no answer in time"):
                await job
        assert batches.waiting == 0
        model.gate.set()
        batches.timeout_seconds = 5.0
        assert await submit(batches, "e", [3]) == [6]
        expected = [[0], [3]]
        assert [queries for _, queries in model.batches] == expected, "1 and 2 were cancelled"
        await batches.stop()

    asyncio.run(main())


def test_a_client_that_goes_is_not_answered() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        first = submit(batches, "e", [0])
        await begun(model)
        leaves = asyncio.Event()
        gone = submit(batches, "e", [1, 2, 3], leaves.wait)
        stays = submit(batches, "e", [4])
        await asyncio.sleep(0)
        leaves.set()
        with pytest.raises(ClientGone):
            await gone
        assert batches.waiting == 1
        model.gate.set()
        assert [await first, await stays] == [[0], [8]]
        expected = [[0], [4]]
        assert [queries for _, queries in model.batches] == expected
        await batches.stop()

    asyncio.run(main())


def test_stopping_answers_what_waits_and_ends_the_thread() -> None:
    async def main() -> None:
        model = Model()
        batches = batcher(model)
        jobs = [submit(batches, "e", [i]) for i in range(30)]
        await asyncio.sleep(0)
        await batches.stop()
        await asyncio.sleep(0)
        expected = [[2 * i] for i in range(30)]
        assert [job.result() for job in jobs] == expected
        await asyncio.sleep(0.05)
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("unidec-model")
        ]

    asyncio.run(main())


def test_an_engine_is_let_go_when_its_last_request_is_answered() -> None:
    class Engine:
        pass

    async def main() -> None:
        model = Model()
        batches = Batcher(
            lambda engine, queries: [0] * len(queries),
            batch_queries=8,
            queue_queries=9,
            wait_seconds=0.0,
            timeout_seconds=60.0,
        )
        engine = Engine()
        gone = weakref.ref(engine)
        await submit(batches, engine, [1, 2])
        del engine
        for _ in range(100):
            gc.collect()
            if gone() is None:
                break
            await asyncio.sleep(0.01)
        assert gone() is None
        assert model.batches == []
        await batches.stop()

    asyncio.run(main())


def test_is_stuck_tells_how_long_one_batch_takes() -> None:
    async def main() -> None:
        model = Model()
        model.gate.clear()
        batches = batcher(model)
        assert not batches.is_stuck(0.0)
        job = submit(batches, "e", [1])
        await begun(model)
        await asyncio.sleep(0.02)
        assert batches.is_stuck(0.01) and not batches.is_stuck(30)
        model.gate.set()
        await job
        assert not batches.is_stuck(0.0)
        await batches.stop()

    asyncio.run(main())
