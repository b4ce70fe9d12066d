"""Ranks on gloo: what they exchange and add up; losses over all labels, clusters and hard negatives
are those of one rank.
"""

import numpy as np
import pytest
import torch
from helpers import rank_processes

from unidec.training.distributed import ALONE, LostRank, Ranks


def test_alone_everything_is_free():
    x = torch.ones(3, 2, requires_grad=True)
    assert ALONE.gather(x, [3]) is x
    assert ALONE.alone
    assert ALONE.is_first
    grad = torch.ones(3)
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = grad
    ALONE.sum_gradients([parameter], complete=[parameter])
    assert parameter.grad is grad
    assert ALONE.norm([torch.full((4,), 2.0), torch.full((9,), 1.0)], []) == 5
    assert ALONE.any(True, False) == [True, False]
    array = np.ones(3)
    assert ALONE.gather_array(array) is array
    assert ALONE.share("a") == "a"
    ALONE.sum_rows([])
    ALONE.barrier()
    ALONE.close()
    assert Ranks.from_environment("cpu") is ALONE


def test_an_error_of_the_backward_pass_is_its_own_unless_a_sum_failed():
    ranks = Ranks(0, 2)
    with pytest.raises(RuntimeError, match="a bug"), ranks.exchanging():
        raise RuntimeError("a bug")
    ranks._failures.append(RuntimeError("connection closed"))
    with pytest.raises(LostRank, match="connection closed"), ranks.exchanging():
        raise RuntimeError("of a callback")


@pytest.mark.parametrize(
    ("count", "world"),
    [
        (10, 3),
        (2, 5),
        (0, 2),
        (7, 1),
    ],
)
def test_parts_cover_everything_once(count, world):
    parts = [Ranks(rank, world).part(count) for rank in range(world)]
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(count))
    sizes = [end - begin for begin, end in parts]
    assert sizes == Ranks(0, world).sizes(count)
    assert max(sizes) - min(sizes) <= 1
    ids = np.arange(0, count, 2)
    among = Ranks(0, world).sizes_among(ids, count)
    assert among == [sum(begin <= i < end for i in ids) for begin, end in parts]


def assert_sums(values):
    """Of `losses_by_columns` and `encoder_gradients`."""
    losses = {key: float(value) for key, value in values.items() if key.startswith("loss ")}
    assert len(losses) == len(rank_processes.SIZES) * len(rank_processes.LOSSES_BY_COLUMNS)
    assert {key: value for key, value in losses.items() if not value <= 1e-9} == {}
    for unused in (False, True):
        assert len(values[f"sum, unused {unused}"]) == 3 * 3
        assert values[f"sum, unused {unused}"].all()
        assert values[f"names, unused {unused}"]


@pytest.mark.slow
def test_losses_over_all_labels_on_four_ranks(rng, tmp_path, warm_python):
    calls = {"losses_by_columns": {"seed": int(rng.integers(2**31))}, "encoder_gradients": {}}
    for values in rank_processes.run(warm_python, 4, "several", tmp_path, calls=calls):
        assert_sums(values)


def test_collectives_and_losses_over_all_labels(rng, tmp_path, warm_python):
    calls = {
        "collectives": {},
        "losses_by_columns": {"seed": int(rng.integers(2**31))},
        "encoder_gradients": {},
    }
    found = rank_processes.run(warm_python, 2, "several", tmp_path, calls=calls)
    for rank, values in enumerate(found):
        assert_sums(values)
        facts = {
            key: value for key, value in values.items() if value.shape == () and value.dtype == bool
        }
        assert len(facts) == 24 and all(facts.values()), (
            rank,
            [k for k, v in facts.items() if not v],
        )
        assert values["sums"].tolist() == [3] * 6 + [0, 1, 2, 3] + [5] * 2 + [2] * 3
        for width in (3, 1):
            assert values[f"rows of {width}"].tolist() == [0, 1, 4, 7]
            assert values[f"values of {width}"].tolist() == [[r] * width for r in (0, 1, 4, 7)]
            # rank 0 has 1, 2, 3 for rows 1, 4, 7; rank 1 has 2, 4 for rows 0, 4
            assert values[f"gradients of {width}"].tolist() == [[g] * width for g in (2, 1, 6, 3)]
        assert (
            values["norm"] == 5
            and np.isnan(values["norm of a nan"])
            and values["any"].tolist() == [True, False, True]
        )


def refresh_input(rng, folder, num_points, num_labels):
    """Writes vectors, rows and cells for `rank_processes.refresh_parts`."""
    folder.mkdir()
    cells = {
        name: np.unique(rng.integers(0, [num_points + 5, num_labels], (300, 2)), axis=0).T
        for name in "pf"
    }
    np.savez(
        folder / "vectors.npz",
        points=rng.normal(size=(num_points, 6)).astype(np.float32),
        label=rng.normal(size=(num_labels, 6)).astype(np.float32),
        tied=rng.integers(-1, 2, (num_labels, 6)).astype(np.float32),
        rows=rng.permutation(num_points + 5)[:num_points],
        positive=cells["p"],
        filtered=cells["f"],
    )


@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (2, [(203, 41)]),
        (3, [(200, 7), (2, 2)]),
    ],
)
def test_clusters_and_negatives_are_those_of_one_rank(rng, tmp_path, warm_python, world, sizes):
    for points, labels in sizes:
        refresh_input(rng, tmp_path / f"{points}-{labels}", points, labels)
    alone = rank_processes.all_refresh_parts(ALONE, tmp_path, sizes)
    for values in rank_processes.run(
        warm_python, world, "all_refresh_parts", tmp_path, sizes=sizes
    ):
        for key, expected in alone.items():
            if ": figures" in key or key.endswith("report"):
                assert values[key] == pytest.approx(expected, rel=1e-5), key
            else:
                assert np.array_equal(values[key], expected), key
