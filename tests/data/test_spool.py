"""Arrays, tables and matrices in files against those in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy.sparse import csr_matrix, random_array

from unidec.data import spool
from unidec.data.array_file import load_csr, row_blocks, write_csr
from unidec.data.raw import TEXT_SCHEMA, text_table
from unidec.data.spool import Numbers, csr_on_disk, table_on_disk, take_pairs, take_texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def some_matrix(shape: tuple[int, int], density: float, seed: int) -> csr_matrix:
    rng = np.random.default_rng(seed)
    matrix = csr_matrix(random_array(shape, density=density, rng=rng, dtype=np.float32))
    matrix.sort_indices()
    return matrix


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_numbers_are_those_that_were_added(folder: Path, dtype: type, monkeypatch) -> None:
    monkeypatch.setattr(spool, "BLOCK_ROWS", 7)
    rng = np.random.default_rng(0)
    pieces = [rng.integers(0, 99, size) for size in (0, 5, 1, 40)]
    by_array = Numbers(dtype, folder)
    one_by_one = Numbers(dtype, folder)
    for piece in pieces:
        by_array.add(piece)
        one_by_one.extend(piece.tolist())
    expected = np.concatenate(pieces).astype(dtype)
    for numbers in (by_array.array(), one_by_one.array()):
        assert numbers.dtype == dtype
        assert numbers.tolist() == expected.tolist()
    assert not Numbers(dtype, folder).array().size
    assert not list(folder.iterdir()), "the files have no names"


def test_tables_and_their_rows(folder: Path) -> None:
    rng = np.random.default_rng(1)
    parts = [text_table([f"{n}-{row}" for row in range(n)]) for n in (3, 0, 50)]
    table = table_on_disk(iter(parts), TEXT_SCHEMA, folder)
    assert table.equals(pa.concat_tables(parts))
    rows = rng.permutation(53)[:20]
    assert take_texts(table, rows, folder).equals(table.take(rows))
    nothing = table_on_disk(iter([]), TEXT_SCHEMA, folder)
    assert (nothing.num_rows, nothing.schema) == (0, TEXT_SCHEMA)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("shape", [(40, 9), (1, 1), (5, 0), (0, 5), (30, 300)])
def test_a_matrix_of_sorted_pairs(folder: Path, shape: tuple[int, int], size: int) -> None:
    """Also with repeated pairs, of which the first is kept, and rows without pairs."""
    expected = some_matrix(shape, 0.2, size)
    expected.data[:] = 1 + np.arange(expected.nnz)
    pairs = expected.tocoo()
    again_P = np.sort(np.concatenate([np.arange(pairs.nnz), np.arange(0, pairs.nnz, 3)]))
    columns = (pairs.row[again_P].astype(np.int64), pairs.col[again_P], pairs.data[again_P])
    table = pa.table(dict(zip("rcv", columns, strict=True)))
    found = csr_on_disk(iter(table.to_batches(size)), shape, np.float32, folder)
    assert found.shape == shape
    assert (found.indptr.tolist(), found.indices.tolist(), found.data.tolist()) == (
        expected.indptr.tolist(),
        expected.indices.tolist(),
        expected.data.tolist(),
    )
    rows = np.random.default_rng(2).permutation(shape[0])[: shape[0] // 2]
    taken = take_pairs(found, rows, folder)
    np.testing.assert_array_equal(taken.toarray(), expected.toarray()[rows])


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_matrices_in_blocks_of_rows_are_stored_as_a_whole(tmp_path: Path, most: int) -> None:
    matrix = some_matrix((60, 20), 0.15, 3)
    bounds = list(row_blocks(matrix.indptr, most, 11))
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == 60
    for start, end in bounds:
        assert end - start == 1 or (end - start <= 11 and matrix[start:end].nnz <= most)
    blocks = [csr_matrix(matrix[start:end]) for start, end in bounds]
    for block in blocks:  # sorted by the writer
        block.indices[:] = block.indices[::-1].copy() if block.shape[0] == 1 else block.indices
        block.data[:] = block.data[::-1].copy() if block.shape[0] == 1 else block.data
        block.has_sorted_indices = False
    assert write_csr(tmp_path, "x_", iter(blocks), np.float32) == matrix.nnz
    found = load_csr(tmp_path, "x_", matrix.shape, np.float32, check=True)
    np.testing.assert_array_equal(found.toarray(), matrix.toarray())
