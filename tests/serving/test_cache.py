"""Answers kept: the least recent goes first, within bounds of number and bytes."""

from __future__ import annotations

import random

from unidec.serving.cache import BYTES_EACH, AnswerCache


def test_the_least_recently_asked_goes_first() -> None:
    cache = AnswerCache(2)
    cache.put("a", 1, 10)
    cache.put("b", 2, 10)
    assert cache.get("a") == 1
    cache.put("c", 3, 10)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)
    cache.put("a", 4, 10)
    assert cache.get("a") == 4 and len(cache) == 2


def test_bytes_are_bounded_and_large_answers_are_not_kept() -> None:
    cache = AnswerCache(100)
    cache.put("large", 0, cache.largest)
    assert cache.get("large") is None
    for i in range(1000):
        cache.put(i, i, cache.largest // 2)
        assert cache.num_bytes <= 100 * BYTES_EACH
    assert 0 < len(cache) < 100 and cache.get(999) == 999


def test_as_a_plain_list_would_do_it() -> None:
    rng, cache, kept = random.Random(0), AnswerCache(5), []
    for step in range(3000):
        key = rng.randrange(8)
        known = next((value for name, value in kept if name == key), None)
        if rng.random() < 0.5:
            assert cache.get(key) == known
            kept = [entry for entry in kept if entry[0] != key] + ([(key, known)] if known is not None else [])
        else:
            cache.put(key, step + 1, 1)
            kept = ([entry for entry in kept if entry[0] != key] + [(key, step + 1)])[-5:]
    assert len(cache) == len(kept)


def test_none_are_kept_where_there_is_no_room() -> None:
    cache = AnswerCache(0)
    cache.put("a", 1, 1)
    assert cache.get("a") is None and cache.num_bytes == 0
