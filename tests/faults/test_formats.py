"""Fault 20: a checkpoint of an older format goes on as it did; a newer one is refused, naming the version needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from unidec.data.storage import MANIFEST, write_folder
from unidec.errors import ArtifactError
from unidec.training.checkpoint import VERSION, load_checkpoint


def as_version_1(run_dir: Path) -> None:
    """Write the newest checkpoint as unidec 0.1.0 did, in place of all that are there."""
    loaded, _ = load_checkpoint(run_dir)
    assert loaded is not None and loaded.state["epoch_step"] == 0
    model = {name[6:]: x for name, x in loaded.dense.items() if name.startswith("model.")}
    model |= {f"{table}.weight": part.tensors["weight"] for table, part in loaded.rows.items()}
    optimisers = {name: x for name, x in loaded.dense.items() if not name.startswith("model.")}
    for table, part in loaded.rows.items():
        optimisers |= {f"row.{table}.{key}": part.tensors[key] for key in ("first", "second")}
    state = {key: loaded.state[key] for key in ("epoch", "step", "seconds")}
    shutil.rmtree(run_dir / "checkpoints")
    path = run_dir / "checkpoints" / f"epoch-{state['epoch']:05d}"
    with write_folder(path, "checkpoint", 1) as out:
        for name, group in (("model", model), ("optimisers", optimisers)):
            save_file({k: v.clone().contiguous() for k, v in group.items()}, out.path / f"{name}.safetensors")
        (out.path / "state.json").write_text(json.dumps(state, sort_keys=True) + "\n", encoding="utf-8")
    (run_dir / "checkpoints" / "latest").write_bytes(path.name.encode())


SYSTEMS = [{}, {"model.heads": "de"}, {"model.clf_bias": True, "encoder.kind": "both", "model.learn_temperature": True}]


@pytest.mark.parametrize("overrides", SYSTEMS, ids=["bag", "depsl", "both"])
def test_version_1_goes_on_as_it_did(open_trainer: Callable[..., Any], overrides: dict) -> None:
    overrides = {"model.dropout": 0.2, **overrides}
    whole = open_trainer("whole", **overrides)
    whole.refresh()
    whole.train_round()
    old = whole.run_dir.parent / "old"
    shutil.copytree(whole.run_dir, old)
    as_version_1(old)
    resumed = open_trainer("old", **overrides)
    assert (resumed.epoch, resumed.step, resumed.refresh_due) == (2, 8, True)
    # each opened anew: two trainers in one process would draw from one stream of dropout
    for run in ("whole", "old"):
        trainer = open_trainer(run, **overrides)
        trainer.refresh()
        trainer.train_round()
    ours, theirs = (load_checkpoint(run_dir)[0] for run_dir in (old, whole.run_dir))
    assert ours is not None and theirs is not None and ours.state["step"] == theirs.state["step"] == 16
    assert [name for name in theirs.dense if not torch.equal(ours.dense[name], theirs.dense[name])] == []
    for table, part in theirs.rows.items():
        assert all(torch.equal(ours.rows[table].tensors[name], x) for name, x in part.tensors.items())


def test_a_newer_checkpoint_is_refused_and_kept(open_trainer: Callable[..., Any]) -> None:
    trainer = open_trainer()
    trainer.refresh()
    trainer.train_round()
    newest = trainer.writer.wait()
    newer = newest.with_name("step-0000000009")
    shutil.copytree(newest, newer)
    about = json.loads((newer / MANIFEST).read_text())
    (newer / MANIFEST).write_text(json.dumps(about | {"version": VERSION + 1, "unidec": "9.1.0"}))
    with pytest.raises(ArtifactError, match=rf"version {VERSION + 1} of checkpoint cannot be read") as caught:
        open_trainer()
    text = str(caught.value)
    assert "install unidec 9.1.0 or newer" in text and f"a version from 1 to {VERSION}" in text
    assert newer.is_dir() and newest.is_dir()


def test_a_newer_refresh_is_not_used(open_trainer: Callable[..., Any]) -> None:
    """A round that was begun with it starts from the checkpoint before the round."""
    trainer = open_trainer()
    trainer.refresh()
    manifest = trainer.run_dir / "refresh" / "epoch-00000" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    assert open_trainer().refresh_due
