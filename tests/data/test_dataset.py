"""The stored data set gives back what went in, splits by family, and refuses damage."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_matrix

from unidec.data.dataset import XMCDataset, write_dataset
from unidec.data.formats import read_raw
from unidec.data.raw import RawData, hold_out, make_slice, text_table
from unidec.errors import ArtifactError


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def families(pairs: np.ndarray) -> list[set[int]]:
    """Queries linked through filtered labels, by merging sets one by one."""
    groups: list[tuple[set[int], set[int]]] = []
    for query, row in enumerate(pairs):
        queries = {query}
        labels = set(np.flatnonzero(row).tolist())
        apart = []
        for other in groups:
            if other[1] & labels:
                queries = queries | other[0]
                labels = labels | other[1]
            else:
                apart.append(other)
        groups = [*apart, (queries, labels)]
    return [queries for queries, _ in groups]


def test_gives_back_texts_pairs_and_uids(tiny_raw: RawData, tiny_dataset: XMCDataset) -> None:
    d = tiny_dataset
    assert d.num_queries == 60
    assert d.num_labels == 40
    assert d.name == "tiny"
    queries = [row for split in ("train", "test") for row in tiny_raw.queries[split].to_pylist()]
    assert d.query_uids() == [row["uid"] for row in queries]
    assert d.query_texts() == [row["title"] for row in queries]
    assert d.query_texts([5, 2], "title+content") == [
        f"{queries[i]['title']} {queries[i]['content']}" for i in (5, 2)
    ]
    assert d.label_texts(np.array([3])) == [tiny_raw.labels.to_pylist()[3]["title"]]
    assert d.label_uids([1]) == ["label-1"]
    for which, texts in (
        ("queries", d.query_texts()),
        ("labels", d.label_texts()),
    ):
        batches = list(d.text_batches(which, "title", 7))
        assert [len(batch) for batch in batches[:-1]] == [7] * (len(batches) - 1)
        assert [text for batch in batches for text in batch] == texts
    both = np.vstack([tiny_raw.relevance[s].toarray() for s in ("train", "test")])
    np.testing.assert_array_equal(d.relevance.toarray(), both)
    filtered = np.vstack([tiny_raw.filter_pairs[s].toarray() for s in ("train", "test")])
    np.testing.assert_array_equal(d.filter_pairs.toarray(), filtered)
    assert d.relevance.dtype == np.float32
    assert d.filter_pairs.dtype == bool
    assert not d.relevance.data.flags.writeable
    assert not d.relevance.indices.flags.writeable
    with pytest.raises(ValueError, match="text must be"):
        d.query_texts([0], "body")  # type: ignore[arg-type]


def test_rows_divide_the_queries(slice_dataset: XMCDataset) -> None:
    rows = [slice_dataset.rows(split) for split in ("train", "validation", "test")]
    assert sorted(np.concatenate(rows).tolist()) == list(range(slice_dataset.num_queries))
    assert rows[2].tolist() == list(range(2000, 2500))
    assert rows[1].size == 100
    assert slice_dataset.manifest["meta"]["splits"] == {
        "train": 1900,
        "validation": 100,
        "test": 500,
    }


def test_empty_parts_of_a_text_are_dropped(
    tmp_path: Path, raw_factory: Callable[..., RawData]
) -> None:
    raw = raw_factory(3, 0, 2)
    raw = replace(
        raw,
        queries={
            **raw.queries,
            "train": text_table(["a", "b", "c"], ["x", "", "z "], ["", "y", "w"]),
        },
    )
    dataset = write_dataset(tmp_path / "d", raw)
    assert dataset.query_texts(text="title+content") == ["x", "y", "z  w"]


def test_rebuild_is_byte_identical_whatever_the_chunks(
    tiny_raw: RawData, tiny_dataset: XMCDataset, tmp_path: Path
) -> None:
    def rechunk(table: pa.Table) -> pa.Table:
        return pa.concat_tables(
            [
                table.slice(0, 3),
                table.slice(3, 11),
                table.slice(14),
            ]
        )

    queries = {split: rechunk(table) for split, table in tiny_raw.queries.items()}
    again = write_dataset(tmp_path / "d", replace(tiny_raw, queries=queries), validation_share=0.1)
    assert bytes_of(again.path) == bytes_of(tiny_dataset.path)
    assert again.sha256 == tiny_dataset.sha256
    other = write_dataset(tmp_path / "e", tiny_raw, validation_share=0.1, split_seed=1)
    assert other.sha256 != tiny_dataset.sha256


@pytest.mark.parametrize("name", ["queries.arrow", "relevance_indices.npy", "split.npy"])
def test_damage_is_refused(tiny_dataset: XMCDataset, tmp_path: Path, name: str) -> None:
    path = tmp_path / "d"
    shutil.copytree(tiny_dataset.path, path)
    data = (path / name).read_bytes()
    (path / name).write_bytes(data[: len(data) // 2])
    for verify in (True, False):
        with pytest.raises(ArtifactError, match=name):
            XMCDataset.open(path, verify=verify)
    (path / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=name):
        XMCDataset.open(path)


def test_indices_out_of_range_are_refused_though_the_hashes_fit(
    tiny_dataset: XMCDataset, tmp_path: Path
) -> None:
    from unidec.data.storage import read_manifest, write_manifest

    path = tmp_path / "d"
    shutil.copytree(tiny_dataset.path, path)
    indices = np.load(path / "relevance_indices.npy")
    indices[0] = 40
    np.save(path / "relevance_indices.npy", indices)
    meta = read_manifest(path, "dataset", 1, verify=False)["meta"]
    (path / "manifest.json").unlink()
    write_manifest(path, "dataset", 1, meta)
    with pytest.raises(ArtifactError, match="relevance pairs"):
        XMCDataset.open(path)


def test_validation_split_keeps_families_together(slice_raw: RawData) -> None:
    pairs = slice_raw.filter_pairs["train"]
    held = hold_out(slice_raw.queries["train"], pairs, 0.1, 3)
    assert abs(held.sum() - 200) <= 2
    dense = pairs.toarray()
    assert not (dense[held].any(axis=0) & dense[~held].any(axis=0)).any()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 30),
    st.integers(1, 6),
    st.floats(0, 0.6),
    st.floats(0, 0.49),
)
def test_hold_out_against_families_found_slowly(
    seed: int, rows: int, labels: int, density: float, share: float
) -> None:
    pairs = np.random.default_rng(seed).random((rows, labels)) < density
    text_of = np.random.default_rng(seed + 1).integers(0, 2 * rows + 1, rows)
    queries = text_table([f"u{row}" for row in range(rows)], [f"text {text}" for text in text_of])
    held = hold_out(queries, csr_matrix(pairs), share, seed)
    expected = hold_out(queries, csr_matrix(pairs), share, seed)
    np.testing.assert_array_equal(held, expected)
    has_text = text_of[:, None] == np.arange(2 * rows + 1)
    groups = families(np.hstack([pairs, has_text]))
    for group in groups:
        assert len({bool(held[query]) for query in group}) == 1
    assert held.sum() <= max(1, round(share * rows), min(map(len, groups), default=0))
    if share > 0 and len(groups) > 1:
        assert 0 < held.sum() < rows
    else:
        assert not held.any()


def test_hold_out_depends_on_seed_and_uid_not_on_position() -> None:
    none = csr_matrix((200, 1), dtype=bool)
    uids = [f"u{row}" for row in range(200)]
    queries = text_table(uids, uids)
    held = hold_out(queries, none, 0.2, 0)
    assert held.sum() == 40
    assert (held != hold_out(queries, none, 0.2, 1)).any()
    order = np.random.default_rng(0).permutation(200)
    np.testing.assert_array_equal(hold_out(queries.take(order), none, 0.2, 0), held[order])


def test_a_validation_split_in_the_data_is_kept(tiny_raw: RawData, tmp_path: Path) -> None:
    named = replace(
        tiny_raw,
        queries={**tiny_raw.queries, "validation": text_table(["v"], ["text"])},
        relevance={**tiny_raw.relevance, "validation": csr_matrix(np.eye(1, 40, dtype=np.float32))},
        filter_pairs={**tiny_raw.filter_pairs, "validation": csr_matrix((1, 40), dtype=bool)},
    )
    dataset = write_dataset(tmp_path / "d", named, validation_share=0.3)
    assert dataset.query_uids(dataset.rows("validation")) == ["v"]
    assert dataset.rows("validation").tolist() == [48]


def test_slices_keep_the_labels_that_occur(slice_raw: RawData) -> None:
    used = np.zeros(slice_raw.num_labels, dtype=bool)
    for split in ("train", "test"):
        used[slice_raw.relevance[split].indices] = True
        assert slice_raw.filter_pairs[split].shape == slice_raw.relevance[split].shape
    assert used.all()
    again = make_slice(slice_raw, 10, 5)
    assert [again.queries[s].num_rows for s in ("train", "test")] == [10, 5]
    first = slice_raw.relevance["train"][0]
    names = [slice_raw.labels["uid"][i].as_py() for i in first.indices]
    assert [again.labels["uid"][i].as_py() for i in again.relevance["train"][0].indices] == names


@pytest.mark.parametrize(
    "sizes",
    [
        (1, 0, 1),
        (2, 1, 1),
        (3, 2, 5),
    ],
)
def test_the_smallest_data_is_legal(
    tmp_path: Path, raw_factory: Callable[..., RawData], sizes: tuple
) -> None:
    dataset = write_dataset(tmp_path / "d", raw_factory(*sizes))
    opened = XMCDataset.open(dataset.path)
    assert opened.num_labels == sizes[2]
    assert opened.rows("train").size >= 1
    assert repr(opened).startswith("XMCDataset('tiny'")


def test_held_out_families_are_not_larger_than_the_rest() -> None:
    """Half the families have one query, half have five: each kind is drawn about as often."""
    sizes = np.repeat([1, 5], 400)
    family_N = np.repeat(np.arange(sizes.size), sizes)
    pairs = csr_matrix((np.ones(family_N.size, bool), (np.arange(family_N.size), family_N)))
    uids = [f"q{i}" for i in range(family_N.size)]
    held = hold_out(text_table(uids, uids), pairs, 0.2, seed=3)
    drawn = np.unique(family_N[held])
    assert held.mean() == pytest.approx(0.2, abs=0.01)
    assert (sizes[drawn] == 5).mean() == pytest.approx(0.5, abs=0.12)  # 3 sigma of about 160 draws


def test_no_family_dominates_what_is_held_out() -> None:
    family_N = np.concatenate([np.zeros(30, np.int64), np.arange(1, 1001)])
    pairs = csr_matrix((np.ones(family_N.size, bool), (np.arange(family_N.size), family_N)))
    uids = [f"q{i}" for i in range(family_N.size)]
    queries = text_table(uids, uids)
    for seed in range(20):
        assert not hold_out(queries, pairs, 0.1, seed)[:30].any()


def test_a_text_that_occurs_twice_is_in_one_split(tmp_path: Path) -> None:
    """Otherwise a random test split would consist of training queries."""
    rows = [{"id": str(row), "text": f"text {row // 2}"} for row in range(200)]
    pairs = [{"query_id": row["id"], "label_id": "a"} for row in rows]
    tables = {
        "queries": rows,
        "labels": [{"id": "a", "text": "label"}],
        "pairs": pairs,
    }
    for name, table in tables.items():
        pacsv.write_csv(pa.Table.from_pylist(table), tmp_path / f"{name}.csv")
    raw = read_raw(tmp_path)
    texts = {split: set(queries["title"].to_pylist()) for split, queries in raw.queries.items()}
    assert raw.queries["test"].num_rows == 40
    assert not texts["train"] & texts["test"]
