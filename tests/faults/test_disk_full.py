"""Fault 4: no space, a limit, a read-only folder while saving: the bytes needed are named, the last
good one stays.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from unidec.errors import ArtifactError

CHILD = Path(__file__).with_name("full_disk_child.py")
UNSHARE = ["unshare", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        command = [*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@pytest.mark.parametrize(
    "refusals",
    [
        {"full": "no space left", "blind": "no space left", "read-only": "Read-only file system"},
        {"limit": "File too large"},
    ],
    ids=["mounted", "limit"],
)
def test_a_save_that_the_disk_refuses(
    tmp_path: Path, refusals: dict[str, str], warm_python: list[str]
) -> None:
    """A file system of 3 MB for a checkpoint of 6 MB; a limit on the size of a file; one mounted
    again as read-only.
    """
    command = [str(CHILD), str(tmp_path), *refusals]
    if "limit" in refusals:
        command = [*warm_python, *command]
    else:
        if not can_mount():
            pytest.skip("this machine lets nobody mount (unshare --map-root-user --mount)")
        command = [*UNSHARE, sys.executable, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    for printed, words in zip(done.stdout.splitlines(), refusals.values(), strict=True):
        assert words in json.loads(printed)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    from unidec.training.checkpoint import Checkpoint, CheckpointWriter

    (tmp_path / "checkpoints").write_text("in the way")
    writer = CheckpointWriter(tmp_path)
    with pytest.raises(ArtifactError, match="at least 400 bytes"):
        writer.save(Checkpoint({"epoch": 1, "step": 3}, {"x": torch.zeros(100)}, {}))
    assert (tmp_path / "checkpoints").read_text() == "in the way"


def test_a_training_stops_and_goes_on_when_there_is_space(
    open_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training ends at the save that meets the full disk, and loses what came after the last
    good one.
    """
    whole = open_trainer("whole")
    whole.mine()
    whole.train_round()
    trainer = open_trainer("full", **{"run.checkpoint_steps": 2})
    trainer.mine()
    step = trainer.train_step

    def fills(batch: Any) -> Any:
        if trainer.at.step == 3:
            monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        return step(batch)

    monkeypatch.setattr(trainer, "train_step", fills)
    with pytest.raises(ArtifactError, match="no space left") as caught:
        trainer.train_round()
    assert "bytes" in str(caught.value)
    assert trainer.at.step == 4
    monkeypatch.undo()
    resumed = open_trainer("full", **{"run.checkpoint_steps": 2})
    assert resumed.at.step == 2
    resumed.train_round()
    ours = resumed.model.state_dict()
    theirs = whole.model.state_dict()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
