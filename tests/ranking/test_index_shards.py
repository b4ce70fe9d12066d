"""A label index whose codes other processes compute: the bytes of one piece, whatever was killed or
damaged.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.shard_workers import Killed, killed_after

from unidec.config.index_spec import IndexSpec, Kind
from unidec.data.shards import Work, dividing
from unidec.errors import ArtifactError
from unidec.model.faiss_library import faiss_module
from unidec.pipeline.shard_jobs import run_shard
from unidec.ranking.heads import Heads
from unidec.ranking.index import LabelIndex

LABELS = 330
ROWS = 100  # of a shard
NUMBERS = {"lists": 4, "code_dims": 2}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unidec.ranking.index.ROWS_AT_ONCE", ROWS)


@pytest.fixture
def heads(rng: np.random.Generator) -> Heads:
    vectors = {name: rng.normal(size=(LABELS, 7)).astype(np.float32) for name in ("de", "clf")}
    vectors["bias"] = rng.normal(size=LABELS).astype(np.float32)
    vectors["de"] = vectors["de"].astype(np.float16)
    return Heads(vectors, "both", clf_normalize=False, clf_weight=1.7)


def stored(index: LabelIndex) -> bytes:
    return faiss_module().serialize_index(index.stored).tobytes()


def in_another_process(work: Work) -> None:
    code = "import sys; from unidec.pipeline.shard_jobs import run_shard; {}"
    calls = "; ".join(f"run_shard(sys.argv[1], {number})" for number in work.missing())
    subprocess.run([sys.executable, "-c", code.format(calls), str(work.folder)], check=True)


@pytest.mark.parametrize("kind", ["pq", "ivf-pq"])
def test_the_bytes_of_one_piece(heads: Heads, tmp_path: Path, kind: Kind) -> None:
    spec = IndexSpec(kind=kind, **NUMBERS)
    expected = stored(LabelIndex.build(heads, spec))
    with dividing(in_another_process):
        built = LabelIndex.build(heads, spec, parts=tmp_path / "index.parts")
    assert stored(built) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("space", ["de", "clf"])
def test_a_space_of_one_head_that_is_a_cosine(heads: Heads, tmp_path: Path, space) -> None:
    vectors = {name: heads.vectors[name] for name in ("de", "clf")}
    alone = Heads(vectors, space, clf_normalize=True)
    spec = IndexSpec(kind="pq", **NUMBERS)
    with dividing(in_another_process):
        built = LabelIndex.build(alone, spec, parts=tmp_path / "index.parts")
    assert stored(built) == stored(LabelIndex.build(alone, spec))


def test_a_killed_build_resumes_and_a_damaged_shard_is_computed_again(
    heads: Heads, tmp_path: Path
) -> None:
    spec = IndexSpec(kind="pq", **NUMBERS)
    written: list[int] = []

    parts = tmp_path / "index.parts"
    with dividing(killed_after(2, written)):
        with pytest.raises(Killed):
            LabelIndex.build(heads, spec, parts=parts)
        assert written == [0, 1]
        (codes,) = tmp_path.glob("index.parts.shards/00001-of-00004/*.npy")
        codes.write_bytes(codes.read_bytes()[:-1])
        written.clear()
        with pytest.raises(Killed):
            LabelIndex.build(heads, spec, parts=parts)
        assert written == [1, 2]
        written.clear()
        built = LabelIndex.build(heads, spec, parts=parts)
        assert written == [3]
        written.clear()
        other = heads.weighted(2.0)  # is another work
        with pytest.raises(Killed):
            LabelIndex.build(other, spec, parts=parts)
        assert written == [0, 1]
    assert stored(built) == stored(LabelIndex.build(heads, spec))


def test_damaged_inputs_are_not_read(heads: Heads, tmp_path: Path) -> None:
    def write(work: Work) -> None:
        file = work.folder / "inputs" / "clf.npy"
        file.write_bytes(file.read_bytes()[:-4] + b"1234")
        run_shard(work.folder, 0)

    with dividing(write), pytest.raises(ArtifactError, match="a file is damaged"):
        LabelIndex.build(heads, IndexSpec(kind="pq"), parts=tmp_path / "index.parts")


def test_few_labels_are_encoded_here(rng: np.random.Generator, tmp_path: Path) -> None:
    vectors = rng.normal(size=(ROWS, 7)).astype(np.float32)
    with dividing(pytest.fail):
        LabelIndex.build(vectors, IndexSpec(kind="pq"), parts=tmp_path / "index.parts")
        # without a folder there is no place for shards
        several = np.concatenate([vectors, vectors])
        LabelIndex.build(several, IndexSpec(kind="pq"))
