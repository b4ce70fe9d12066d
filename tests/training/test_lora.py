"""Adapters by PEFT: what trains, checkpoints and exports, and what is refused."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.trainings import train_to_the_end

from unidec.config import Encoder
from unidec.data.storage import write_folder
from unidec.data.tensor_file import open_tensors, read_tensors
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import KIND, VERSION, WEIGHTS
from unidec.model.encoder import load_transformer
from unidec.model.lora import check_targets
from unidec.model.unidec import UniDEC
from unidec.training.checkpoint import checkpoint_folders

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("every_step_is_logged")
ADAPTED = {
    "encoder.kind": "both",
    "encoder.trainable_layers": -1,
    "encoder.lora": {"rank": 4},
    "encoder.bag_dropout": 0.2,
    "optim.lr_encoder": 1e-2,
    "run.checkpoint_steps": 3,
}


def own_weights(trainer) -> dict[str, torch.Tensor]:
    state = trainer.model.encoder.transformer.transformer.state_dict()
    return {
        name.replace(".base_layer", ""): value
        for name, value in state.items()
        if ".lora_" not in name
    }


@pytest.mark.parametrize("layers", [-1, 1])
def test_adapters_train_and_the_weights_stay(open_trainer, tiny_bert, layers):
    trainer = open_trainer("run", **ADAPTED | {"encoder.trainable_layers": layers})
    names = {name for name, x in trainer.model.named_parameters() if x.requires_grad}
    adapters = {name for name in names if name.startswith("encoder.transformer.")}
    assert adapters and all(".lora_" in name for name in adapters)
    # a BERT layer has six linear layers, an adapter two matrices
    num_layers = 3 if layers == -1 else 1
    assert len(adapters) == num_layers * 6 * 2
    assert any(name.startswith("head_de") for name in names)
    train_to_the_end(trainer)
    before = load_transformer(tiny_bert).state_dict()
    after = own_weights(trainer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    weights = [x for name, x in trainer.model.named_parameters() if ".lora_B" in name]
    assert all(weight.any() for weight in weights)


def test_checkpoints_are_small_and_resume_bit_for_bit(open_trainer, tmp_path):
    whole = train_to_the_end(open_trainer("whole", **ADAPTED))
    part = open_trainer("part", **ADAPTED)
    step = part.train_step

    def stops(batch):
        if part.at.step == 7:
            raise KeyboardInterrupt
        return step(batch)

    part.train_step = stops
    with pytest.raises(KeyboardInterrupt):
        train_to_the_end(part)
    resumed = open_trainer("part", **ADAPTED)
    assert resumed.at.step == 6
    train_to_the_end(resumed)
    one, other = (trainer.model.state_dict() for trainer in (whole, resumed))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    folder, *_ = checkpoint_folders(tmp_path / "part")
    dense = read_tensors(folder / "dense.safetensors")
    of_transformer = [name for name in dense if name.startswith("model.encoder.transformer.")]
    assert all(".lora_" in name or name.endswith("base_sha256") for name in of_transformer)


def test_adapters_belong_to_their_encoder(open_trainer, tiny_bert, tmp_path):
    folder = shutil.copytree(tiny_bert, tmp_path / "encoder")
    adapted = ADAPTED | {"encoder.name": str(folder)}
    train_to_the_end(open_trainer("run", **adapted))
    model = load_transformer(folder)
    with torch.no_grad():
        next(iter(model.parameters())).add_(1.0)
    model.save_pretrained(folder)
    with pytest.raises(ArtifactError, match="another encoder"):
        open_trainer("run", **adapted)


def test_the_export_is_merged_and_needs_no_peft(open_trainer, tiny_tokens, tmp_path, monkeypatch):
    trainer = train_to_the_end(open_trainer("run", **ADAPTED))
    with write_folder(tmp_path / "model", KIND, VERSION, {}) as out:
        trainer.export(out)
    with open_tensors(tmp_path / "model" / WEIGHTS) as file:
        assert not [name for name in file.names if "lora" in name or "base_layer" in name]
    monkeypatch.setitem(sys.modules, "peft", None)
    model = UniDEC.load(tmp_path / "model")
    expected = trainer.model.eval().encode("queries", tiny_tokens["queries"])
    got = model.encode("queries", tiny_tokens["queries"])
    np.testing.assert_allclose(got, expected, atol=1e-5)
    # the start of another training, whose adapters are new
    monkeypatch.undo()
    start = {"encoder.start": str(tmp_path / "model"), "encoder.lora": {"rank": 2, "alpha": 1.0}}
    again = open_trainer("again", **ADAPTED | start).model.eval()
    once_more = again.encode("queries", tiny_tokens["queries"])
    np.testing.assert_allclose(once_more, got, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "bag", "trainable_layers": 0},
        {"kind": "both", "trainable_layers": 0},
        {"kind": "both", "trainable_layers": 0, "frozen": True},
    ],
)
def test_no_layers_to_adapt(settings):
    encoder = Encoder.model_validate(settings | {"lora": {"rank": 8}})
    assert "adapters belong to" in str([conflict.what for conflict in encoder.conflicts()])


def test_targets_are_names_of_linear_layers(tiny_bert: Path):
    check_targets(tiny_bert, ["query", "value"])
    with pytest.raises(ConfigError, match=r"(?s)q_proj.*dense, key, query, value"):
        check_targets(tiny_bert, ["query", "q_proj"])
