"""Fault 4's program: saves checkpoints where the disk, a limit or a read-only mount says no.

    python full_disk_child.py FOLDER full|blind|limit|read-only...

Mounts a small file system of its own for each (the process may: `unshare --map-root-user --mount`),
none for `limit`. Prints the refusal, a JSON string a line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from unidec.errors import ArtifactError
from unidec.training.checkpoint import Checkpoint, CheckpointWriter, RowPart, load_checkpoint


def make(step: int, num_rows: int) -> Checkpoint:
    table = {
        name: torch.full((num_rows, 64), float(step)) for name in ("weight", "first", "second")
    }
    state = {
        "epoch": 1,
        "epoch_step": 0,
        "step": step,
        "seconds": 1.0,
        "refresh": None,
        "identity": {},
        "notes": {},
    }
    return Checkpoint(
        state, {"model.x": torch.tensor(step)}, {"table": RowPart(0, num_rows, table)}
    )


def main(folder: Path, how: str) -> None:
    folder.mkdir()
    if how != "limit":
        size = "30m" if how == "read-only" else "3m"
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True
        )
    disk_usage = shutil.disk_usage
    writer = CheckpointWriter(folder)
    writer.save(make(5, 100))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    if how == "blind":  # somebody else fills the disk after the space was looked at
        shutil.disk_usage = lambda _: SimpleNamespace(free=1 << 40)  # type: ignore[assignment,misc]
    elif how == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    elif how == "read-only":
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    big = make(10, 8000)  # 6 MB
    try:
        writer.save(big)
    except ArtifactError as error:
        text = str(error)
    else:
        raise SystemExit("it was saved")
    print(json.dumps(text))
    assert f"at least {big.num_bytes:,} bytes" in text, text
    assert "step-0000000010" in text, text
    assert "fix:" in text, text
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert sorted(os.listdir(folder / "checkpoints")) == ["latest", "step-0000000005"]
    loaded, refused = load_checkpoint(folder)
    assert loaded is not None
    assert loaded.state["step"] == 5
    assert refused == []
    if how != "read-only":  # it continues when there is space for what is to be saved
        writer.save(make(15, 100))
    shutil.disk_usage = disk_usage


if __name__ == "__main__":
    for how in sys.argv[2:]:
        main(Path(sys.argv[1]) / how, how)
