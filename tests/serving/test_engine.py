"""What answers: engines, the service and labels found by prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from unidec.errors import ArtifactError
from unidec.sections import Serve
from unidec.serving.engine import Engine, Identity, LabelSearch, Service


def test_another_bundle_than_the_registry_names_is_refused(tmp_path: Path, helper: Any) -> None:
    with pytest.raises(ArtifactError, match="another bundle"):
        Engine.load(helper("served_bundle").make_served_bundle(tmp_path), Serve(), Identity("0" * 64, "m", "1"))


def test_the_previous_engine_is_kept_or_freed(helper: Any) -> None:
    asgi = helper("serving/asgi")
    old, new = asgi.StubEngine("a"), asgi.StubEngine("b")
    for keep in (True, False):
        service = Service(Serve(keep_previous=keep))
        service.swap(old)
        service.swap(new)
        assert (service.current, service.previous) == (new, old if keep else None)
        if keep:
            service.swap_back()
            assert (service.current, service.previous) == (old, new)


# -- labels found by prefix, against a slow search


def slow(uids: list[str], titles: list[str], beginning: str) -> list[str]:
    wanted = beginning.lower()
    first = [
        u for u, t in zip(uids, titles, strict=True) if u.lower().startswith(wanted) or t.lower().startswith(wanted)
    ]
    words = [u for u, t in zip(uids, titles, strict=True) if f" {wanted}" in t.lower() and u not in first]
    return first + words * bool(wanted)


def test_those_that_begin_so_then_those_with_a_word_that_does() -> None:
    rng = np.random.default_rng(0)
    words = ["Vim", "vi", "editor", "É", "éa", "x.y", "a%b", "mode", "%"]
    titles = [" ".join(rng.choice(words, rng.integers(0, 4))) for _ in range(60)]
    uids = [f"{rng.choice(words)}/{i}" for i in range(60)]
    search = LabelSearch(pa.array(uids), pa.array(titles))
    for beginning in ("", "v", "VI", "vim", "é", "%", "x.", "editor mode", " ", "nothing", "vim/1", "a%b/"):
        wanted = slow(uids, titles, beginning)
        for limit in (1, 2, 5, 60):
            found, more = search.find(beginning, limit)
            assert [label["uid"] for label in found] == wanted[:limit], (beginning, limit)
            assert more == (len(wanted) > limit)
            assert all(label["title"] == titles[uids.index(label["uid"])] for label in found)


def test_one_label() -> None:
    search = LabelSearch(pa.array(["a"]), pa.array([""]))
    assert search.find("", 5) == ([{"uid": "a", "title": ""}], False)
    assert search.find("b", 5) == ([], False)


# -- files: an edit in place is noticed, a replaced folder is not one
