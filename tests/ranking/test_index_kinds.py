"""Every kind of index: against an exact search, saved and mapped, and from crafted files."""

from __future__ import annotations

import re

import numpy as np
import pytest
from helpers.label_vectors import label_vectors
from helpers.slow_search import slow_search, wrong_in_threads
from helpers.tiny_bundle import recall_with_ties

from unidec.config import load_params
from unidec.config.index_spec import COMPRESSED, KINDS, IndexSpec, Kind
from unidec.data.storage import write_file
from unidec.data.temporary import remove
from unidec.errors import ArtifactError, ConfigError
from unidec.model.faiss_library import faiss_module
from unidec.model.search import recall
from unidec.ranking import index as index_module
from unidec.ranking.heads import Heads, as_heads, unit_rows
from unidec.ranking.index import FLAT_CENTROIDS, LabelIndex

pytest.importorskip("faiss")

# not a multiple of what a code holds
DIM = 13
LABELS = 700
THOROUGH = {
    "rescore": 3,
    "probes": 10**6,
    "search": 600,
    "links": 8,
    "lists": 20,
}
"""Settings with which every kind looks at (nearly) all: what differs then is a fault."""


def _clusters(rng: np.random.Generator, num: int, dim: int = DIM) -> np.ndarray:
    centres = np.random.default_rng(5).normal(size=(12, dim))
    return (centres[rng.integers(0, 12, num)] + 0.4 * rng.normal(size=(num, dim))).astype(
        np.float32
    )


@pytest.mark.parametrize(
    ("factory", "search", "numbers"),
    [
        ("Flat", "", {}),
        ("PQx4", "", {"kind": "pq"}),
        ("PQx4,dsub=2", "k_factor_rf=4", {"kind": "pq", "code_dims": 2, "rescore": 4}),
        ("HNSW", "", {"kind": "hnsw"}),
        ("HNSW16", "efSearch=99", {"kind": "hnsw", "links": 16, "search": 99}),
        ("HNSW16,efConstruction=50", "", {"kind": "hnsw", "links": 16, "build": 50}),
        ("IVF,PQx4", "", {"kind": "ivf-pq"}),
        (
            "IVF4096,PQx4,dsub=2",
            "k_factor_rf=4,nprobe=32",
            {"kind": "ivf-pq", "lists": 4096, "code_dims": 2, "probes": 32, "rescore": 4},
        ),
    ],
)
def test_strings_of_faiss(factory, search, numbers):
    spec = IndexSpec.parse(factory, search)
    assert spec == IndexSpec(**numbers)
    assert load_params(None, {"index.factory": factory, "index.search": search}).index.search == (
        search
    )


@pytest.mark.parametrize(
    ("num_labels", "kind"),
    [(1, "flat"), (2_000, "flat"), (2_001, "pq"), (100_000, "pq"), (100_001, "ivf-pq")],
)
def test_the_default_is_chosen_by_the_number_of_labels(num_labels, kind):
    settings = load_params(None).index
    assert (settings.factory, settings.search) == ("auto", "")
    spec = IndexSpec.parse(settings.factory, settings.search, num_labels)
    assert spec == IndexSpec(kind=kind)


@pytest.mark.parametrize(
    "factory",
    [
        "",
        "flat",
        "pq",
        "PQ4",
        "PQx8",
        "PQ8x4",
        "HNSW0",
        "HNSW9999999999",
        "HNSW32,Flat",
        "IVF4096",
        "IVF,Flat",
        "IVF-1,PQx4",
        "IVF,PQx4 ",
        "PQx4,dsub=0",
        "PQx4,dsub=2,dsub=2",
        "Flat\n",
    ],
)
def test_another_factory_is_refused(factory):
    with pytest.raises(ConfigError, match=r'(?s)index\.factory.*fix: .*Flat; PQx4 with .* or "IVF'):
        load_params(None, {"index.factory": factory})


