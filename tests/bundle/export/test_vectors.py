"""Label vectors in files: the values, the order, and what other programs read of them."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import tiny_bundle as tiny

from unidec.bundle.bundle import Bundle
from unidec.bundle.export import vectors as heads
from unidec.bundle.export.vectors import export_vectors, scored_by
from unidec.data.storage import folder_sha256
from unidec.errors import ArtifactError, DataError

pytestmark = pytest.mark.usefixtures("stub_model")


def slow_scores(
    parts: dict, weight: float, normalize: bool, head: str, de_D: np.ndarray, clf_D: np.ndarray
):
    """The score of every label for one query, by the words of docs/bundles.md: label by label."""
    scores = []
    for row in range(12):
        de = 0.0 if parts["de_LD"] is None else float(de_D @ parts["de_LD"][row])
        clf = 0.0
        if parts["clf_LD"] is not None:
            psi = parts["clf_LD"][row].astype(np.float64)
            clf = float(clf_D @ psi)
            if normalize:
                clf /= np.linalg.norm(psi) * np.linalg.norm(clf_D)
            elif parts["bias_L"] is not None:
                clf += float(parts["bias_L"][row])
        scores.append({"de": de, "clf": clf, "both": de + weight * clf}[head])
    return np.array(scores)


@pytest.mark.parametrize("head", ["both", "de", "clf"])
@pytest.mark.parametrize(
    ("normalize", "bias"),
    [
        (True, False),
        (False, True),
        (False, False),
    ],
)
def test_inner_products_are_the_heads_scores(
    tmp_path, rng, monkeypatch, head, normalize, bias
) -> None:
    monkeypatch.setattr(heads, "BLOCK_BYTES", 5 * 4 * 13)  # several blocks, the last one smaller
    options = {"clf_normalize": normalize, "bias": bias, "clf_weight": 0.7}
    parts = tiny.write_tiny_bundle(tmp_path / "bundle", rng, **options)
    target = tmp_path / "labels.parquet"
    bundle = Bundle.load(tmp_path / "bundle")
    told = export_vectors(bundle, target, head=head)
    table = pq.read_table(target)
    got = np.stack(table["vector"].to_numpy())
    rows = table.drop_columns(["vector"]).to_pylist()
    assert got.dtype == np.float32
    assert got.shape == (12, told["width"])
    assert told["labels"] == 12
    expected = [{"uid": u, "title": t} for u, t in zip(tiny.UIDS, tiny.TITLES, strict=True)]
    assert rows == expected
    assert told["bytes"] == target.stat().st_size

    de_BD = rng.normal(size=(3, tiny.DIM)).astype(np.float32)
    de_BD /= np.linalg.norm(de_BD, axis=1, keepdims=True)
    clf_BD = rng.normal(size=(3, tiny.DIM)).astype(np.float32)
    query = scored_by(bundle, head).queries(de_BD, clf_BD)
    for b in range(3):
        want = slow_scores(parts, 0.7, normalize, head, de_BD[b], clf_BD[b])
        np.testing.assert_allclose(got @ query[b], want, rtol=1e-5, atol=1e-5)


def test_a_search_over_the_file_ranks_as_the_bundle_does(tmp_path, rng) -> None:
    tiny.write_tiny_bundle(tmp_path / "bundle", rng, clf_weight=0.9)
    bundle = Bundle.load(tmp_path / "bundle")
    export_vectors(bundle, tmp_path / "labels.parquet")
    table = pq.read_table(tmp_path / "labels.parquet")
    facts = json.loads(table.schema.metadata[b"unidec"])
    assert facts["similarity"] == "inner product"
    assert facts["bundle_sha256"] == folder_sha256(tmp_path / "bundle")
    assert facts["head"] == "both"
    assert facts["clf_weight"] == 0.9
    assert facts["dtype"] == "float32"

    from unidec.data.tokens import encode_texts

    texts = ["red car", "old blue boat"]
    encoded = bundle.model.encode_queries(
        encode_texts(texts, bundle.model.tokenizer_folder, 8), np.arange(2)
    )
    query_BW = scored_by(bundle).queries(*encoded)
    scores = query_BW @ np.stack(table["vector"].to_numpy()).T
    for row, prediction in enumerate(bundle.predict(texts, k=4)):
        best = np.argsort(-scores[row], kind="stable")[:4]
        assert [table["uid"][int(i)].as_py() for i in best] == prediction.labels
        np.testing.assert_allclose(scores[row][best], prediction.scores, rtol=1e-5)


def test_the_same_bytes_twice(tmp_path, rng) -> None:
    tiny.write_tiny_bundle(tmp_path / "bundle", rng)
    for name in ("a.parquet", "b.parquet"):
        export_vectors(Bundle.load(tmp_path / "bundle"), tmp_path / name, head="de")
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert schema.field("vector").type == pa.list_(
        pa.field("element", pa.float32(), nullable=False), tiny.DIM
    )


def test_what_cannot_be_exported_is_refused(tmp_path, rng) -> None:
    tiny.write_tiny_bundle(tmp_path / "bundle", rng, heads="de", space="de")
    bundle = Bundle.load(tmp_path / "bundle")
    with pytest.raises(DataError, match=r"no such head[\s\S]*got: both[\s\S]*expected: de"):
        export_vectors(bundle, tmp_path / "labels.parquet", head="both")
    with pytest.raises(DataError, match="unknown format"):
        export_vectors(bundle, tmp_path / "labels.npy")
    (tmp_path / "bundle" / "vectors" / "de.npy").write_bytes(b"x")
    with pytest.raises(ArtifactError, match=r"de\.npy"):
        export_vectors(Bundle.load(tmp_path / "bundle"), tmp_path / "labels.parquet")
    assert not list(tmp_path.glob("labels*"))
