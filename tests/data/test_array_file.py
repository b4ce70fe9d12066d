"""Arrays written as a stream: numpy's own bytes, whatever the block."""

from __future__ import annotations

import numpy as np
import pytest

from unidec.data import array_file


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.float32])
@pytest.mark.parametrize("sizes", [[], [0], [5], [1, 0, 1000, 3]])
def test_pieces_give_the_bytes_of_the_whole(tmp_path, dtype, sizes):
    pieces = [np.arange(size) + 7 for size in sizes]
    with array_file.growing_array(tmp_path / "grown.npy", dtype) as add:
        for piece in pieces:
            add(piece)
    np.save(tmp_path / "whole.npy", np.concatenate([np.zeros(0, np.int64), *pieces]).astype(dtype))
    assert (tmp_path / "grown.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()


def test_a_piece_may_have_gaps_in_memory(tmp_path):
    with array_file.growing_array(tmp_path / "x.npy", np.int32) as add:
        add(np.arange(10, dtype=np.int32)[::3])
    expected = [0, 3, 6, 9]
    assert np.load(tmp_path / "x.npy").tolist() == expected


def test_a_failure_closes_the_file_and_passes_on(tmp_path):
    with pytest.raises(KeyError), array_file.growing_array(tmp_path / "x.npy", np.int32) as add:
        raise KeyError("stop")
    with pytest.raises(ValueError, match="closed"):
        add(np.zeros(1))