@pytest.mark.parametrize(
    ("factory", "search"),
    [
        ("auto", "nprobe=3"),
        ("Flat", "nprobe=3"),
        ("PQx4", "nprobe=3"),
        ("PQx4", "k_factor_rf=0"),
        ("HNSW32", "efConstruction=9"),
        ("HNSW32", "efSearch=9,efSearch=9"),
        ("IVF,PQx4", "nprobe"),
        ("IVF,PQx4", "nprobe=3,"),
        ("IVF,PQx4", ",nprobe=3"),
        ("IVF,PQx4", "k_factor_rf=3,"),
        ("IVF,PQx4", "k_factor_rf=3;nprobe=3"),
        ("IVF,PQx4", "k_factor_rf=3nprobe=3"),
        ("IVF,PQx4", "nprobe=3,nprobe=3"),
        ("IVF,PQx4", "nprobe=1.5"),
        ("IVF,PQx4", "nprobe=__import__('os')"),
    ],
)
def test_another_search_is_refused(factory, search):
    text = 'HNSW32 with "efSearch=200"; or "IVF,PQx4" with "nprobe=32,k_factor_rf=8"'
    with pytest.raises(ConfigError, match=f"(?s)got: .*{re.escape(search)}.*fix: .*{text}"):
        load_params(None, {"index.factory": factory, "index.search": search})


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_exact_and_most_is_found(rng, kind):
    vectors = _clusters(rng, LABELS)
    queries = _clusters(rng, 40)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind, **THOROUGH))
    scores, labels = index.search(queries, 15)
    wanted_scores, wanted = slow_search(queries, vectors, 15)
    assert recall_with_ties(labels, wanted, scores, wanted_scores.astype(np.float32)) > (
        0.999 if kind == "flat" else 0.95
    )
    exact = np.take_along_axis(queries @ vectors.T, labels, axis=1)
    np.testing.assert_allclose(scores, exact, rtol=1e-4, atol=1e-4)
    assert (np.diff(scores, axis=1) <= 0).all()
    assert all(len(set(row)) == 15 for row in labels.tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_labels", "dim"),
    [
        (1, 1),
        (3, 5),
        (30, 4),
        (90, 7),
    ],
)
def test_few_labels_are_all_found(rng, kind, num_labels, dim):
    """So few that a compressed index scores them all; more results than labels. A graph has the
    links that are shipped: with 4 links, a sixth of such graphs have no way to some label.
    """
    vectors = _clusters(rng, num_labels, dim)
    queries = _clusters(rng, 5, dim)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind))
    scores, labels = index.search(queries, num_labels + 2)
    wanted_scores, wanted = slow_search(queries, vectors, num_labels)
    assert recall_with_ties(labels, wanted, scores, wanted_scores.astype(np.float32)) == 1.0
    assert (labels[:, num_labels:] == -1).all()
    assert np.isneginf(scores[:, num_labels:]).all()


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_ties_come_in_label_order(rng, kind):
    vectors = np.repeat(_clusters(rng, 60), 4, axis=0)[rng.permutation(240)]
    queries = _clusters(rng, 6)
    spec = IndexSpec(kind=kind, **THOROUGH | {"rescore": 10})
    labels = LabelIndex.build(vectors, spec).search(queries, 24)[1]
    assert np.array_equal(labels, slow_search(queries, vectors, 24)[1])


