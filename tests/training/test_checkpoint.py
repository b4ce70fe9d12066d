"""Checkpoints: whole or absent, the newest whole one is used, two are kept, rows from any number of
ranks.
"""

import os
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.hostile_files import write_sealed

from unidec.data.storage import MANIFEST, file_sha256, write_folder, write_manifest
from unidec.errors import ArtifactError
from unidec.training import checkpoint as module
from unidec.training.checkpoint import (
    Checkpoint,
    CheckpointWriter,
    RowPart,
    checkpoint_folders,
    load_checkpoint,
    read_state,
)
from unidec.training.distributed import Ranks
from unidec.training.precision import random_state, restore_random_state
from unidec.training.round_refresh import Refresh

CPU = torch.device("cpu")
FILES = ["dense.safetensors", "rows-00000.safetensors", "state.json", "manifest.json"]


def make(step, refresh=None):
    """A checkpoint of four tables: 2 moments, 1 value a row, bf16 without state, empty."""
    generator = torch.Generator().manual_seed(step)

    def draw(*shape):
        return torch.randn(shape, generator=generator)

    dense = {
        "model.a.weight": draw(7, 3),
        "model.b": draw(),
        "adamw.0.step": torch.tensor(float(step)),
        "none": torch.empty(0, 4),
    }
    rows = {
        "table": RowPart(
            0, 11, {"weight": draw(11, 3), "first": draw(11, 3), "second": draw(11, 3)}
        ),
        "bias": RowPart(0, 11, {"weight": draw(11, 1), "sum": draw(11)}),
        "encoder.bag.embedding": RowPart(0, 5, {"weight": draw(5, 2).bfloat16()}),
        "one": RowPart(0, 1, {"weight": draw(1, 2)}),
    }
    state = {
        "epoch": step // 4,
        "epoch_step": step % 4,
        "step": step,
        "seconds": 0.1 * step,
        "refresh": refresh,
        "identity": {"data": "x"},
        "notes": {"run": "ü"},
    }
    return Checkpoint(state, dense | random_state(CPU), rows)


def same_tensors(ours, theirs):
    return ours.keys() == theirs.keys() and all(
        ours[k].dtype == theirs[k].dtype and torch.equal(ours[k], theirs[k]) for k in ours
    )


def equal(ours, theirs):
    return (
        ours.state == theirs.state
        and same_tensors(ours.dense, theirs.dense)
        and ours.rows.keys() == theirs.rows.keys()
        and all(
            (a.first_row, a.num_rows) == (b.first_row, b.num_rows)
            and same_tensors(a.tensors, b.tensors)
            for a, b in ((ours.rows[name], theirs.rows[name]) for name in ours.rows)
        )
    )


def save(run_dir, checkpoint):
    return CheckpointWriter(run_dir).save(checkpoint)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


# -- one after the other
# -----------------------------------------------------------------------------------------------


def test_read_back_bit_for_bit(tmp_path):
    assert load_checkpoint(tmp_path) == (None, [])
    saved = make(3)
    path = save(tmp_path, saved)
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, saved) and refused == []
    assert path.name == (tmp_path / "checkpoints" / "latest").read_text() == "step-0000000003"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert saved.num_bytes <= sum((path / name).stat().st_size for name in FILES[:2])


def test_the_wait_is_counted(tmp_path, monkeypatch):
    write_dense = module.write_dense

    def slow(*arguments):
        time.sleep(0.05)
        return write_dense(*arguments)

    monkeypatch.setattr(module, "write_dense", slow)
    writer = CheckpointWriter(tmp_path)
    assert writer.seconds == 0
    for step in (1, 2, 3):
        writer.save(make(step))
    assert 0.15 <= writer.seconds < 5


def test_a_full_disk_and_then_space(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path)
    writer.save(make(1))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        with pytest.raises(ArtifactError, match="no space left") as caught:
            writer.save(make(2))
    assert f"at least {make(2).num_bytes:,} bytes" in str(caught.value)
    assert "step-0000000002" in str(caught.value)
    assert names(tmp_path) == ["latest", "step-0000000001"]
    assert writer.save(make(4)).name == "step-0000000004"


