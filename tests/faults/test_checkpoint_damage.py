"""Fault 3: the newest checkpoint is flipped or cut off: refused by its file's name before any
tensor is loaded.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unidec.data import tensor_file
from unidec.errors import ArtifactError
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart, load_checkpoint

FILES = ["dense.safetensors", "rows-00000.safetensors", "state.json", "manifest.json"]


def save(run_dir: Path, step: int) -> Path:
    rows = {
        "table": RowPart(
            0, 9, {"weight": torch.full((9, 4), float(step)), "sum": torch.arange(9.0)}
        )
    }
    state = {
        "epoch": 1,
        "epoch_step": 2,
        "step": step,
        "seconds": 0.5,
        "refresh": None,
        "identity": {"a": "b"},
        "notes": {},
    }
    return CheckpointWriter(run_dir).save(
        Checkpoint(state, {"model.x": torch.full((3, 2), step)}, rows)
    )


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files of tensors that were opened, in order."""
    import safetensors

    names: list[str] = []
    real = safetensors.safe_open

    def safe_open(name: str, *rest: Any, **options: Any) -> Any:
        names.append(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    return names


@pytest.mark.parametrize("file", FILES)
def test_every_file_flipped_and_cut_off_anywhere(
    memory_folder: Path, opened: list[str], file: str
) -> None:
    save(memory_folder, 10)
    newest = save(memory_folder, 20)
    whole = (newest / file).read_bytes()
    places = sorted(
        {0, 1, 8, len(whole) - 1, *random.sample(range(len(whole)), min(60, len(whole)))}
    )
    damaged = [
        whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :]
        for at in places
    ]
    damaged += [whole[:at] for at in places] + [whole + b"\0", whole * 2]
    for content in damaged:
        (newest / file).write_bytes(content)
        opened.clear()
        loaded, refused = load_checkpoint(memory_folder)
        assert loaded is not None
        assert len(refused) == 1
        assert str(newest) in refused[0]
        assert file == "manifest.json" or f"{newest.name}/{file}" in refused[0]
        assert loaded.state["step"] == 10
        assert (loaded.rows["table"].tensors["weight"] == 10).all()
        assert opened and all(newest.name not in name for name in opened)


def test_all_are_checked_before_one_is_opened(memory_folder: Path, opened: list[str]) -> None:
    newest = save(memory_folder, 20)
    data = bytearray((newest / "state.json").read_bytes())  # the last by name
    data[-3] ^= 1
    (newest / "state.json").write_bytes(data)
    with pytest.raises(ArtifactError, match=r"step-0000000020/state\.json"):
        load_checkpoint(memory_folder)
    assert opened == []


def test_a_sealed_file_that_is_no_tensors_is_refused_too(
    memory_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest fits, the contents do not: as of somebody who made it up."""
    save(memory_folder, 10)
    whole = memory_folder / "whole.safetensors"
    tensor_file.write_tensors(whole, {"x": torch.zeros(4)}, {"ranges": "{}"})
    header = whole.read_bytes()[:-16]  # without the four values
    for content in (
        b"\x80\x04pickle",
        b"\xff" * 64,
        header,
        header + b"\0" * 3,
        header + b"\0" * 99,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(
                "unidec.training.checkpoint.write_dense",
                lambda folder, checkpoint, c=content: _put(folder, c),
            )
            newest = save(memory_folder, 20)
        loaded, refused = load_checkpoint(memory_folder)
        assert loaded is not None and loaded.state["step"] == 10
        assert f"{newest.name}/dense.safetensors" in refused[0]


def _put(folder: Path, content: bytes) -> dict[str, str]:
    (folder / "dense.safetensors").write_bytes(content)
    (folder / "state.json").write_text('{"epoch": 1, "step": 20}')
    return {}


def test_a_training_goes_on_from_the_one_before(
    open_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = open_trainer(**{"run.checkpoint_steps": 3})
    trainer.mine()
    trainer.train_round()
    before, newest = sorted((trainer.run_dir / "checkpoints").glob("step-*"))
    (newest / "rows-00000.safetensors").write_bytes(b"")
    resumed = open_trainer(**{"run.checkpoint_steps": 3})
    assert f"{newest.name}/rows-00000.safetensors: a file is damaged" in capsys.readouterr().out
    assert resumed.at.step == int(before.name[5:]) < trainer.at.step
    resumed.train_round()
    ours = resumed.model.state_dict()
    theirs = trainer.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
