"""Search on a GPU: on a real one where there is one, else with the processor in its place."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from unidec.errors import UnidecError
from unidec.retrieval.index import LabelIndex, recall
from unidec.retrieval.index_kinds import faiss_module

faiss = pytest.importorskip("faiss")
GPUS = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0


def _compare(rng: np.random.Generator, kind: str) -> None:
    vectors, queries = (rng.normal(size=(n, 24)).astype(np.float32) for n in (900, 8))
    index = LabelIndex.build(vectors, kind)  # type: ignore[arg-type]
    there = index.to_gpu()
    wanted = np.argsort(-(queries.astype(np.float64) @ vectors.T.astype(np.float64)), axis=1)[:, :20]
    scores, labels = there.search(queries, 20)
    assert recall(labels, wanted) == 1.0 and (np.diff(scores, axis=1) <= 0).all()
    np.testing.assert_allclose(scores, np.take_along_axis(queries @ vectors.T, labels, axis=1), rtol=1e-4, atol=1e-4)
    assert index._gpu is None and there.search(queries, 900)[1].min() == 0


@pytest.mark.skipif(not GPUS, reason="no faiss-gpu, or no GPU")
@pytest.mark.parametrize("kind", ["flat", "pq"])
def test_on_a_gpu(rng, kind):
    _compare(rng, kind)


@pytest.mark.skipif(bool(GPUS), reason="there is a GPU")
@pytest.mark.parametrize("kind", ["flat", "pq", "hnsw"])
def test_the_way_there(rng, kind, monkeypatch):
    library = faiss_module()
    for name, value in {
        "StandardGpuResources": lambda: None, "get_num_gpus": lambda: 1, "GpuIndexFlatConfig": SimpleNamespace,
        "GpuIndexFlatIP": lambda resources, dim, settings: library.IndexFlatIP(dim),
    }.items():  # fmt: skip
        monkeypatch.setattr(library, name, value, raising=False)
    _compare(rng, kind)


@pytest.mark.skipif(bool(GPUS), reason="there is a GPU")
def test_without_one_it_says_so(rng):
    with pytest.raises(UnidecError, match="faiss-gpu or the GPU is missing"):
        LabelIndex.build(rng.normal(size=(5, 3)).astype(np.float32)).to_gpu()
