"""Fault 20: bundles and checkpoints of another version are refused, and the error says how to get
one of this version; a stored bundle answers as it did.

`formats/bundle-7/` was written by unidec 0.1.0 (`tiny_bundle.write_tiny_bundle`, seed 7: the index
pq, votes of label texts, a fusion with a network by words, probabilities) and is not written
again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.hostile_files import write_sealed
from helpers.tiny_bundle import write_tiny_bundle

from unidec.errors import ArtifactError
from unidec.training.checkpoint import VERSION, checkpoint_folders


def test_a_newer_checkpoint_is_refused_and_kept(open_trainer: Callable[..., Any]) -> None:
    trainer = open_trainer()
    trainer.mine()
    trainer.train_round()
    newest = checkpoint_folders(trainer.run_dir)[0]
    newer = newest.with_name("step-0000000009")
    shutil.copytree(newest, newer)
    write_sealed(newer, version=VERSION + 1, unidec="9.1.0")
    with pytest.raises(
        ArtifactError, match=rf"version {VERSION + 1} of checkpoint cannot be read"
    ) as caught:
        open_trainer()
    text = str(caught.value)
    assert "install unidec 9.1.0 or newer" in text and f"expected: version {VERSION}" in text
    assert newer.is_dir() and newest.is_dir()


def test_a_newer_refresh_is_not_used(open_trainer: Callable[..., Any]) -> None:
    """A round that was begun with it starts from the checkpoint before the round."""
    trainer = open_trainer()
    trainer.mine()
    write_sealed(trainer.run_dir / "refresh" / "epoch-00000", version=99)
    assert open_trainer().refresh_due


@pytest.mark.usefixtures("stub_model")
def test_a_stored_bundle_answers_as_it_did() -> None:
    from unidec.bundle.bundle import Bundle

    bundle = Bundle.load(Path(__file__).with_name("formats") / "bundle-7")
    found = bundle.predict(["red car", "old house", "big blue boat"], k=3)
    assert [one.labels for one in found] == [
        ["L3", "L4", "L0"],
        ["L6", "L9", "L10"],
        ["L5", "L10", "L2"],
    ]
    assert found[0].titles == ["red boat", "green boat", "red car"]
    assert found[0].scores == pytest.approx([-3.6711943, -10.8576488, -13.0778694], abs=1e-4)
    assert found[0].de_scores == pytest.approx([0.3385780, 0.6538524, 1.0], abs=1e-5)
    assert found[0].clf_scores == pytest.approx([0.2605411, 0.6241677, 0.1928977], abs=1e-5)
    assert found[0].knn_scores == pytest.approx([0.1699119, 0.3359174, 0.3227733], abs=1e-5)
    assert found[0].probabilities == pytest.approx([0.655254, 0.176157, 0.1], abs=1e-5)


@pytest.mark.usefixtures("stub_model")
def test_a_bundle_of_another_version_is_refused(tmp_path: Path) -> None:
    from unidec.bundle.bundle import Bundle
    from unidec.bundle.bundle_folder import VERSION as BUNDLE_VERSION

    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle, np.random.default_rng(7))
    write_sealed(bundle, version=BUNDLE_VERSION - 1)
    with pytest.raises(ArtifactError, match="version 6 of bundle cannot be read") as caught:
        Bundle.load(bundle)
    text = str(caught.value)
    assert "expected: version 7" in text and "write it again: unidec index build" in text
    write_sealed(bundle, version=BUNDLE_VERSION + 1, unidec="9.1.0")
    with pytest.raises(ArtifactError, match=r"install unidec 9\.1\.0 or newer"):
        Bundle.load(bundle)