def test_views_of_one_tensor_are_written_whole(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    rows = {"t": RowPart(0, 3, {"weight": whole[:, 1:3]})}
    save(tmp_path, Checkpoint({"epoch": 1, "step": 4}, {"t": whole.T, "s": whole[:, 1]}, rows))
    loaded, _ = load_checkpoint(tmp_path)
    assert torch.equal(loaded.dense["t"], whole.T)
    expected = whole[:, 1]
    assert torch.equal(loaded.dense["s"], expected)
    assert torch.equal(loaded.rows["t"].tensors["weight"], whole[:, 1:3])


def test_no_tables_at_all(tmp_path):
    given = Checkpoint(make(4).state, {"t": torch.ones(2)}, {})
    save(tmp_path, given)
    assert equal(load_checkpoint(tmp_path)[0], given)


# -- which are kept, which is used
# -------------------------------------------------------------------------------------


def test_two_are_kept(tmp_path):
    for step in (5, 10, 95, 100, 99999):
        save(tmp_path, make(step))
    assert names(tmp_path) == ["latest", "step-0000000100", "step-0000099999"]
    assert equal(load_checkpoint(tmp_path)[0], make(99999))


def test_two_that_are_whole_are_kept(tmp_path):
    """A damaged one does not take the place of the one before it; what is later is of a past cut
    off.
    """
    for step in (5, 10):
        save(tmp_path, make(step))
    flip(tmp_path / "checkpoints" / "step-0000000010" / "dense.safetensors")
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5))
    assert len(refused) == 1
    save(tmp_path, make(8))
    assert names(tmp_path) == ["latest", "step-0000000005", "step-0000000008"]
    flip(tmp_path / "checkpoints" / "step-0000000008" / "state.json")
    save(tmp_path, make(12))
    assert names(tmp_path) == ["latest", "step-0000000005", "step-0000000012"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path, file, damage):
    save(tmp_path, make(5))
    path = save(tmp_path, make(10)) / file
    if damage == "flip":
        flip(path)
    elif damage == "truncate":
        path.write_bytes(path.read_bytes()[:-4])
    else:
        path.unlink()
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5))
    assert len(refused) == 1
    assert f"step-0000000010/{file if file != MANIFEST else ''}" in refused[0]


def test_none_whole_is_an_error_that_names_all(tmp_path):
    for step in (5, 10):
        save(tmp_path, make(step))
    for name in ("step-0000000005", "step-0000000010"):
        flip(tmp_path / "checkpoints" / name / "dense.safetensors")
    with pytest.raises(ArtifactError, match="no checkpoint of this run is complete") as caught:
        load_checkpoint(tmp_path)
    assert "step-0000000005" in str(caught.value)
    assert "step-0000000010" in str(caught.value)


@pytest.mark.parametrize(
    "state", [b"", b"{", b"[]", b'{"epoch": 1}', b'{"epoch": "x", "step": 1}', b"[" * 100_000]
)
def test_a_state_that_is_none(tmp_path, state):
    """Sealed by its manifest all the same, as by somebody who made it up."""
    save(tmp_path, make(5))
    with write_folder(tmp_path / "checkpoints" / "step-0000000009", "checkpoint", 2) as out:
        (out.path / "state.json").write_bytes(state)
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5))
    assert "state.json" in refused[0]


