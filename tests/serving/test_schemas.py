"""Requests: what is read, what is refused, and what the error holds."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unidec.config import Serve
from unidec.data.tokens import is_blank
from unidec.serving import schemas
from unidec.serving.request_error import RequestError, shown

MANY_VALUES = [
    f'{{"queries":[{",".join(values)}]}}'
    for values in (['{"a":1}'] * 120_000, ["[]"] * 320_000, ["10"] * 320_000)
] + [json.dumps({str(i): 0 for i in range(80_000)})]
MODELS = schemas.request_models(
    Serve(max_queries=3, max_query_chars=10, max_k=7, max_filter_labels=4)
)


def parsed(value: Any, model: Any = MODELS.predict) -> Any:
    return schemas.parse_request(
        model, value if isinstance(value, bytes) else json.dumps(value).encode()
    )


def refusal(value: Any, model: Any = MODELS.predict) -> tuple[int, dict[str, str]]:
    with pytest.raises(RequestError) as caught:
        parsed(value, model)
    error = caught.value
    assert json.loads(error.body()) == {"error": error.parts}
    assert len(error.body()) < 4000
    assert error.parts["what"] and error.parts["fix"], "it names what is wrong and the fix"
    return error.status, error.parts


def test_what_is_not_given_has_its_default() -> None:
    asked = parsed({"queries": ["a"]})
    assert asked.k == 5
    assert asked.allow is None
    assert asked.deny == []
    assert asked.min_score is None
    assert asked.head == "both"
    assert parsed({"queries": ["a"]}, schemas.request_models(Serve(max_k=2)).predict).k == 2, (
        "never above max_k"
    )


@pytest.mark.parametrize(
    ("more", "where", "expected"),
    [
        ({"queries": []}, "queries", "at least 1"),
        ({"queries": ["a"] * 4}, "queries", "at most 3"),
        ({"queries": "a"}, "queries", "list"),
        ({"queries": ["a", 1]}, "queries[1]", "string"),
        ({"queries": ["a", None]}, "queries[1]", "string"),
        ({"queries": [" \t\n\u3000"]}, "queries[0]", "a text that is not blank"),
        ({"queries": [""]}, "queries[0]", "a text that is not blank"),
        ({"queries": ["a", "\u200b\ufeff"]}, "queries[1]", "a text that is not blank"),
        ({"queries": ["\x00"]}, "queries[0]", "a text that is not blank"),
        ({"queries": ["x" * 11]}, "queries[0]", "at most 10 characters"),
        ({"k": 0}, "k", "equal to 1"),
        ({"k": 8}, "k", "equal to 7"),
        ({"k": 10**30}, "k", "integer"),
        ({"k": True}, "k", "integer"),
        ({"k": "5"}, "k", "integer"),
        ({"k": 2.5}, "k", "integer"),
        ({"k": 8.0}, "k", "equal to 7"),
        ({"allow": ["a", 1]}, "allow[1]", "string"),
        ({"allow": ["a"] * 5}, "allow", "at most 4"),
        ({"deny": [""]}, "deny[0]", "at least 1 character"),
        ({"deny": {"a": 1}}, "deny", "list"),
        ({"min_score": "1"}, "min_score", "number"),
        ({"head": "both "}, "head", "'both', 'de' or 'clf'"),
        ({"head": None}, "head", "'both', 'de' or 'clf'"),
        ({"querys": 1}, "querys", "a key of this route"),
    ],
)
def test_every_wrong_value_is_named_with_what_was_expected(
    more: dict[str, Any], where: str, expected: str
) -> None:
    status, parts = refusal({"queries": ["a"]} | more)
    assert (status, parts["where"]) == (422, where), parts
    assert expected in parts["expected"], parts


def test_what_was_got_is_shown_short() -> None:
    assert refusal({"queries": [["x" * 10**6]]})[1]["got"].endswith("characters)")
    got = refusal({"queries": ["a"], "deny": {str(i): i for i in range(1000)}})[1]["got"]
    assert got == "an object of 1000 entries"
    assert refusal({"queries": ["a"] * 99})[1]["got"] == "99"
    assert refusal({"queries": ["y" * 5000]})[1]["got"].endswith("... (5000 characters)")
    assert refusal({"queries": ["a"], "k" + "y" * 10**5: 1})[1]["where"].endswith("characters)")
    assert refusal([1])[1]["got"] == "[1]"
    assert refusal(None)[1]["got"] == "null"
    assert refusal({"k": 3})[1]["got"] == "nothing"
    assert shown("a\x00\n\u202e\ud800b") == "a\\x00\\n\\u202e\\ud800b", (
        "nothing that moves a terminal's cursor"
    )


def test_several_mistakes_are_counted() -> None:
    assert refusal({"queries": ["a"], "k": 0, "head": 1, "x": 2})[1]["what"].endswith(
        "(and 2 more)"
    )


def test_one_query_is_explained() -> None:
    assert parsed({"query": "a"}, MODELS.explain).query == "a"
    assert refusal({"queries": ["a"]}, MODELS.explain)[1]["where"] == "query"
    assert "string" in refusal({"query": ["a"]}, MODELS.explain)[1]["expected"]


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "line 1, column 1"),
        (b'{"queries":\n["a"}', "line 2, column 5"),
        (b'{"min_score": NaN}', "line 1, column 15"),
        (b'{"min_score": -Infinity}', None),
        (b'{"queries": ["\xff"]}', None),
        (b'{"queries": ["\\ud800"]}', None),
        (b"\xff\xfe[\x00]\x00", None),
        (b"[" * 500_000, None),
        (b'{"a":' * 100_000, None),
        (b'"\x00"', None),
        (json.dumps({str(i): 1 for i in range(60)}).encode(), "body"),
        (b'{"queries": [' + b"{}," * 10_000, "body"),
    ],
)
def test_broken_json_is_named_with_its_place(body: bytes, where: str | None) -> None:
    status, parts = refusal(body)
    assert status == 400, parts
    assert where in (None, parts["where"]), parts


def test_a_number_of_a_million_digits_and_a_million_keys_cost_little() -> None:
    began = time.perf_counter()
    for body in ("1" * 10**6, "-1e" + "9" * 10**6, *MANY_VALUES):
        refusal(body.encode())
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize("body", MANY_VALUES, ids=lambda body: body[:18])
def test_more_values_than_any_request_has_are_not_read(body: str) -> None:
    """The memory of 300,000 lists is not given back where answers of other requests are kept in
    between.
    """
    data = body.encode()
    tracemalloc.start()
    try:
        status, parts = refusal(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, parts["where"]) == (400, "body")
    assert peak < 1e6


def test_a_request_at_its_limits_is_read_whatever_its_texts_hold() -> None:
    models = schemas.request_models(Serve())
    labels = [f'L"[{i}' for i in range(10_000)]
    what = {
        "queries": ['[{,"\\' * 1600] * 256,
        "allow": labels,
        "deny": labels,
    }
    asked = parsed(what, models.predict)
    assert asked.queries == what["queries"]
    assert asked.allow == labels
    assert asked.deny == labels
    assert refusal(what | {"deny": [*labels, "x"]}, models.predict)[1]["where"] == "deny", (
        "named where it is one more"
    )


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_other_json_is_refused(value: Any) -> None:
    assert refusal(value)[0] in (400, 422)  # no such value has `queries`


def test_the_schema_says_which_characters_are_invisible() -> None:
    """The pattern of a query and `is_blank` agree on each character of the basic plane."""
    visible = re.compile(f"[^{schemas.INVISIBLE}]")
    for character in map(chr, range(0x10000)):
        assert (visible.search(character) is None) == is_blank(character), repr(character)
