"""Routes over a stub engine: what answers hold, whose they are, what is kept, counted
and dropped.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import asgi
from helpers.asgi import run

from unidec.bundle.text_file import read_window
from unidec.config import Serve
from unidec.serving.engine import Service


def test_each_query_gets_its_own_labels_in_order() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine()) as server:
            reply = await server.predict("one", "two", k=2)
            assert reply.status == 200 and reply.headers["content-type"] == "application/json"
            assert int(reply.headers["content-length"]) == len(reply.body)
            parts = {"probability": None, "de": 1.0, "clf": None, "knn": None}
            label = {"uid": "one-0", "title": "t", "score": 1.0, **parts}
            one, two = reply.json["predictions"]
            assert one["labels"] == [label, label | {"uid": "one-1"}]
            uids = [label["uid"] for label in two["labels"]]
            assert uids == ["two-0", "two-1"]
            assert (one["unknown_tokens"], one["unknown_filters"]) == (1, 0)
            model = reply.json["model"]
            assert model == {"sha256": "a" * 64, "version": "a"}

    run(main)


def test_feedback_is_checked_bounded_and_read_by_the_monitor(tmp_path: Path) -> None:
    path = tmp_path / "feedback.jsonl"

    async def main() -> None:
        async with asgi.running(asgi.StubEngine()) as server:
            assert (await server.ask("/feedback", {})).status == 404
            assert not path.exists()
            assert (await server.ask("/card")).json["feedback"] is False
        async with asgi.running(
            asgi.StubEngine(), feedback=str(path), feedback_bytes=600, max_query_chars=40
        ) as server:
            assert (await server.ask("/card")).json["feedback"] is True
            mark = {"query": "red\ncar", "label": "L1", "relevant": True}
            assert (await server.ask("/feedback", mark)).json == {"kept": True}
            assert (
                await server.ask("/feedback", mark | {"label": "L2", "relevant": False})
            ).status == 200
            before = path.read_bytes()
            for wrong, status in (
                ({"label": "no such"}, 404),
                ({"query": " "}, 422),
                ({"query": "x" * 41}, 422),
                ({"relevant": 1}, 422),
                ({"label": ""}, 422),
                ({"label": ["L1"]}, 422),
                ({"more": 1}, 422),
                ({"k": 5}, 422),
            ):
                assert (await server.ask("/feedback", mark | wrong)).status == status, wrong
            plain = await server.ask("/feedback", b"x", headers={"content-type": "text/plain"})
            assert plain.status == 415 and path.read_bytes() == before
            statuses = {(await server.ask("/feedback", mark)).status for _ in range(5)}
            assert statuses == {200, 507}
            assert 400 < path.stat().st_size <= 600
            assert path.stat().st_mode & 0o777 == 0o600
        async with asgi.running(
            asgi.StubEngine(), feedback=str(tmp_path / "no" / "such.jsonl")
        ) as server:
            reply = await server.ask("/feedback", mark)
            assert reply.status == 507
            assert "No such file" in reply.json["error"]["got"]

    run(main)
    first = json.loads(path.read_text().splitlines()[0])
    assert first.pop("at").endswith("+00:00")
    assert first.pop("bundle") == "a" * 64
    assert first == {"query": "red\ncar", "label": "L1", "relevant": True}
    window = read_window(path)
    assert window.texts == ["red\ncar"]
    assert window.labels == [["L1"]]


def test_no_model_yet_is_503_with_retry_after() -> None:
    async def main() -> None:
        async with asgi.running() as server:
            for path in ("/readyz", "/version", "/card", "/labels", "/labels/L1"):
                reply = await server.ask(path)
                assert reply.status == 503, path
                assert reply.headers["retry-after"] == "1", path
                assert reply.json["error"]["what"] == "no model is loaded yet"
            assert (await server.predict("a")).status == 503
            assert (await server.ask("/healthz")).json == {"status": "alive"}
            assert (await server.ask("/readyz")).json["ready"] is False
            server.service.swap(asgi.StubEngine())
            ready = await server.ask("/readyz")
            assert ready.status == 200
            assert ready.json["model"]["sha256"] == "a" * 64

    run(main)


def test_a_request_is_answered_wholly_by_the_engine_that_was_there_when_it_came() -> None:
    async def main() -> None:
        old = asgi.StubEngine("a", 1.0)
        new = asgi.StubEngine("b", 2.0)
        async with asgi.running(old, batch_queries=2) as server:
            old.gate.clear()
            asked = [
                asyncio.ensure_future(server.predict(*(f"q{i}-{j}" for j in range(5))))
                for i in range(4)
            ]
            await asyncio.sleep(0.05)
            server.service.swap(new)
            asked += [
                asyncio.ensure_future(server.predict(*(f"r{i}-{j}" for j in range(5))))
                for i in range(4)
            ]
            await asyncio.sleep(0.05)
            old.gate.set()
            for reply in await asyncio.gather(*asked):
                score = {"a" * 64: 1.0, "b" * 64: 2.0}[reply.json["model"]["sha256"]]
                scores = {
                    label["score"]
                    for query in reply.json["predictions"]
                    for label in query["labels"]
                }
                assert scores == {score}
            versions = [reply.json["model"]["version"] for reply in await asyncio.gather(*asked)]
            assert versions == ["a"] * 4 + ["b"] * 4
            server.service.swap_back()
            assert (await server.predict("x")).json["model"]["version"] == "a"

    run(main)


def test_an_answer_is_kept_for_its_request_and_its_model_alone() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine) as server:
            first = await server.predict("a", "b")
            again = await server.predict("b", "c", "a")
            assert engine.batches == [["a", "b"], ["c"]]
            assert [query["labels"][0]["uid"] for query in again.json["predictions"]] == [
                "b-0",
                "c-0",
                "a-0",
            ]
            expected = first.json["predictions"][1]
            assert again.json["predictions"][0] == expected
            for more in (
                {"k": 2},
                {"deny": ["L1"]},
                {"allow": ["L1"]},
                {"min_score": 0.5},
                {"head": "de"},
            ):
                before = len(engine.batches)
                await server.predict("a", **more)
                assert len(engine.batches) == before + 1, more
            assert (
                server.figure("unidec_cache_hits_total"),
                server.figure("unidec_cache_misses_total"),
            ) == (2, 8)
            other = asgi.StubEngine("b", 2.0)
            server.service.swap(other)
            assert (await server.predict("a")).json["predictions"][0]["labels"][0]["score"] == 2.0
            server.service.swap(engine)
            before = len(engine.batches)
            assert (await server.predict("a")).json["predictions"][0]["labels"][0]["score"] == 1.0
            assert len(engine.batches) == before, "kept from before"

    run(main)


def test_without_a_cache_each_is_answered_anew() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine, cache_queries=0) as server:
            for _ in range(3):
                await server.predict("a")
            assert engine.batches == [["a"]] * 3
            assert server.figure("unidec_cache_hits_total") == 0

    run(main)


def test_what_the_bundle_cannot_do_is_a_422_before_it_is_queued() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine) as server:
            reply = await server.predict("a", head="clf")
            assert reply.status == 422
            assert reply.json["error"]["expected"] == "both, de"
            assert reply.json["error"]["fix"] and engine.batches == []

    run(main)


def test_a_query_that_breaks_the_model_fails_alone_and_says_nothing_of_the_inside(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine) as server:
            engine.gate.clear()
            asked = [asyncio.ensure_future(server.predict("first"))]
            await asyncio.sleep(0.05)
            asked += [asyncio.ensure_future(server.predict(text)) for text in ("a", "poison", "b")]
            await asyncio.sleep(0.05)
            engine.gate.set()
            replies = await asyncio.gather(*asked)
            assert [reply.status for reply in replies] == [200, 200, 500, 200]
            assert (
                "poisoned" not in replies[2].body.decode()
                and "Traceback" not in replies[2].body.decode()
            )
            assert replies[2].json["error"]["fix"]
            assert server.figure("unidec_errors_total", kind="internal") == 1

    run(main)
    assert "poisoned" in caplog.text, "the log says it"


def test_overload_is_503_and_recovers() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine, queue_queries=4) as server:
            engine.gate.clear()
            asked = [asyncio.ensure_future(server.predict("first"))]
            await asyncio.sleep(0.05)
            asked += [asyncio.ensure_future(server.predict(f"q{i}")) for i in range(10)]
            await asyncio.sleep(0.05)
            assert server.figure("unidec_queue_queries") == 4
            engine.gate.set()
            replies = await asyncio.gather(*asked)
            expected = [200] * 5 + [503] * 6
            assert sorted(reply.status for reply in replies) == expected
            refused = next(reply for reply in replies if reply.status == 503)
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json["error"]["what"] == "too many queries waiting"
            assert server.figure("unidec_errors_total", kind="overload") == 6
            assert (await server.predict("later")).status == 200
            assert server.figure("unidec_queue_queries") == 0

    run(main)


def test_a_late_answer_is_503() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine, timeout_seconds=0.1) as server:
            engine.gate.clear()
            reply = await server.predict("a", "b")
            assert reply.status == 503
            assert reply.json["error"]["what"] == "no answer in time"
            engine.gate.set()
            assert server.figure("unidec_errors_total", kind="timeout") == 1

    run(main)


def test_a_client_that_goes_leaves_the_queue() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine) as server:
            engine.gate.clear()
            first = asyncio.ensure_future(server.predict("first"))
            await asyncio.sleep(0.05)
            leaves = asyncio.Event()
            gone = asyncio.ensure_future(
                server.ask("/predict", {"queries": ["gone"]}, leaves=leaves)
            )
            await asyncio.sleep(0.05)
            leaves.set()
            assert (await gone).status == 0, "nothing is sent"
            engine.gate.set()
            assert (await first).status == 200
            assert engine.batches == [["first"]]
            assert server.figure("unidec_errors_total", kind="client_gone") == 1

    run(main)


def test_labels_are_found_by_uid_and_by_how_they_begin() -> None:
    async def main() -> None:
        from unidec.serving.engine import LabelSearch

        engine = asgi.StubEngine()
        engine.labels = LabelSearch(engine.bundle.uids, engine.bundle.titles)
        async with asgi.running(engine) as server:
            assert (await server.ask("/labels/L3")).json == {
                "uid": "L3",
                "title": "title 3",
                "row": 3,
            }
            missing = await server.ask("/labels/no/such")
            assert missing.status == 404
            assert missing.json["error"]["got"] == "no/such"
            found = await server.ask("/labels", query="prefix=TITLE%201&limit=3")
            assert [label["uid"] for label in found.json["labels"]] == [
                "L1",
                "L10",
                "L11",
            ]
            assert found.json["more"]
            for query, where in (
                ("limit=51", "query.limit"),
                ("limit=a", "query.limit"),
                (f"prefix={'x' * 201}", "query.prefix"),
            ):
                wrong = await server.ask("/labels", query=query)
                assert wrong.status == 422
                assert wrong.json["error"]["where"] == where
                assert wrong.json["error"]["fix"]

    run(main)


def test_paths_and_methods_that_are_none() -> None:
    async def main() -> None:
        async with asgi.running(asgi.StubEngine()) as server:
            for path in ("/nope", "/predict/", "/labels/../x/..", "//", "/docs", "/page/../run.py"):
                reply = await server.ask(path)
                assert reply.status == 404
                assert set(reply.json["error"]) == {
                    "what",
                    "where",
                    "got",
                    "expected",
                    "fix",
                }
            reply = await server.ask("/predict")
            assert reply.status == 405
            assert reply.headers["allow"] == "POST"
            assert reply.json["error"]["got"] == "GET"
            assert (await server.ask("/healthz", method="PATCH")).status == 405
            assert server.figure("unidec_requests_total", route="other", status="404") >= 4

    run(main)


def test_the_state_of_following_is_in_the_version() -> None:
    async def main() -> None:
        service = Service(Serve())
        service.follower = SimpleNamespace(state=lambda: {"registry": "up"})
        async with asgi.running(asgi.StubEngine(), service=service) as server:
            version = (await server.ask("/version")).json
            assert (
                version["follow"]
                == (await server.ask("/readyz")).json["follow"]
                == {"registry": "up"}
            )
            assert version["previous"] is None

    run(main)


def test_the_figures_say_what_happened() -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine) as server:
            await server.predict("a", "b")
            await server.predict("a", min_score=1.0)
            await server.predict("a", k=-1)
            page = (await server.ask("/metrics")).body.decode()
            assert (
                f'unidec_model_info{{alias="",name="m",runtime="stub",sha256="{"a" * 64}"' in page
            )
            for line in (
                'unidec_requests_total{route="/predict",status="200"} 2.0',
                "unidec_queries_total 3.0",
                'unidec_requests_total{route="/predict",status="422"} 1.0',
                "unidec_tokens_total 9.0",
                'unidec_errors_total{kind="wrong_value"} 1.0',
                "unidec_unknown_tokens_total 3.0",
                "unidec_best_score_count 2.0",
                "unidec_batch_queries_sum 3.0",
                "unidec_batch_queries_count 2.0",
                "unidec_ready 1.0",
                "unidec_model_labels 30.0",
                "unidec_queue_queries 0.0",
            ):
                assert line in page, line
            assert "unidec_in_flight_requests 1.0" in page, "the one that asks for them"
            assert (
                'unidec_request_seconds_count{route="/predict"} 3.0' in page
                and "process_resident_memory" in page
            )

    run(main)


def test_a_model_that_does_not_come_back_is_not_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        engine = asgi.StubEngine()
        async with asgi.running(engine, timeout_seconds=0.01) as server:
            monkeypatch.setattr("unidec.serving.routes.STUCK_SECONDS", 0.05)
            engine.gate.clear()
            asked = asyncio.ensure_future(server.predict("a"))
            await asyncio.sleep(0.02)
            assert (await server.ask("/healthz")).status == 200
            await asyncio.sleep(0.2)
            assert (await server.ask("/healthz")).status == 503
            engine.gate.set()
            assert (await asked).status == 503

    run(main)