@pytest.mark.parametrize(
    "failing", ["write_tensors", "disk", "manifest", "rename", "read back", "latest"]
)
def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch, failing):
    save(tmp_path, make(5))
    with monkeypatch.context() as patch:
        if failing == "disk":
            patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
        else:
            target = {
                "write_tensors": "unidec.training.checkpoint.write_tensors",
                "manifest": "unidec.data.storage.write_manifest",
                "rename": "unidec.data.storage._replace",
                "read back": "unidec.training.checkpoint.read_manifest",
                "latest": "unidec.training.checkpoint.write_bytes_atomic",
            }[failing]
            patch.setattr(target, lambda *_, **__: (_ for _ in ()).throw(ArtifactError("no")))
        with pytest.raises(ArtifactError):
            save(tmp_path, make(10))
    loaded, refused = load_checkpoint(tmp_path)
    if failing == "latest":  # it is whole, only its name was not written down
        assert equal(loaded, make(10)) and refused == []
        return
    assert equal(loaded, make(5)) and refused == []
    assert names(tmp_path) == ["latest", "step-0000000005"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-0000000005"


def test_a_disk_that_lies_is_found_by_reading_back(tmp_path, monkeypatch):
    """The manifest has the hashes of the memory, not of what was read from the disk."""
    save(tmp_path, make(5))
    write = module.write_tensors

    def lies(path, *rest):
        digest = write(path, *rest)
        flip(path)
        return digest

    monkeypatch.setattr(module, "write_tensors", lies)
    with pytest.raises(ArtifactError, match="damaged"):
        save(tmp_path, make(10))
    assert names(tmp_path) == ["latest", "step-0000000005"] and equal(
        load_checkpoint(tmp_path)[0], make(5)
    )


def test_saved_again_it_is_replaced(tmp_path):
    flip(save(tmp_path, make(5)) / "dense.safetensors")
    save(tmp_path, make(5))
    assert equal(load_checkpoint(tmp_path)[0], make(5))


def test_what_killed_processes_left_is_removed(tmp_path):
    path = save(tmp_path, make(5))
    gone = [
        f".{what}.{socket.gethostname()}.{pid}.0123abcd.tmp"
        for pid in (os.getpid(), 2**22 - 3)
        for what in ("step-0000000007", "latest")
    ]
    for name in gone:
        (path.parent / name).mkdir()
        (path.parent / name / "half").write_text("x")
    other = path.parent / ".step-0000000007.elsewhere.1.0123abcd.tmp"
    other.mkdir()
    save(tmp_path, make(6))
    assert names(tmp_path) == [other.name, "latest", "step-0000000005", "step-0000000006"]
    os.utime(other, (0, 0))  # since 1970
    save(tmp_path, make(7))
    assert names(tmp_path) == ["latest", "step-0000000006", "step-0000000007"]


def test_what_a_checkpoint_says_of_itself(tmp_path):
    assert checkpoint_folders(tmp_path) == []
    paths = [save(tmp_path, make(step)) for step in (5, 10)]
    assert checkpoint_folders(tmp_path) == paths[::-1]
    assert read_state(tmp_path, paths[0]) == make(5).state
    flip(paths[0] / "dense.safetensors")
    assert read_state(tmp_path, paths[0], verify=False) == make(5).state
    with pytest.raises(ArtifactError, match="damaged"):
        read_state(tmp_path, paths[0])


# -- the refresh of a round
# --------------------------------------------------------------------------------------------


def make_refresh(run_dir, epoch):
    folder = run_dir / "refresh" / f"epoch-{epoch:05d}"
    Refresh(order=np.arange(6) + epoch, offsets=np.array([0, 3, 6])).save(folder, epoch)
    return folder, file_sha256(folder / MANIFEST)


@pytest.mark.parametrize("damage", ["none", "flip", "array gone", "all gone", "another"])
def test_a_checkpoint_within_a_round_needs_its_refresh(tmp_path, damage):
    make_refresh(tmp_path, 0)
    folder, digest = make_refresh(tmp_path, 2)
    save(tmp_path, make(8))
    save(tmp_path, make(9, digest))
    if damage == "flip":
        flip(folder / "order.npy")
    elif damage == "array gone":
        (folder / "order.npy").unlink()
    elif damage == "all gone":
        shutil.rmtree(folder)
    elif damage == "another":
        Refresh(order=np.arange(6)[::-1], offsets=np.array([0, 3, 6])).save(folder, 2)
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(9, digest) if damage == "none" else make(8))
    assert len(refused) == (damage != "none")
    assert all("refresh" in reason for reason in refused)


