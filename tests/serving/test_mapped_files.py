"""A bundle's files while it is served: an edit in place is noticed, a replaced folder is not one."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from unidec.serving import mapped_files
from unidec.serving.mapped_files import MappedFiles


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(mapped_files, "_PAUSE_SECONDS", 0.0)
    folder = tmp_path / "bundle"
    (folder / "vectors").mkdir(parents=True)
    (folder / "empty").touch()
    (folder / "small.json").write_text("{}")
    (folder / "vectors" / "large.npy").write_bytes(os.urandom(1_000_000))
    return folder


def overwrite(path: Path, start: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def test_an_edit_in_place_is_noticed_by_size_or_by_a_sampled_block(folder: Path) -> None:
    files, large = MappedFiles(folder), folder / "vectors" / "large.npy"
    assert files.changed() == ""
    kept = large.read_bytes()
    for edit in (
        lambda: os.truncate(large, 999_999), lambda: os.truncate(large, 0), lambda: overwrite(large, 0, bytes(999_000)),
        lambda: overwrite(large, 1_000_000 - 1, bytes([kept[-1] ^ 1])), lambda: overwrite(large, 1_000_000, b"more"),
    ):  # fmt: skip
        edit()
        assert files.changed() == "vectors/large.npy"
        os.truncate(large, len(kept))
        overwrite(large, 0, kept)
        assert files.changed() == ""
    overwrite(folder / "small.json", 0, b"[]")
    assert files.changed() == "small.json"


def test_a_folder_replaced_by_renaming_stays_what_was_loaded(folder: Path) -> None:
    files = MappedFiles(folder)
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    (other / "small.json").write_text("[1]")
    folder.rename(folder.parent / "old")
    other.rename(folder)
    shutil.rmtree(folder.parent / "old")
    assert files.changed() == ""


def test_it_reads_at_most_once_a_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = MappedFiles(folder)
    assert files.changed() == ""
    monkeypatch.setattr(mapped_files, "_PAUSE_SECONDS", 60.0)
    (folder / "small.json").write_text("[1]")
    assert files.changed() == ""


def test_readyz_names_the_file_and_other_routes_answer(folder: Path, helper: Any) -> None:
    asgi = helper("tracking/serving/asgi")

    async def main() -> None:
        engine = asgi.StubEngine()
        engine.files = MappedFiles(folder)
        async with asgi.running(engine) as server:
            assert (await server.ask("/readyz")).status == 200
            os.truncate(folder / "vectors" / "large.npy", 10)
            reply = await server.ask("/readyz")
            assert reply.status == 503 and reply.json["ready"] is False and reply.json["error"]["fix"]
            assert reply.json["error"]["where"] == "vectors/large.npy" and reply.json["model"]["sha256"] == "a" * 64
            assert server.figure("unidec_errors_total", kind="edited_file") == 1
            assert (await server.predict("a")).status == 200

    asyncio.run(main())
