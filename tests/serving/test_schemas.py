"""Requests: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidec.sections import Serve
from unidec.serving import schemas
from unidec.serving.errors import RequestError, shown

MODELS = schemas.request_models(Serve(max_queries=3, max_query_chars=10, max_k=7, max_filter_labels=4))


def refusal(value: Any, model: Any = MODELS.predict) -> tuple[int, dict[str, str]]:
    with pytest.raises(RequestError) as caught:
        schemas.check(model, value)
    error = caught.value
    assert json.loads(error.body()) == {"error": error.parts} and len(error.body()) < 4000
    assert error.parts["what"] and error.parts["fix"], "it says what is wrong and how to mend it"
    return error.status, error.parts


def test_what_is_not_given_has_its_default() -> None:
    asked = schemas.check(MODELS.predict, {"queries": ["a"]})
    assert (asked.k, asked.allow, asked.deny, asked.min_score, asked.head) == (5, None, [], None, "both")
    assert schemas.check(schemas.request_models(Serve(max_k=2)).predict, {"queries": ["a"]}).k == 2, "never above max_k"
    assert schemas.check(MODELS.predict, {"queries": ["a"], "k": 6.0}).k == 6, "an integer, says JSON Schema"


@pytest.mark.parametrize(
    ("more", "where", "expected"),
    [
        ({"queries": []}, "queries", "at least 1"),
        ({"queries": ["a"] * 4}, "queries", "at most 3"),
        ({"queries": "a"}, "queries", "a list"),
        ({"queries": ["a", 1]}, "queries[1]", "a string"),
        ({"queries": ["a", None]}, "queries[1]", "a string"),
        ({"queries": [" \t\n\u3000"]}, "queries[0]", "at least one character that is no space"),
        ({"queries": [""]}, "queries[0]", "at least one character that is no space"),
        ({"queries": ["x" * 11]}, "queries[0]", "at most 10 characters"),
        ({"queries": ["\ud800"]}, "queries[0]", "no lone surrogates (\\ud800 to \\udfff)"),
        ({"k": 0}, "k", "at least 1"),
        ({"k": 8}, "k", "at most 7"),
        ({"k": 10**30}, "k", "at most 7"),
        ({"k": True}, "k", "an integer"),
        ({"k": "5"}, "k", "an integer"),
        ({"k": 2.5}, "k", "an integer"),
        ({"k": float("inf")}, "k", "an integer"),
        ({"k": 1e300}, "k", "at most 7"),
        ({"allow": ["a", 1]}, "allow[1]", "a string"),
        ({"allow": ["a"] * 5}, "allow", "at most 4"),
        ({"deny": ["\udfff"]}, "deny[0]", "no lone surrogates (\\ud800 to \\udfff)"),
        ({"deny": [""]}, "deny[0]", "at least one character"),
        ({"deny": {"a": 1}}, "deny", "a list"),
        ({"min_score": float("inf")}, "min_score", "a finite number"),
        ({"min_score": float("nan")}, "min_score", "a finite number"),
        ({"min_score": 10**400}, "min_score", "a number"),
        ({"min_score": "1"}, "min_score", "a number"),
        ({"head": "both "}, "head", "'both', 'de' or 'clf'"),
        ({"head": None}, "head", "'both', 'de' or 'clf'"),
        ({"querys": 1}, "querys", "a key of this route: see /openapi.json"),
    ],
)
def test_every_wrong_value_is_named_with_what_was_expected(more: dict[str, Any], where: str, expected: str) -> None:
    status, parts = refusal({"queries": ["a"]} | more)
    assert (status, parts["where"], parts["expected"]) == (422, where, expected)


def test_what_was_got_is_shown_short() -> None:
    assert refusal({"queries": [["x" * 10**6]]})[1]["got"].endswith("characters)")
    assert (
        refusal({"queries": ["a"], "deny": {str(i): i for i in range(1000)}})[1]["got"] == "an object of 1000 entries"
    )
    assert refusal({"queries": ["a"] * 99})[1]["got"] == "99 entries"
    assert refusal({"queries": ["y" * 5000]})[1]["got"] == "5000 characters"
    assert refusal({"queries": ["a"], "k" + "y" * 10**5: 1})[1]["where"].endswith("characters)")
    assert refusal([1])[1]["got"] == "[1]" and refusal(None)[1]["got"] == "null"
    assert shown("a\x00\n\u202e\ud800b") == "a\\x00\\x0a\\u202e\\ud800b", "nothing that moves a terminal's cursor"


def test_several_mistakes_are_counted() -> None:
    assert refusal({"queries": ["a"], "k": 0, "head": 1, "x": 2})[1]["what"].endswith("(and 2 more)")


def test_one_query_is_explained() -> None:
    assert schemas.check(MODELS.explain, {"query": "a"}).query == "a"
    assert refusal({"queries": ["a"]}, MODELS.explain)[1]["where"] == "query"
    assert refusal({"query": ["a"]}, MODELS.explain)[1]["expected"] == "a string"


@pytest.mark.parametrize(
    ("body", "where", "got"),
    [
        (b"", "line 1, column 1", "its end"),
        (b'{"queries":\n["a"}', "line 2, column 5", "}"),
        (b'{"queries": ["a"], "queries": ["b"]}', "body", 'the key "queries" stands twice'),
        (b'{"queries": ["a"], "qu\\u0065ries": ["b"]}', "body", 'the key "queries" stands twice'),
        (b'{"min_score": NaN}', "body", "NaN is no JSON number"),
        (b'{"min_score": -Infinity}', "body", "-Infinity is no JSON number"),
        (b'{"queries": ["\xff"]}', "byte 14", ""),
        (b"\xff\xfe[\x00]\x00", "byte 0", ""),
        (b"[" * 16_000, "body", ""),
        (b'{"a":' * 3_000, "body", ""),
        (b"[" * 100_000, "body", "more than 1000 lists, objects and keys"),
        (b'{"a":' * 100_000, "body", "more than 1000 lists, objects and keys"),
        (b'"\x00"', "line 1, column 2", '\\x00"'),
    ],
)
def test_broken_json_is_named_with_its_place(body: bytes, where: str, got: str) -> None:
    with pytest.raises(RequestError) as caught:
        schemas.read_json(body)
    assert (caught.value.status, caught.value.parts["where"], caught.value.parts["got"]) == (400, where, got)


def test_a_number_of_a_million_digits_and_a_million_keys_cost_little() -> None:
    began = time.perf_counter()
    keys = ",".join(f'"{i}":0' for i in range(80_000))
    objects = ",".join(['{"a":1}'] * 120_000)
    for body in (b"1" * 10**6, b"-1e" + b"9" * 10**6, f"{{{keys}}}".encode(), f'{{"queries":[{objects}]}}'.encode()):
        with pytest.raises(RequestError):
            schemas.check(MODELS.predict, schemas.read_json(body))
    assert time.perf_counter() - began < 5
    for body, got in (
        (f"{{{keys}}}", "more than 1000 lists, objects and keys"),
        ('{"queries":[' + ",".join(['{"a":1}'] * 200) + "]}", "more objects or keys than any request has"),
    ):
        with pytest.raises(RequestError) as caught:
            schemas.read_json(body.encode())
        assert caught.value.parts["got"] == got


PIECES = st.sampled_from(["[", "]", "{", "}", ":", '"', "\\", '\\"', "\\\\", ",", "x", "é", " "])


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, max_size=60).map("".join), st.integers(1, 20), st.integers(1, 7))
def test_parts_are_counted_outside_of_strings_only(text: str, most: int, block: int) -> None:
    within, escaped, num_parts = False, False, 0
    for letter in text:
        num_parts += not within and letter in "[{:"
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter == '"':
            within = not within
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemas, "MAX_PARTS", most)
        patch.setattr(schemas, "LOOKED_AT_FROM", block)
        many = schemas._has_many_parts(text.encode())
    assert many == (num_parts > most)


def test_a_large_request_whose_texts_hold_marks_is_read() -> None:
    value = {"queries": ['[{:"' * 1000] * 20, "allow": [f"L:{i}" for i in range(2000)]}
    assert schemas.read_json(json.dumps(value).encode()) == value


@settings(max_examples=60, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8))  # fmt: skip
def test_any_json_is_read_as_pythons_json_reads_it_or_refused(value: Any) -> None:
    body = json.dumps(value).encode()
    try:
        assert schemas.read_json(body) == value
    except RequestError:
        assert "NaN" in body.decode() or "Infinity" in body.decode()
    with pytest.raises(RequestError) as caught:  # no such value has `queries`
        schemas.check(MODELS.predict, value)
    assert len(caught.value.body()) < 4000