# -- several ranks
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threads(Ranks):
    """Ranks that are threads of this process."""

    meeting: threading.Barrier | None = None
    given: dict | None = None

    def barrier(self):
        self.meeting.wait(20)

    def gather_array(self, array):
        self.given[self.rank] = array
        self.barrier()
        return np.concatenate([self.given[rank] for rank in range(self.world)])


def part_of(checkpoint, ranks):
    """What a rank holds: its part of `table` and `bias`, all of the others."""
    rows = {}
    for name, whole in checkpoint.rows.items():
        begin, end = (
            ranks.part(whole.num_rows) if name != "encoder.bag.embedding" else (0, whole.num_rows)
        )
        rows[name] = RowPart(
            begin, whole.num_rows, {k: x[begin:end] for k, x in whole.tensors.items()}
        )
    return Checkpoint(checkpoint.state, checkpoint.dense, rows)


def save_together(run_dir, checkpoint, world):
    meeting = threading.Barrier(world)
    failed = []
    given = {}

    def work(rank):
        ranks = Threads(rank, world, meeting=meeting, given=given)
        try:
            CheckpointWriter(run_dir, ranks).save(part_of(checkpoint, ranks))
        except BaseException as error:
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


@pytest.mark.parametrize("world", [2, 3, 16])
def test_written_by_many_and_read_by_any_number(tmp_path, world):
    """16 ranks for 11 rows: some hold none."""
    save(tmp_path, make(5))
    (tmp_path / "checkpoints" / ".step-0000000003.ranks.tmp").mkdir()
    saved = make(9)
    save_together(tmp_path, saved, world)
    assert names(tmp_path) == ["latest", "step-0000000005", "step-0000000009"]
    assert len(list((tmp_path / "checkpoints" / "step-0000000009").glob("rows-*"))) == world
    assert equal(load_checkpoint(tmp_path)[0], saved)
    for readers in (1, 2, 3, 5, 13):
        for rank in range(readers):
            ranks = Ranks(rank, readers)
            mine = {
                name: ranks.part(saved.rows[name].num_rows) for name in ("table", "bias", "one")
            }
            assert equal(load_checkpoint(tmp_path, mine)[0], part_of(saved, ranks))


def test_a_rank_reads_its_rows_from_one_file(tmp_path):
    save(tmp_path, make(9))
    loaded, _ = load_checkpoint(tmp_path, {"table": (4, 9)})
    part = loaded.rows["table"]
    assert part.first_row == 4
    assert part.num_rows == 11
    assert part.held == 5
    expected = make(9).rows["table"].tensors["second"][4:9]
    assert torch.equal(part.tensors["second"], expected)
    assert loaded.rows["bias"].held == 11


def test_rows_that_no_file_has(tmp_path):
    """Whole by its manifest, and yet not all of it: a rank's file was never there."""
    save(tmp_path, make(5))
    save_together(tmp_path, make(9), 2)
    path = tmp_path / "checkpoints" / "step-0000000009"
    (path / "rows-00001.safetensors").unlink()
    write_manifest(path, "checkpoint", 2, {})
    loaded, refused = load_checkpoint(tmp_path)
    assert equal(loaded, make(5))
    assert "rows are missing" in refused[0]


# -- versions
# --------------------------------------------------------------------------------------------------


def test_a_newer_version_is_refused_and_nothing_older_is_used(tmp_path):
    save(tmp_path, make(5))
    with write_folder(tmp_path / "checkpoints" / "step-0000000009", "checkpoint", 3) as out:
        (out.path / "what").write_text("x")
    write_sealed(tmp_path / "checkpoints" / "step-0000000009", unidec="7.0.0")
    with pytest.raises(ArtifactError, match=r"install unidec 7\.0\.0 or newer"):
        load_checkpoint(tmp_path)


# -- random numbers
# --------------------------------------------------------------------------------------------------


def test_random_numbers_continue():
    torch.manual_seed(11)
    torch.rand(5)
    state = random_state(CPU)
    expected = torch.rand(100)
    torch.rand(3)
    restore_random_state(state, CPU)
    assert torch.equal(torch.rand(100), expected)
