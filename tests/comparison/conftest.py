"""What the tests of several peers share."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def cell(tiny_dataset, tiny_bert, tmp_path):
    """A cell's folder as the comparison makes it."""
    folder = tmp_path / "cell"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "dataset").symlink_to(tiny_dataset.path)
    settings = {
        "text": "title", "max_length": 16, "encoder": {"name": str(tiny_bert), "pooling": "mean"}, "epochs": 3,
        "batch_size": 8, "threads": 1, "shared": str(tmp_path / "shared"),
    }  # fmt: skip
    (folder / "peer.json").write_text(json.dumps(settings))
    return folder
