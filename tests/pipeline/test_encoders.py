"""Encoders in the pipeline: prompts in the token caches, what is refused before training, and
`unidec encoders`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.real_model import real_bundle
from helpers.tiny_architectures import ARCHITECTURES, LABEL, QUERY
from helpers.tiny_training import tiny_params
from typer.testing import CliRunner

from unidec import cli, pipeline
from unidec.config import Params
from unidec.data.tokens import TokenCache, encode_texts
from unidec.errors import ConfigError
from unidec.pipeline import paths
from unidec.pipeline.data_stages import checked_encoder
from unidec.pipeline.encoders import ARCHITECTURES as KNOWN
from unidec.pipeline.encoders import encoder_facts
from unidec.tracking.registry import model_card

OWN = {"encoder.kind": "transformer", "encoder.trainable_layers": -1, "tokens.max_length": 48}


@pytest.fixture
def params(tiny_encoder: Callable[[str], Path]) -> Callable[..., Params]:
    """`params("t5", **by key path)`."""

    def get(name: str, **overrides: Any) -> Params:
        return tiny_params(tiny_encoder(name), **OWN | overrides)

    return get


def test_every_known_architecture_is_tested() -> None:
    assert set(KNOWN) == {tiny.model_type for tiny in ARCHITECTURES.values()}


@pytest.mark.parametrize("name", ["bert", "xlm-roberta", "qwen3"])
def test_caches_hold_texts_with_and_without_prompt(
    params, tiny_dataset, tmp_path, monkeypatch, name
) -> None:
    monkeypatch.setattr(paths, "TOKENS", tmp_path / "tokens")
    monkeypatch.setattr(paths, "open_dataset", lambda *_: tiny_dataset)
    chosen = params(name)
    pipeline.tokens(chosen)
    folder = Path(chosen.encoder.name)
    for which, prompt, titles in (
        ("queries", QUERY, tiny_dataset.query_texts()),
        ("labels", LABEL, tiny_dataset.label_texts()),
    ):
        cache = TokenCache.open(tmp_path / "tokens" / which)
        for tokens, texts in (
            (cache, titles),
            (cache.for_transformer, [prompt + title for title in titles]),
        ):
            expected = encode_texts(texts, folder, 48)
            assert np.array_equal(tokens.ids, expected.ids)
            assert np.array_equal(tokens.offsets, expected.offsets)
    pipeline.tokens(params(name, **{"encoder.query_prompt": "", "encoder.label_prompt": ""}))
    cache = TokenCache.open(tmp_path / "tokens" / "queries")
    assert cache.for_transformer is cache
    assert {file.name for file in cache.path.iterdir()} == {
        "ids.npy",
        "offsets.npy",
        "manifest.json",
    }


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"tokens.max_length": 4}, "encoder.query_prompt", "leaves no room"),
        ({"encoder.label_prompt": "a b c d e " * 20}, "encoder.label_prompt", "leaves no room"),
        ({"encoder.kind": "both", "encoder.transformer_tokens": 4}, "encoder.", "leaves no room"),
        ({"loss.synonyms": 0.1}, "encoder.query_prompt", "synonyms"),
    ],
)
def test_prompts_that_cannot_be_used(params, changes, key, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        checked_encoder(params("bert", **changes))
    assert key in str(caught.value)


def test_code_of_a_folder_is_never_run(params, tmp_path) -> None:
    right = params("bert")
    folder = shutil.copytree(right.encoder.name, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "code.Config"}}
    (folder / "code.py").write_text("raise SystemExit('run')")
    (folder / "config.json").write_text(json.dumps(config))
    own = params("bert", **{"encoder.name": str(folder)})
    assert checked_encoder(own) == folder  # transformers has a BERT of its own
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "new"}))
    with pytest.raises(ConfigError, match=r"trust_remote_code.*never runs"):
        checked_encoder(own)


def test_what_is_said_before_training(params, caplog, monkeypatch, tiny_encoder) -> None:
    monkeypatch.setattr("unidec.pipeline.data_stages.MAX_BYTES", 1000)
    monkeypatch.setattr("unidec.pipeline.data_stages.ARCHITECTURES", ())
    with caplog.at_level(logging.WARNING):
        checked_encoder(params("bert", **{"tokens.max_length": 60}))
    assert "not among the tested" in caplog.text
    assert "torch will encode queries" in caplog.text
    assert "texts of 48 tokens, not 60" in caplog.text


def test_what_a_card_says(tiny_encoder, tmp_path) -> None:
    bundle = real_bundle(tmp_path, tiny_encoder("qwen3"), kind="both", max_length=48)
    facts = encoder_facts(bundle.path)
    assert facts == {"pooling": "last", "query prompt": QUERY, "label prompt": LABEL}
    assert QUERY in model_card(facts, bundle.sha256)


def test_the_command_lists_and_measures(params, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke
    listed = run(cli.app, ["encoders"]).output
    assert "modernbert" in listed and "weighted_mean" in listed and "query: " in listed
    folder = params("gemma3").encoder.name
    about = json.loads(run(cli.app, ["encoders", folder, "--json"]).output)
    assert (about["architecture"], about["pooling"], about["width"]) == ("gemma3_text", "mean", 32)
    assert (about["query_prompt"], about["label_prompt"]) == (QUERY, LABEL)
    assert [layer["out_features"] for layer in about["dense"]] == [64, 32]
    assert about["texts_per_second"] > 0 and about["memory_bytes"] == 4 * about["parameters"]
    assert about["missing"] == []
    missing = run(cli.app, ["encoders", str(tmp_path)])
    assert missing.exit_code != 0
    Path("p.yaml").write_text(f"encoder: {{kind: transformer, name: '{folder}'}}\n")
    shown = run(cli.app, ["config", "show", "--params", "p.yaml"])
    assert "# from the encoder's folder: pooling 'mean', dense" in shown.output
