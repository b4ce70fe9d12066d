"""Labels by how they begin, against a slow search."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unidec.serving import labels
from unidec.serving.labels import LabelSearch


def slow(uids: list[str], titles: list[str], beginning: str) -> list[str]:
    wanted = beginning.lower()
    first = [
        u for u, t in zip(uids, titles, strict=True) if u.lower().startswith(wanted) or t.lower().startswith(wanted)
    ]
    words = [u for u, t in zip(uids, titles, strict=True) if f" {wanted}" in t.lower() and u not in first]
    return first + words * bool(wanted)


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_those_that_begin_so_then_those_with_a_word_that_does(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "_ROWS", at_once)
    rng = np.random.default_rng(0)
    words = ["Vim", "vi", "editor", "É", "éa", "x.y", "a%b", "mode", "%"]
    titles = [" ".join(rng.choice(words, rng.integers(0, 4))) for _ in range(60)]
    uids = [f"{rng.choice(words)}/{i}" for i in range(60)]
    search = LabelSearch(SimpleNamespace(uids=pa.array(uids), titles=pa.array(titles)))  # type: ignore[arg-type]
    for beginning in ("", "v", "VI", "vim", "é", "%", "x.", "editor mode", " ", "nothing", "vim/1", "a%b/"):
        wanted = slow(uids, titles, beginning)
        for limit in (1, 2, 5, 60):
            found, more = search.find(beginning, limit)
            assert [label["uid"] for label in found] == wanted[:limit], (beginning, limit)
            assert more == (len(wanted) > limit)
            assert all(label["title"] == titles[uids.index(label["uid"])] for label in found)


def test_one_label(helper: Any) -> None:
    search = LabelSearch(SimpleNamespace(uids=pa.array(["a"]), titles=pa.array([""])))  # type: ignore[arg-type]
    assert search.find("", 5) == ([{"uid": "a", "title": ""}], False)
    assert search.find("b", 5) == ([], False)
