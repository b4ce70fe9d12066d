"""Texts that are tokenised in shards: the bytes of one piece, whatever was killed or damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from helpers.shard_workers import Killed, killed_after

from unidec.data.dataset import XMCDataset
from unidec.data.shards import Work, dividing
from unidec.data.token_shards import tokenise

TEXTS_A_SHARD = 8  # of 60 queries


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def tokenise_queries(tiny_dataset: XMCDataset, tiny_bert: Path):
    def tokenise_queries(out: Path, prompt: str) -> None:
        options = {"max_length": 16, "meta": {"text": "title+content"}, "prompt": prompt}
        tokenise(tiny_dataset, "queries", out, tiny_bert, options)

    return tokenise_queries


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidec.data.token_shards.TEXTS_A_SHARD", TEXTS_A_SHARD)


@pytest.mark.parametrize("prompt", ["", "query: "])
def test_a_killed_stage_resumes_and_gives_the_bytes_of_one_piece(
    tokenise_queries, tmp_path: Path, prompt: str
) -> None:
    out = tmp_path / "tokens" / "queries"
    written: list[int] = []

    tokenise_queries(tmp_path / "whole", prompt)
    assert not written
    with dividing(killed_after(3, written)):
        with pytest.raises(Killed):
            tokenise_queries(out, prompt)
        assert written == [0, 1, 2] and not out.exists()
        shards = tmp_path / "tokens-queries.shards"
        damaged = shards / "00001-of-00008" / "tokens" / "ids.npy"
        damaged.write_bytes(damaged.read_bytes()[:-1])
        shutil.rmtree(shards / "00002-of-00008")
        written.clear()
        with pytest.raises(Killed):
            tokenise_queries(out, prompt)
        assert written == [1, 2, 3]
        written[:] = [0] * 4  # no more kills
        tokenise_queries(out, prompt)
        assert written[4:] == [4, 5, 6, 7]
    assert files(out) == files(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if "shards" in path.name] == []


def test_another_tokenizer_or_prompt_is_another_work(tokenise_queries, tmp_path: Path) -> None:
    works: list[Work] = []

    def write(work: Work) -> None:
        works.append(work)
        raise Killed

    with dividing(write):
        for prompt in ("", "", "query: "):
            with pytest.raises(Killed):
                tokenise_queries(tmp_path / "t" / "queries", prompt)
    first, again, other = works
    assert first == again and first.key != other.key
    assert first.job == ("tokens", "tokenise queries", "text")
    assert first.num_shards == 8
