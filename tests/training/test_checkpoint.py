"""Checkpoints: whole or absent, the newest whole one is used, two are kept."""

import shutil
from types import SimpleNamespace

import pytest
import torch

from unidec.errors import ArtifactError
from unidec.training.checkpoint import (
    Checkpoint,
    load_checkpoint,
    random_state,
    restore_random_state,
    save_checkpoint,
)

CPU = torch.device("cpu")


def make(epoch):
    generator = torch.Generator().manual_seed(epoch)
    model = {"a.weight": torch.randn(7, 3, generator=generator), "b": torch.randn((), generator=generator)}
    optimisers = {"row.x.first": torch.randn(7, 3, generator=generator), "n": torch.tensor(epoch)} | random_state(CPU)
    return Checkpoint({"epoch": epoch, "step": 10 * epoch, "seconds": 0.1 * epoch}, model, optimisers)


def equal(ours, theirs):
    return ours.state == theirs.state and all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        for a, b in ((ours.model, theirs.model), (ours.optimisers, theirs.optimisers))
    )


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_read_back_bit_for_bit(tmp_path):
    assert load_checkpoint(tmp_path) == (None, [])
    saved = make(3)
    path = save_checkpoint(tmp_path, saved)
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, saved) and refused == []
    assert path.name == (tmp_path / "checkpoints" / "latest").read_text() == "epoch-00003"


def test_views_of_one_tensor_are_written_whole(tmp_path):
    """safetensors refuses tensors that share memory in part: what is saved is contiguous."""
    whole = torch.arange(12.0).reshape(3, 4)
    save_checkpoint(tmp_path, Checkpoint({"epoch": 1}, {"t": whole.T}, {"s": whole[:, 1]}))
    loaded, _ = load_checkpoint(tmp_path)
    assert torch.equal(loaded.model["t"], whole.T) and torch.equal(loaded.optimisers["s"], whole[:, 1])


def test_two_are_kept(tmp_path):
    for epoch in (5, 10, 95, 100):
        save_checkpoint(tmp_path, make(epoch))
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("epoch-*")) == ["epoch-00095", "epoch-00100"]
    assert equal(load_checkpoint(tmp_path)[0], make(100))


@pytest.mark.parametrize("file", ["model.safetensors", "optimisers.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, file, damage):
    save_checkpoint(tmp_path, make(5))
    path = save_checkpoint(tmp_path, make(10)) / file
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        path.unlink()
    if (file, damage) == ("manifest.json", "flip") and load_checkpoint(tmp_path)[1] == []:
        pytest.skip("the flipped bit is in a place that says nothing")
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5))
    assert len(refused) == 1 and "epoch-00010" in refused[0]


def test_none_whole_is_an_error_that_names_all(tmp_path):
    for epoch in (5, 10):
        flip(save_checkpoint(tmp_path, make(epoch)) / "model.safetensors")
    with pytest.raises(ArtifactError, match="no checkpoint of this run is whole") as caught:
        load_checkpoint(tmp_path)
    assert "epoch-00005" in str(caught.value) and "epoch-00010" in str(caught.value)


@pytest.mark.parametrize("failing", ["save_file", "disk", "manifest", "rename"])
def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch, failing):
    save_checkpoint(tmp_path, make(5))
    if failing == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    else:
        target = {"save_file": "safetensors.torch.save_file", "manifest": "unidec.data.storage.write_manifest",
                  "rename": "unidec.data.storage._replace"}[failing]  # fmt: skip
        monkeypatch.setattr(target, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises((ArtifactError, KeyboardInterrupt)) as caught:
        save_checkpoint(tmp_path, make(10))
    if failing == "disk":
        assert "epoch-00010" in str(caught.value) and "bytes" in str(caught.value)
    monkeypatch.undo()
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5)) and refused == []
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["epoch-00005", "latest"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "epoch-00005"


def test_saved_again_it_is_replaced(tmp_path):
    flip(save_checkpoint(tmp_path, make(5)) / "model.safetensors")
    save_checkpoint(tmp_path, make(5))
    assert equal(load_checkpoint(tmp_path)[0], make(5))


def test_random_numbers_continue():
    torch.manual_seed(11)
    torch.rand(5)
    state = random_state(CPU)
    expected = torch.rand(100)
    torch.rand(3)
    restore_random_state(state, CPU)
    assert torch.equal(torch.rand(100), expected)