def test_more_candidates_find_more(rng):
    vectors, queries = (rng.normal(size=(n, 32)).astype(np.float32) for n in (3000, 50))
    index = LabelIndex.build(vectors, IndexSpec.parse("PQx4"))
    wanted = slow_search(queries, vectors, 100)[1]
    found = []
    for factor in (1, 4, 16):
        index.spec = IndexSpec.parse("PQx4", f"k_factor_rf={factor}")
        found.append(recall(index.search(queries, 100)[1], wanted))
    assert found == sorted(found)
    assert found[0] < found[2]
    assert found[2] > 0.97


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_mapped_it_answers_the_same(rng, tmp_path, kind):
    vectors = _clusters(rng, LABELS)
    queries = _clusters(rng, 20)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind, **THOROUGH))
    path = tmp_path / "index.faiss"
    index.save(path)
    loaded = LabelIndex.load(path, LABELS, DIM, index.spec, vectors)
    assert loaded.num_labels == LABELS
    assert loaded.dim == DIM
    assert loaded.spec.kind == kind
    for got, expected in zip(loaded.search(queries, 7), index.search(queries, 7), strict=True):
        assert np.array_equal(got, expected)
    LabelIndex.build(vectors, IndexSpec(kind=kind, **THOROUGH)).save(tmp_path / "again.faiss")
    assert (tmp_path / "again.faiss").read_bytes() == path.read_bytes()
    index.save(path)  # over the file that is mapped: what was loaded keeps the old one
    path.unlink()
    assert np.array_equal(loaded.search(queries, 7)[1], index.search(queries, 7)[1])
    if kind in COMPRESSED:
        with pytest.raises(ValueError, match="needs the labels' vectors"):
            LabelIndex.load(tmp_path / "again.faiss", LABELS, DIM, index.spec)


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_damaged_files_are_refused(rng, tmp_path, kind):
    vectors = _clusters(rng, 200)
    path = tmp_path / "index.faiss"
    spec = IndexSpec(kind=kind, links=4, lists=9)
    LabelIndex.build(vectors, spec).save(path)
    whole = path.read_bytes()

    def load(labels: int = 200, dim: int = DIM, other: Kind = kind) -> LabelIndex:
        like = spec.model_copy(update={"kind": other})
        return LabelIndex.load(path, labels, dim, like, vectors[:labels, :dim])

    load()
    cuts = [0, 3, 36, 44, 60, 100, len(whole) // 2, len(whole) - 1]
    for data in [whole[:cut] for cut in cuts] + [whole + b"\0", b"\x80\x04K\x01." + whole]:
        path.write_bytes(data)
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            load()
    path.write_bytes(whole)
    for labels, dim in ((199, DIM), (200, 8)):
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            load(labels, dim)
    for other in set(KINDS) - {kind}:
        with pytest.raises(ArtifactError, match=r"index\.faiss"):
            load(other=other)


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_a_flipped_byte_never_breaks_the_process(rng, tmp_path, kind):
    """Any byte changed: refused, or harmless (a code, a centroid, a link to another node)."""
    vectors = _clusters(rng, 120)
    queries = _clusters(rng, 4)
    path = tmp_path / "index.faiss"
    spec = IndexSpec(kind=kind, links=2, lists=7, rescore=1)
    LabelIndex.build(vectors, spec).save(path)
    whole = path.read_bytes()
    refused = 0
    head = np.arange(120)
    for at in np.concatenate([head, rng.choice(len(whole), size=80)]):
        data = bytearray(whole)
        data[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(data)
        try:
            index = LabelIndex.load(path, 120, DIM, spec, vectors)
        except ArtifactError:
            refused += 1
            continue
        labels = index.search(queries, 6)[1]
        assert labels.max() < 120
        assert labels.min() >= -1
    assert refused > 20


def test_an_id_that_stands_in_two_lists_is_refused(rng, tmp_path):
    vectors = _clusters(rng, 64)
    path = tmp_path / "index.faiss"
    spec = IndexSpec.parse("IVF4,PQx4")
    LabelIndex.build(vectors, spec).save(path)
    data = bytearray(path.read_bytes())
    for wrong in (10**9, -1, None):
        last = int.from_bytes(data[-8:], "little", signed=True)
        value = (last + 1) % 64 if wrong is None else wrong
        path.write_bytes(bytes(data[:-8]) + value.to_bytes(8, "little", signed=True))
        with pytest.raises(ArtifactError, match="each label once"):
            LabelIndex.load(path, 64, DIM, spec, vectors)


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_several_threads_search_at_once(rng, kind):
    vectors = _clusters(rng, LABELS)
    queries = _clusters(rng, 32)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind, **THOROUGH))
    assert not wrong_in_threads(index, queries)


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
def test_one_query_and_many_at_once_are_answered_alike(rng, kind):
    vectors = _clusters(rng, LABELS)
    queries = _clusters(rng, 32)
    index = LabelIndex.build(vectors, IndexSpec(kind=kind, rescore=2))
    together = index.search(queries, 10)[1]
    expected = np.concatenate([index.search(queries[i : i + 1], 10)[1] for i in range(32)])
    assert np.array_equal(together, expected)


