"""Fault 20: an older bundle predicts as it did; newer bundles and checkpoints are refused by their
version.

`formats/bundle-1/` was written by unidec 0.1.0 (`tiny_bundle.write_tiny_bundle`, seed 7, HNSW) and
is not written again; `bundle-2/` is the same with training queries that vote (softmax), `bundle-3/`
with such as are compared by words; `bundle-4/` is bundle 3 with a graph of compressed vectors
(hnsw-sq8) some of whose nodes are of labels that left; `bundle-5/` has the index pq, votes of label
texts too, and a fusion of random weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unidec.data.storage import MANIFEST
from unidec.errors import ArtifactError
from unidec.training.checkpoint import VERSION, checkpoint_folders


def test_a_newer_checkpoint_is_refused_and_kept(open_trainer: Callable[..., Any]) -> None:
    trainer = open_trainer()
    trainer.mine()
    trainer.train_round()
    newest = checkpoint_folders(trainer.run_dir)[0]
    newer = newest.with_name("step-0000000009")
    shutil.copytree(newest, newer)
    about = json.loads((newer / MANIFEST).read_text())
    (newer / MANIFEST).write_text(json.dumps(about | {"version": VERSION + 1, "unidec": "9.1.0"}))
    with pytest.raises(
        ArtifactError, match=rf"version {VERSION + 1} of checkpoint cannot be read"
    ) as caught:
        open_trainer()
    text = str(caught.value)
    assert "install unidec 9.1.0 or newer" in text and f"a version from 1 to {VERSION}" in text
    assert newer.is_dir() and newest.is_dir()


def test_a_newer_refresh_is_not_used(open_trainer: Callable[..., Any]) -> None:
    """A round that was begun with it starts from the checkpoint before the round."""
    trainer = open_trainer()
    trainer.mine()
    manifest = trainer.run_dir / "refresh" / "epoch-00000" / MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    assert open_trainer().refresh_due


QUERIES = ["red car", "old house", "big blue boat"]


@pytest.fixture
def bundle_1(stub_model: None, tmp_path: Path) -> Path:
    return Path(
        shutil.copytree(Path(__file__).with_name("formats") / "bundle-1", tmp_path / "bundle")
    )


def test_a_bundle_of_version_1_predicts_as_it_did(bundle_1: Path) -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(bundle_1)
    assert bundle.neighbours is None
    found = bundle.predict(QUERIES, k=3)
    assert [one.labels for one in found] == [
        ["L1", "L0", "L4"],
        ["L6", "L9", "L8"],
        ["L2", "L4", "L10"],
    ]
    assert found[0].titles == ["green car", "red car", "green boat"]
    expected = pytest.approx([1.2214067, 1.0964489, 0.9659362], abs=1e-5)
    assert found[0].scores == expected
    assert found[0].de_scores == pytest.approx([0.8670483, 1.0, 0.6538523], abs=1e-5)
    assert found[0].clf_scores == pytest.approx([0.7087167, 0.1928977, 0.6241677], abs=1e-5)


@pytest.mark.usefixtures("stub_model")
def test_a_bundle_of_version_2_predicts_as_it_did() -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(Path(__file__).with_name("formats") / "bundle-2")
    found = bundle.predict(QUERIES, k=3)
    assert [one.labels for one in found] == [
        ["L4", "L1", "L3"],
        ["L6", "L9", "L8"],
        ["L4", "L2", "L8"],
    ]
    expected = pytest.approx([1.6659362, 1.2214067, 1.1296076], abs=1e-5)
    assert found[0].scores == expected
    assert found[0].de_scores == pytest.approx([0.6538523, 0.8670483, 0.3385780], abs=1e-5)
    assert found[0].clf_scores == pytest.approx([0.6241677, 0.7087167, 0.2605411], abs=1e-5)
    assert found[0].knn_scores == pytest.approx([1.0, 0.0, 0.9439413], abs=1e-5)
    assert bundle.neighbours is not None
    assert bundle.neighbours.titles.to_pylist()[:2] == [
        "",
        "green boat big",
    ]


@pytest.mark.usefixtures("stub_model")
def test_a_bundle_of_version_3_predicts_as_it_did() -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(Path(__file__).with_name("formats") / "bundle-3")
    found = bundle.predict(QUERIES, k=3)
    assert [one.labels for one in found] == [
        ["L4", "L1", "L0"],
        ["L6", "L9", "L11"],
        ["L4", "L5", "L1"],
    ]
    expected = pytest.approx([1.6659362, 1.3113372, 1.0964489], abs=1e-5)
    assert found[0].scores == expected
    assert found[0].de_scores == pytest.approx([0.6538523, 0.8670483, 1.0], abs=1e-5)
    assert found[0].clf_scores == pytest.approx([0.6241677, 0.7087167, 0.1928977], abs=1e-5)
    assert found[0].knn_scores == pytest.approx([1.0, 0.1284721, 0.0], abs=1e-5)
    assert bundle.neighbours is not None and bundle.neighbours.words is not None
    assert bundle.neighbours.words.num_features == 26


@pytest.mark.usefixtures("stub_model")
def test_a_bundle_of_version_4_predicts_as_it_did() -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(Path(__file__).with_name("formats") / "bundle-4")
    found = bundle.predict(QUERIES, k=3)
    assert [one.labels for one in found] == [
        ["L4", "L1", "L0"],
        ["L6", "L9", "L11"],
        ["L4", "L5", "L1"],
    ]
    assert found[0].scores == pytest.approx([1.6659362, 1.3113372, 1.0964489], abs=1e-5)
    assert bundle.info.index_kind == "hnsw-sq8"
    assert bundle.index.spec.kind == "pq"
    assert bundle.index.spec.rescore == 5


@pytest.mark.usefixtures("stub_model")
def test_a_bundle_of_version_5_predicts_as_it_did_without_probabilities() -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(Path(__file__).with_name("formats") / "bundle-5")
    found = bundle.predict(QUERIES, k=3)
    assert [one.labels for one in found] == [
        ["L6", "L10", "L9"],
        ["L3", "L1", "L2"],
        ["L6", "L9", "L3"],
    ]
    expected = pytest.approx([0.8987660, 0.0109472, -0.1180735], abs=1e-4)
    assert found[0].scores == expected
    assert (
        bundle.info.fusion is not None
        and bundle.info.calibration is None
        and found[0].probabilities == []
    )


def test_a_newer_bundle_is_refused(bundle_1: Path) -> None:
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.bundle_folder import VERSION as BUNDLE_VERSION

    about = json.loads((bundle_1 / MANIFEST).read_text())
    (bundle_1 / MANIFEST).write_text(
        json.dumps(about | {"version": BUNDLE_VERSION + 1, "unidec": "9.1.0"})
    )
    with pytest.raises(ArtifactError, match=r"install unidec 9\.1\.0 or newer"):
        Bundle.load(bundle_1)
