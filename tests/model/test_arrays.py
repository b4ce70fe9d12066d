"""A model's folder read without torch: nothing is read that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unidec.config import Encoder, Model
from unidec.data.storage import write_folder
from unidec.errors import ArtifactError
from unidec.model.arrays import CLASSIFIER, KIND, VERSION, ModelConfig, read_arrays
from unidec.model.unidec import UniDEC


@pytest.fixture
def folder(tiny_bert: Path, tmp_path: Path) -> Path:
    """A trained model's folder."""
    settings = Encoder(name=str(tiny_bert), kind="both", trainable_layers=0)
    model = UniDEC.create(settings, Model(dim=8), 5, tiny_bert, 0, {"tokens": {"max_length": 12}})
    with write_folder(tmp_path / "model", KIND, VERSION) as out:
        model.save_into(out)
    return tmp_path / "model"


def test_weights_of_the_bag_and_the_heads_are_read(folder: Path) -> None:
    expected = UniDEC.load(folder).state_dict()
    names = {name for name in expected if "transformer" not in name and name not in CLASSIFIER}
    found = read_arrays(folder)
    assert set(found) == names and "head_de.0.weight" in names
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"encoder": {"kind": "cube"}}),
        ("config.json", {"num_labels": "many"}),
        ("config.json", {"encoder_width": None}),
        ("config.json", None),
        ("model.safetensors", None),
    ],
)
def test_damaged_files_are_named(folder: Path, file: str, change: dict[str, Any] | None) -> None:
    def read() -> None:
        ModelConfig.read(folder)
        read_arrays(folder)

    text = (folder / file).read_bytes()
    (folder / file).write_bytes(
        text[:-9] if change is None else json.dumps(json.loads(text) | change).encode()
    )
    with pytest.raises(ArtifactError, match="do not fit together") as caught:
        read()
    assert str(folder) in str(caught.value)
    (folder / file).unlink()
    with pytest.raises(ArtifactError, match="do not fit together"):
        read()