def test_many_lists(rng, tmp_path):
    """More lists than are trained at once: centroids of two levels, chosen by codes of
    their own.
    """
    rows, queries = (rng.normal(size=(n, 16)).astype(np.float32) for n in (9600, 40))
    num = FLAT_CENTROIDS + 100
    factory = f"IVF{num},PQx4,dsub=2"
    index = LabelIndex.build(rows, IndexSpec.parse(factory))
    assert index.stored.nlist == num
    wanted = slow_search(queries, rows, 10)[1]
    for probes, least in (
        (num, 0.99),
        (num // 4, 0.85),
    ):
        index.spec = IndexSpec.parse(factory, f"nprobe={probes},k_factor_rf=40")
        assert recall(index.search(queries, 10)[1], wanted) > least
    index.save(tmp_path / "index.faiss")
    loaded = LabelIndex.load(tmp_path / "index.faiss", 9600, 16, index.spec, rows)
    assert np.array_equal(loaded.search(queries, 10)[1], index.search(queries, 10)[1])


def test_labels_in_two_lists_each_are_refused(rng, tmp_path):
    vectors = _clusters(rng, LABELS)
    index = LabelIndex.build(vectors, IndexSpec.parse("IVF20,PQx4", "k_factor_rf=3"))
    stored = index.stored
    faiss = faiss_module()
    wide = np.pad(vectors, ((0, 0), (0, stored.d - DIM)))
    second = np.ascontiguousarray(stored.quantizer.search(wide, 2)[1][:, 1])
    rows = np.arange(LABELS)
    stored.add_core(LABELS, *(faiss.swig_ptr(array) for array in (wide, rows, second)))
    index.save(tmp_path / "index.faiss")
    with pytest.raises(ArtifactError, match="damaged"):
        LabelIndex.load(tmp_path / "index.faiss", LABELS, DIM, index.spec, vectors)


@pytest.mark.parametrize("space", ["both", "de", "clf"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_rows_of_a_space(rng, space, normalize, bias):
    parts = {"de": unit_rows(_clusters(rng, 30)), "clf": _clusters(rng, 30)}
    if bias:
        parts["bias"] = rng.normal(size=30).astype(np.float32)
    whole = label_vectors(parts["de"], parts["clf"], parts.get("bias"), space, normalize)
    rows = Heads(parts, space, normalize, 1.7)
    query = rows.queries(_clusters(rng, 2), _clusters(rng, 2))
    some = np.array([4, 4, 29, 0])
    assert rows.shape == whole.shape
    np.testing.assert_array_equal(rows.take(some), whole[some])
    several = np.stack([some, some[::-1]])  # each query has its own rows
    expected = np.stack([whole[own] @ query_D for own, query_D in zip(several, query, strict=True)])
    np.testing.assert_allclose(rows.scores(query, several), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="needs"):
        Heads({"bias": np.zeros(3, np.float32)}, space, normalize)


def test_rows_of_half_precision(rng):
    vectors = _clusters(rng, LABELS)
    queries = _clusters(rng, 5)
    index = LabelIndex.build(as_heads(vectors.astype(np.float16)), IndexSpec(kind="pq", **THOROUGH))
    assert index.search(queries, 5)[0].dtype == np.float32
    assert recall(index.search(queries, 5)[1], slow_search(queries, vectors, 5)[1]) > 0.9


def test_automatic_lists_and_probes():
    options = IndexSpec()
    assert [options.num_lists(n) for n in (1, 63, 12_941, 1_300_000)] == [1, 1, 202, 18_243]
    assert IndexSpec(lists=4096).num_lists(1000) == 125
    assert [options.num_probes(n) for n in (1, 202, 18_243)] == [1, 16, 1520]


@pytest.mark.parametrize("kind", sorted(COMPRESSED))
@pytest.mark.parametrize("num_labels", [1, 9, 700])
def test_all_cores_build_the_same_bytes_as_one_thread_of_faiss(
    kind, num_labels, rng, tmp_path, monkeypatch
):
    """Also stopped and resumed: finished blocks are read, and nothing is left of them."""
    vectors = _clusters(rng, num_labels)
    spec = IndexSpec(kind=kind)
    heads = as_heads(vectors)
    plain = index_module.empty_index(spec, DIM, num_labels)
    with index_module.faiss_threads(1):
        index_module._train(plain, heads)
        every_label = np.arange(num_labels)
        plain.add(index_module._checked_rows(heads, every_label, plain.d))
    expected = faiss_module().serialize_index(plain)
    monkeypatch.setattr(index_module, "ROWS_AT_ONCE", 100)
    for cores in (1, 2, 5):
        monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
        parts = tmp_path / "parts"

        def stop(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(index_module, "remove", stop)
        with pytest.raises(KeyboardInterrupt):
            LabelIndex.build(vectors, spec, parts=parts)
        assert len(list(parts.iterdir())) == -(-num_labels // 100)
        monkeypatch.setattr(index_module, "remove", remove)
        monkeypatch.setattr(index_module, "write_file", never)
        resumed = LabelIndex.build(vectors, spec, parts=parts)
        monkeypatch.setattr(index_module, "write_file", write_file)
        assert not parts.exists()
        for built in (resumed, LabelIndex.build(vectors, spec)):
            found = faiss_module().serialize_index(built.stored)
            assert np.array_equal(found, expected)


def test_parts_of_other_vectors_are_not_read(rng, tmp_path, monkeypatch):
    monkeypatch.setattr(index_module, "remove", lambda _: None)
    spec = IndexSpec(kind="pq")
    for _ in range(2):
        vectors = _clusters(rng, 60)
        with_parts = LabelIndex.build(vectors, spec, parts=tmp_path)
        plain = LabelIndex.build(vectors, spec)
        found = (faiss_module().serialize_index(one.stored) for one in (with_parts, plain))
        assert np.array_equal(*found)
    assert len(list(tmp_path.iterdir())) == 2


def never(*_, **__):
    raise AssertionError("not needed")
