"""Work in shards against the same work in one piece: the same bytes, whatever was cut, killed or
damaged in between.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unidec.data.shards import Job, Work, alone, cuts
from unidec.errors import ArtifactError, ConfigError


@given(st.integers(0, 500), st.integers(1, 40), st.integers(1, 17))
def test_cuts_hold_every_row_once_and_begin_at_batches(num_rows, shards, multiple):
    bounds = cuts(num_rows, shards, multiple)
    assert bounds[0] == 0
    assert bounds[-1] == num_rows
    sizes = np.diff(bounds)
    assert len(sizes) <= shards
    assert all(bound % multiple == 0 for bound in bounds[:-1])
    assert (sizes > 0).all() or num_rows == 0
    batches = -(-sizes // multiple)
    assert batches.max() - batches.min() <= 1
    assert len(sizes) == max(1, min(shards, -(-num_rows // multiple)))


def begin(folder: Path, facts: dict | None = None, shards: int = 4) -> Work:
    job = Job("numbers", "count", "row")
    return Work.begin(folder, job, facts or {"input": "a"}, {"path": "/x"}, cuts(10, shards, 1))


def fill(work: Work, number: int) -> None:
    with work.write(number) as out:
        np.save(out.path / "rows.npy", np.arange(*work.rows(number)))


def test_a_shard_counts_only_when_it_is_whole_and_of_this_work(tmp_path):
    work = begin(tmp_path / "w")
    assert work.missing() == [0, 1, 2, 3]
    assert work.name(1) == "shard 2 of 4 (rows 2 to 4)"
    for number in range(4):
        fill(work, number)
    assert work.missing() == []
    assert begin(tmp_path / "w").missing() == []
    (work.path(1) / "rows.npy").write_bytes(b"damaged")
    shutil.rmtree(work.path(2))
    shutil.rmtree(work.path(3))
    shutil.copytree(work.path(0), work.path(3))  # another shard under this name
    assert begin(tmp_path / "w").missing() == [1, 2, 3]
    assert begin(tmp_path / "w", {"input": "b"}).missing() == [0, 1, 2, 3]
    assert begin(tmp_path / "w", shards=2).missing() == [0, 1]


def test_foreign_folders_are_left_alone_and_counts_have_bounds(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ArtifactError, match="other files"), alone(tmp_path / "mine"):
        pass
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    for wrong in (0, -1, 10**6):
        with pytest.raises(ConfigError):
            cuts(10, wrong, 1)


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"key": "k", "bounds": 3, "settings": {}}'])
def test_a_damaged_plan_is_refused_and_replaced(tmp_path, text):
    work = begin(tmp_path / "w")
    (tmp_path / "w" / "plan.json").write_text(text)
    with pytest.raises(ArtifactError):
        Work.open(tmp_path / "w")
    assert begin(tmp_path / "w") == work
    assert work == Work.open(tmp_path / "w")


def test_only_one_process_is_at_a_work(tmp_path):
    with (
        alone(tmp_path / "w"),
        pytest.raises(ArtifactError, match="another process"),
        alone(tmp_path / "w"),
    ):
        pass
    assert not (tmp_path / "w").exists()
    with alone(tmp_path / "w"):
        begin(tmp_path / "w")
    assert (tmp_path / "w" / "plan.json").exists()
