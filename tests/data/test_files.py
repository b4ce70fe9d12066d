"""Raw files in blocks of lines against the whole file at once."""

from __future__ import annotations

import gzip
import tracemalloc

import numpy as np
import pytest

from unidec.data import table_file
from unidec.data.formats import read_raw
from unidec.data.formats.files import Source, read_sparse_text
from unidec.errors import DataError

CONTENTS = [
    b"",
    b"\n",
    b"a",
    b"a\n",
    b"\n\n",
    b"\xef\xbb\xbfone\ntwo\n",
    b"\xef\xbb\xbf",
    b"one\r\ntwo\r\r\n\rthree\n",
    "Größe\n漢字 🙂\n\n  two  spaces \nlast".encode(),
    b"good\nbad \xff byte\ngood\n",
    b"".join(b"line %d\n" % n for n in range(100)),
    b"x" * 100,
]


def slow_texts(content: bytes) -> list[str]:
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines]


@pytest.mark.parametrize("size", [1, 2, 1 << 12])
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_texts_and_blocks_equal_the_whole_file(tmp_path, monkeypatch, content, size, suffix):
    monkeypatch.setattr(table_file, "BLOCK_ROWS", size)
    path = tmp_path / f"Y.txt{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    source = Source(tmp_path)
    expected = slow_texts(content)
    texts = source.texts(path, 7)
    assert texts["title"].to_pylist() == expected
    assert texts["uid"].to_pylist() == [str(7 + row) for row in range(len(expected))]
    assert texts["content"].to_pylist() == [""] * len(expected)
    bad = [number for number, line in enumerate(content.split(b"\n"), 1) if b"\xff" in line]
    found = source.samples.get("text that is not UTF-8", [])
    assert [int(sample.split(":")[1].split()[0]) for sample in found] == bad


def sparse(tmp_path, content: bytes, num_queries: int, num_labels: int):
    (tmp_path / "trn_X_Y.txt").write_bytes(content)
    source = Source(tmp_path)
    return source, read_sparse_text(source, tmp_path / "trn_X_Y.txt", (num_queries, num_labels))


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_sparse_text(tmp_path, end):
    rng = np.random.default_rng(2)
    rows = [
        sorted(rng.choice(50, rng.integers(0, 6), replace=False).tolist()) for _ in range(30)
    ] + [[7]]
    body = b"\n".join(
        b" ".join(b"%d:%.2f" % (label, label / 7 + 0.5) for label in row) for row in rows
    )
    source, pairs = sparse(tmp_path, b"31 50\n" + body + end, 31, 50)
    query_P = pairs.query_P
    label_P = pairs.label_P
    value_P = pairs.value_P
    places = pairs.at
    assert not source.count
    assert list(zip(query_P, label_P, strict=True)) == [
        (q, label) for q, row in enumerate(rows) for label in row
    ]
    np.testing.assert_allclose(value_P, label_P / 7 + 0.5, atol=0.006)
    expected = [f"trn_X_Y.txt:{query + 2}" for query in query_P]
    assert places(np.arange(len(query_P))) == expected


def test_faults_of_sparse_text_name_their_line(tmp_path):
    source, pairs = sparse(tmp_path, b"4 9\n1:1\n\n2:1 nonsense 3:1\n12345678901:1\n", 4, 9)
    assert source.samples["not `label:relevance`"][0].startswith("trn_X_Y.txt:4")
    assert list(zip(pairs.query_P, pairs.label_P, strict=True)) == [
        (0, 1),
        (2, 2),
        (2, 3),
        (3, 12345678901),
    ]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "not a header"),
        (b"x y\n", "not a header"),
        (b"3 9\n1:1\n", "does not match the texts"),
        (b"2 9\n1:1\n", "1 rows"),
        (b"2 9\n1:1\n\n\n", "3 rows"),
        (b"2 9", "0 rows"),
    ],
)
def test_row_counts_of_sparse_text(tmp_path, content, match):
    with pytest.raises(DataError, match=match):
        sparse(tmp_path, content, 2, 9)


def test_reading_takes_memory_for_texts_and_pairs_but_not_for_the_files(tmp_path):
    """Python's part of the memory (Arrow's own is not traced): no list of all texts, no whole file,
    no uid a row.
    """
    rows = 40_000
    text = ("some words of a text " * 3).strip()
    for name in ("Y.txt", "trn_X.txt", "tst_X.txt"):
        (tmp_path / name).write_bytes(b"".join(f"{text} {row}\n".encode() for row in range(rows)))
    pairs = b"".join(b"%d:1 %d:1\n" % (row // 2, row // 2 + 1) for row in range(rows))
    for name in ("trn_X_Y.txt", "tst_X_Y.txt"):
        (tmp_path / name).write_bytes(b"%d %d\n" % (rows, rows) + pairs)
    read_raw(tmp_path)
    tracemalloc.start()
    try:
        raw = read_raw(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    num_pairs = sum(matrix.nnz for matrix in raw.relevance.values())
    assert num_pairs == 4 * rows
    assert peak < 60 * num_pairs + (4 << 20), f"{peak:,} bytes"
    assert peak < 3 * rows * len(text), "the texts alone would take more as Python strings"
