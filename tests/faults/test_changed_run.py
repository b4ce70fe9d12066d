"""Fault 6: a run is gone on with after data, parameters or the tokenizer changed: refused, every
key is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.tiny_transformer import write_transformer

from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import ConfigError
from unidec.training.trainer import Trainer, TrainingData


@pytest.fixture
def opener(
    tiny_dataset: XMCDataset,
    tiny_tokens: dict[str, TokenCache],
    tiny_params: Callable[..., Any],
    tmp_path: Path,
) -> Callable[..., Trainer]:
    """`opener(dataset=, tokens=, accept=, **{"pool.beta": 1})`: the trainer of the one run, trained
    for a round.
    """

    def opener(
        dataset: XMCDataset = tiny_dataset,
        tokens: dict[str, TokenCache] = tiny_tokens,
        accept: tuple[str, ...] = (),
        **overrides: Any,
    ) -> Trainer:
        params = tiny_params(**overrides)
        # code may be edited while the tests run; that it counts is tested below
        return Trainer(
            params.training,
            TrainingData(dataset, *tokens.values()),
            tmp_path / "run",
            tmp_path / "cache",
            accept=("code", *accept),
        )

    trainer = opener()
    trainer.mine()
    trainer.train_round()
    return opener


def files(trainer_or_folder: Any) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in trainer_or_folder.rglob("*") if path.is_file()}


def refused(opener: Callable[..., Trainer], folder: Path, **changes: Any) -> list[str]:
    """The keys that the refusal lists; nothing in the run's folder has changed."""
    before = files(folder)
    with pytest.raises(ConfigError) as caught:
        opener(**changes)
    assert files(folder) == before
    text = str(caught.value)
    assert str(folder) in text and "fix: undo the change" in text
    return [
        line.replace("got:", "").split(":")[0].strip()
        for line in text.splitlines()
        if "when the run began" in line
    ]


def tokens_of(dataset: XMCDataset, encoder: Path, folder: Path) -> dict[str, TokenCache]:
    sizes = {"queries": dataset.num_queries, "labels": dataset.num_labels}
    return {
        name: TokenCache.open(
            build_token_cache(dataset.text_batches(name), encoder, 16, folder / name, size)
        )
        for name, size in sizes.items()
    }


def test_parameters(opener: Callable[..., Trainer], tmp_path: Path) -> None:
    changes = {"optim.lr_clf": 0.5, "pool.beta": 1, "seed": 9, "model.temperature": 0.2}
    keys = refused(opener, tmp_path / "run", **changes)
    assert sorted(keys) == sorted(changes)
    # what was accepted is not listed; all of it together is accepted
    assert refused(
        opener, tmp_path / "run", accept=("seed", "pool.beta", "optim.lr_clf"), **changes
    ) == ["model.temperature"]
    assert opener(accept=tuple(changes), **changes).at.step == 8


def test_one_pair_more_in_the_data(
    opener: Callable[..., Trainer],
    tiny_tokens: dict[str, TokenCache],
    raw_factory: Callable[..., Any],
    tmp_path: Path,
) -> None:
    raw = raw_factory()
    relevance = raw.relevance["train"].tolil()
    row, label = np.argwhere(relevance[:20, :20].toarray() == 0)[0].tolist()
    relevance[row, label] = 1.0
    raw.relevance["train"] = relevance.tocsr()
    dataset = write_dataset(tmp_path / "dataset", raw, validation_share=0.1)
    assert refused(opener, tmp_path / "run", dataset=dataset) == ["data"]


def test_another_tokenizer_and_its_tokens(
    opener: Callable[..., Trainer],
    tiny_dataset: XMCDataset,
    tmp_path: Path,
) -> None:
    texts = [
        text
        for table in (tiny_dataset.queries, tiny_dataset.labels)
        for text in table["title"].to_pylist()
    ]
    other = write_transformer(tmp_path / "bert", [*texts[::-1], "more words here"], "bert")
    tokens = tokens_of(tiny_dataset, other, tmp_path / "tokens")
    assert refused(opener, tmp_path / "run", tokens=tokens) == [
        "tokens.queries",
        "tokens.labels",
        "tokenizer",
    ]


def test_the_code(
    opener: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("unidec.training.identity.code_sha256", lambda *results: "f" * 64)
    trainer = opener()  # accepted there
    with pytest.raises(ConfigError, match="other code") as caught:
        Trainer(
            trainer.settings,
            TrainingData(trainer.dataset, *trainer.encoding.tokens.values()),
            tmp_path / "run",
            tmp_path / "cache",
        )
    assert "code: " in str(caught.value)
    assert "ffffffffffff... now" in str(caught.value)


def test_what_is_accepted_is_the_runs_own_from_then_on(
    opener: Callable[..., Trainer], tmp_path: Path
) -> None:
    """The next checkpoint carries the new parameters: the old ones are the change now."""
    trainer = opener(accept=("optim.lr_clf",), **{"optim.lr_clf": 0.5})
    trainer.mine()
    trainer.train_round()
    assert refused(opener, tmp_path / "run") == ["optim.lr_clf"]
    assert opener(**{"optim.lr_clf": 0.5}).finished


def test_a_change_of_place_is_none(opener: Callable[..., Trainer]) -> None:
    """Where it runs and how often it saves changes nothing that is learnt."""
    trainer = opener(**{"run.checkpoint_steps": 2, "run.table_place": "host"})
    assert trainer.at.step == 8
    assert torch.isfinite(trainer.model.table.weight).all()
