"""What answers: engines and the service, labels found by prefix, and a bundle's files while they
are served.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from helpers import asgi
from helpers.served_bundle import make_served_bundle

from unidec.config import Serve
from unidec.errors import ArtifactError
from unidec.serving.engine import Engine, Identity, LabelSearch, MappedFiles, Service


def test_another_bundle_than_the_registry_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="another bundle"):
        Engine.load(
            make_served_bundle(tmp_path),
            Serve(),
            Identity("0" * 64, "m", "1"),
        )


def test_the_previous_engine_is_kept_or_freed() -> None:
    old = asgi.StubEngine("a")
    new = asgi.StubEngine("b")
    for keep in (True, False):
        service = Service(Serve(keep_previous=keep))
        service.swap(old)
        service.swap(new)
        assert service.current == new
        assert service.previous == (old if keep else None)
        if keep:
            service.swap_back()
            assert (service.current, service.previous) == (old, new)


# -- labels found by prefix, against a slow search


def slow(uids: list[str], titles: list[str], beginning: str) -> list[str]:
    wanted = beginning.lower()
    first = [
        u
        for u, t in zip(uids, titles, strict=True)
        if u.lower().startswith(wanted) or t.lower().startswith(wanted)
    ]
    words = [
        u for u, t in zip(uids, titles, strict=True) if f" {wanted}" in t.lower() and u not in first
    ]
    return first + words * bool(wanted)


def test_those_that_begin_so_then_those_with_a_word_that_does() -> None:
    rng = np.random.default_rng(0)
    words = ["Vim", "vi", "editor", "É", "éa", "x.y", "a%b", "mode", "%"]
    titles = [" ".join(rng.choice(words, rng.integers(0, 4))) for _ in range(60)]
    uids = [f"{rng.choice(words)}/{i}" for i in range(60)]
    search = LabelSearch(pa.array(uids), pa.array(titles))
    for beginning in (
        "",
        "v",
        "VI",
        "vim",
        "é",
        "%",
        "x.",
        "editor mode",
        " ",
        "nothing",
        "vim/1",
        "a%b/",
    ):
        wanted = slow(uids, titles, beginning)
        for limit in (1, 2, 5, 60):
            found, more = search.find(beginning, limit)
            assert [label["uid"] for label in found] == wanted[:limit], (beginning, limit)
            assert more == (len(wanted) > limit)
            assert all(label["title"] == titles[uids.index(label["uid"])] for label in found)


def test_one_label() -> None:
    search = LabelSearch(pa.array(["a"]), pa.array([""]))
    expected = ([{"uid": "a", "title": ""}], False)
    assert search.find("", 5) == expected
    assert search.find("b", 5) == ([], False)


# -- files: an edit in place is noticed, a replaced folder is not one


@pytest.fixture
def files_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "bundle"
    (folder / "vectors").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "small.json").write_text("{}")
    (folder / "vectors" / "large.npy").write_bytes(os.urandom(1_000_000))
    return folder


def test_an_edit_in_place_is_noticed(files_folder: Path) -> None:
    large = files_folder / "vectors" / "large.npy"
    small = files_folder / "small.json"
    files = MappedFiles(files_folder)
    assert files.changed() == ""
    with small.open("r+b") as file:
        file.write(b"[]")
    assert files.changed() == "small.json"
    files = MappedFiles(files_folder)
    before = large.stat()
    # the size stays, and a copying tool may restore the time of change
    with large.open("r+b") as file:
        file.write(b"!")
    os.utime(large, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert files.changed() == "vectors/large.npy"
    files = MappedFiles(files_folder)
    os.truncate(large, 999_999)
    assert files.changed() == "vectors/large.npy"


def test_a_folder_replaced_by_renaming_stays_what_was_loaded(files_folder: Path) -> None:
    folder = files_folder
    files = MappedFiles(folder)
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    (other / "small.json").write_text("[1]")
    folder.rename(folder.parent / "old")
    other.rename(folder)
    shutil.rmtree(folder.parent / "old")
    assert files.changed() == ""


def test_readyz_names_the_file_and_other_routes_answer(files_folder: Path) -> None:
    folder = files_folder

    async def main() -> None:
        stub = asgi.StubEngine()
        stub.files = MappedFiles(folder)
        async with asgi.running(stub) as server:
            assert (await server.ask("/readyz")).status == 200
            os.truncate(folder / "vectors" / "large.npy", 10)
            reply = await server.ask("/readyz")
            assert reply.status == 503
            assert reply.json["ready"] is False
            assert reply.json["error"]["fix"]
            assert (
                reply.json["error"]["where"] == "vectors/large.npy"
                and reply.json["model"]["sha256"] == "a" * 64
            )
            assert server.figure("unidec_errors_total", kind="edited_file") == 1
            assert (await server.predict("a")).status == 200

    asyncio.run(main())
