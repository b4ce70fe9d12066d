"""A bundle with another index: same answers, same files; what is refused."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from tiny_bundle import write_tiny_bundle

from unidec.data.storage import MANIFEST, read_manifest, write_manifest
from unidec.errors import ArtifactError
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import INDEX, write_with_index
from unidec.retrieval.index import KINDS, LabelIndex
from unidec.retrieval.scoring_space import LabelRows

pytest.importorskip("faiss")
pytestmark = pytest.mark.usefixtures("stub_model")
QUERIES = ["red car", "old house", "big blue boat", ""]


def _rows(bundle: Bundle) -> LabelRows:
    return LabelRows(bundle.vectors, bundle.info.space, bundle.info.clf_normalize)


def _seal(path) -> None:
    about = json.loads((path / MANIFEST).read_text())
    write_manifest(path, about["kind"], about["version"], about["meta"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("space", ["both", "clf"])
def test_every_kind_answers_as_the_flat_index(rng, tmp_path, kind, space):
    write_tiny_bundle(tmp_path / "bundle", rng, space=space, bias=True, clf_normalize=False)
    bundle = Bundle.load(tmp_path / "bundle")
    index = LabelIndex.build(_rows(bundle), kind, links=4, rescore=3)
    other = Bundle.load(write_with_index(bundle.path, bundle.info, tmp_path / "other", index))
    assert other.info.index_kind == kind and other.index.options == index.options
    for ours, theirs in zip(other.predict(QUERIES, k=5), bundle.predict(QUERIES, k=5), strict=True):
        assert ours.labels == theirs.labels
        assert ours.scores == pytest.approx(theirs.scores, abs=1e-5)
    same = [name for name in read_manifest(tmp_path / "bundle", "bundle", 99)["files"] if name.startswith("vectors/")]
    assert same and all(os.path.samefile(tmp_path / "bundle" / name, tmp_path / "other" / name) for name in same)
    again = write_with_index(bundle.path, bundle.info, tmp_path / "again", index)
    assert Bundle.load(again).sha256 == other.sha256


def test_an_index_of_other_labels_is_refused(rng, tmp_path):
    write_tiny_bundle(tmp_path / "bundle", rng)
    bundle = Bundle.load(tmp_path / "bundle")
    with pytest.raises(ValueError, match="the bundle has"):
        write_with_index(
            bundle.path, bundle.info, tmp_path / "other", LabelIndex.build(_rows(bundle).take(np.arange(11)))
        )
    assert not (tmp_path / "other").exists()


def test_options_that_do_not_fit_the_file_are_refused(rng, tmp_path):
    write_tiny_bundle(tmp_path / "bundle", rng, kind="pq")
    where = tmp_path / "bundle" / "bundle.json"
    info = json.loads(where.read_text())
    for options in (info["index_options"] | {"code_dims": 3}, info["index_options"] | {"rescore": 0}, {"links": "x"}):
        where.write_text(json.dumps(info | {"index_options": options}))
        _seal(tmp_path / "bundle")
        with pytest.raises(ArtifactError, match=f"{INDEX}|bundle.json"):
            Bundle.load(tmp_path / "bundle")
