"""A bundle with another index: same answers; what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.tiny_bundle import write_tiny_bundle

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import INDEX
from unidec.config.index_spec import KINDS
from unidec.data.storage import MANIFEST, write_manifest
from unidec.errors import ArtifactError

pytest.importorskip("faiss")
pytestmark = pytest.mark.usefixtures("stub_model")
QUERIES = ["red car", "old house", "big blue boat", ""]


def _seal(path) -> None:
    about = json.loads((path / MANIFEST).read_text())
    write_manifest(path, about["kind"], about["version"], about["meta"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["both", "clf"])
def test_every_kind_answers_as_the_flat_index(tmp_path, kind, space):
    for name, its_kind in (("bundle", "flat"), ("other", kind)):
        same = np.random.default_rng(0)
        write_tiny_bundle(
            tmp_path / name, same, kind=its_kind, space=space, bias=True, clf_normalize=False
        )
    bundle = Bundle.load(tmp_path / "bundle")
    other = Bundle.load(tmp_path / "other")
    assert other.info.index_kind == kind
    for ours, theirs in zip(other.predict(QUERIES, k=5), bundle.predict(QUERIES, k=5), strict=True):
        assert ours.labels == theirs.labels
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)


def test_options_that_do_not_fit_the_file_are_refused(rng, tmp_path):
    write_tiny_bundle(tmp_path / "bundle", rng, kind="pq")
    where = tmp_path / "bundle" / "bundle.json"
    info = json.loads(where.read_text())
    for options in (
        info["index_options"] | {"code_dims": 3},
        info["index_options"] | {"rescore": 0},
        {"links": "x"},
    ):
        where.write_text(json.dumps(info | {"index_options": options}))
        _seal(tmp_path / "bundle")
        with pytest.raises(ArtifactError, match=f"{INDEX}|bundle.json"):
            Bundle.load(tmp_path / "bundle")
