"""The serving benchmark refuses figures that would flatter: cached answers, failures, servers that
answer otherwise.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def serving(benchmark_module):
    return benchmark_module("serving")


@pytest.fixture
def load(benchmark_module):
    return benchmark_module("http_load")


def test_what_the_cache_answered_is_refused(serving):
    served = SimpleNamespace(metrics=lambda: {serving.HITS: 5.0})
    serving.uncached(served, {serving.HITS: 5.0})
    with pytest.raises(SystemExit, match="2 answers came from the cache"):
        serving.uncached(served, {serving.HITS: 3.0})


def test_failures_are_no_throughput(serving, load):
    measured = load.Measured()
    measured.take(load.Answer(200), 1.0)
    serving.all_well(measured, "x")
    measured.take(load.Answer(503, b"", b"full"), 1.0)
    with pytest.raises(SystemExit, match=r"x: .*503: 1.*full"):
        serving.all_well(measured, "x")
    measured.seconds = 2.0
    assert measured.rate == 0.5


def test_queries_never_come_twice(serving, monkeypatch):
    titles = {"test": ["red car", "blue boat now", "old house here"], "validation": ["warm one"]}
    monkeypatch.setattr(serving, "split_titles", lambda dataset, split: titles[split])
    queries = serving.Queries(None, 7)
    bodies = [json.loads(next(queries).partition(b"\r\n\r\n")[2]) for _ in range(8)]
    bodies.append(json.loads(queries.of(3).partition(b"\r\n\r\n")[2]))
    texts = [text for body in bodies for text in body["queries"]]
    assert len(texts) == len(set(texts)) == 11
    assert set(titles["test"]) <= set(texts)
    assert {body["k"] for body in bodies} == {7}


def test_servers_that_answer_otherwise_are_not_compared(serving, monkeypatch):
    answers = {"a": "L1", "b": "L2"}

    def labels(coroutine):
        coroutine.close()
        return [[{"uid": answers[order.pop(0)]}]] * 10

    order = ["a", "a"]
    monkeypatch.setattr(serving, "run", labels)
    serving.same_answers({"x": None, "y": None}, [b""] * 10)
    order[:] = ["a", "b"]
    with pytest.raises(SystemExit, match="x and y answer 10 of 10"):
        serving.same_answers({"x": None, "y": None}, [b""] * 10)


def test_a_mode_that_is_none_is_said(serving, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["serving.py", "--modes", "latency,fast"])
    with pytest.raises(SystemExit):
        serving.main()
    assert "no such mode: fast" in capsys.readouterr().err
