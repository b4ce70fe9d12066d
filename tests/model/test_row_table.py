"""Row tables and their optimiser against torch's optimisers on the same gradients."""

import numpy as np
import pytest
import torch

from unidec.model.row_table import RowTable
from unidec.training.row_optim import RowAdam

ROWS, WIDTH, LR = 30, 5, 0.05


@pytest.fixture
def table(rng):
    """In float64: torch's optimisers round in another order."""
    table = RowTable(ROWS, WIDTH).double().train()
    table.weight.copy_(torch.from_numpy(rng.normal(size=(ROWS, WIDTH))))
    return table


def random_rows(rng, count=8):
    return torch.from_numpy(rng.choice(ROWS, size=count, replace=False))


def random_target(rng, count=8):
    """No entry near 0: SparseAdam's epsilon stands at another place, which tiny gradients would show."""
    target = rng.normal(size=(count, WIDTH))
    return torch.from_numpy(target + np.sign(target) * 0.5)


def loss_of(rows_UD, target_UD):
    return (rows_UD * target_UD).sum() + 0.1 * torch.sin(rows_UD).sum()


def test_rows_equal_sparse_adam(table, rng):
    reference = torch.nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    reference.weight.data.copy_(table.weight)
    theirs, ours = torch.optim.SparseAdam(reference.parameters(), lr=LR), RowAdam(table, LR)
    for step in range(12):
        rows, target = random_rows(rng), random_target(rng)
        factor = 1 - step / 20
        theirs.param_groups[0]["lr"] = LR * factor
        theirs.zero_grad()
        loss_of(reference(rows), target).backward()
        theirs.step()
        loss_of(table.gather(rows), target).backward()
        ours.step(step + 1, factor)
    torch.testing.assert_close(table.weight.detach(), reference.weight.detach(), rtol=1e-6, atol=1e-6)


def test_all_rows_equal_adam(table, rng):
    reference = table.weight.detach().clone().requires_grad_()
    theirs, ours = torch.optim.Adam([reference], lr=LR), RowAdam(table, LR)
    for step in range(12):
        target = random_target(rng, ROWS)
        theirs.zero_grad()
        loss_of(reference, target).backward()
        theirs.step()
        loss_of(table.gather(None), target).backward()
        ours.step(step + 1, 1.0)
    torch.testing.assert_close(table.weight.detach(), reference.detach(), rtol=1e-6, atol=1e-6)


def test_some_rows_then_all_rows_share_their_moments(table, rng):
    """A table used by rows in some steps and whole in others is one Adam: rows that are always used equal torch's."""
    reference = table.weight.detach().clone().requires_grad_()
    theirs, ours = torch.optim.Adam([reference], lr=LR), RowAdam(table, LR)
    every = torch.arange(ROWS)
    for step in range(6):
        target = random_target(rng, ROWS)
        theirs.zero_grad()
        loss_of(reference, target).backward()
        theirs.step()
        order = torch.from_numpy(rng.permutation(ROWS))
        rows = None if step % 2 else every[order]
        loss_of(table.gather(rows), target if rows is None else target[order]).backward()
        ours.step(step + 1, 1.0)
    torch.testing.assert_close(table.weight.detach(), reference.detach(), rtol=1e-6, atol=1e-6)


def test_rows_not_used_are_not_touched(table, rng):
    optimiser = RowAdam(table, LR)
    for step in range(5):
        before = [t.detach().clone() for t in (table.weight, *optimiser.state().values())]
        rows = random_rows(rng)
        loss_of(table.gather(rows), random_target(rng)).backward()
        optimiser.step(step + 1, 1.0)
        others = np.setdiff1d(np.arange(ROWS), rows.numpy())
        for was, now in zip(before, (table.weight, *optimiser.state().values()), strict=True):
            assert torch.equal(was[others], now[others])
            assert not torch.equal(was[rows], now[rows])


def test_scale_is_a_scaled_gradient(table, rng):
    other = RowTable(ROWS, WIDTH).double().train()
    other.weight.copy_(table.weight)
    rows, target = random_rows(rng), random_target(rng)
    (loss_of(table.gather(rows), target) * 0.125).backward()
    loss_of(other.gather(rows), target).backward()
    for optimiser, scale in ((RowAdam(table, LR), 1.0), (RowAdam(other, LR), torch.tensor(0.125))):
        optimiser.step(1, 1.0, scale)
    assert torch.equal(table.weight, other.weight)


def test_gathered_twice_in_a_step_is_an_error(table):
    table.gather(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="once a training step"):
        table.gather(torch.tensor([3]))
    table.forget()
    table.gather(torch.tensor([3]))


def test_a_step_without_a_gradient_changes_nothing_and_forgets(table):
    before = table.weight.detach().clone()
    optimiser = RowAdam(table, LR)
    optimiser.step(1, 1.0)  # nothing gathered
    table.gather(torch.tensor([1, 2]))  # gathered, no backward
    optimiser.step(2, 1.0)
    assert torch.equal(table.weight, before)
    assert table.used is None


def test_only_training_keeps_what_it_gathers(table):
    rows = torch.tensor([4, 0])
    with torch.no_grad():
        assert torch.equal(table.gather(rows), table.weight[rows])
    table.eval()
    assert torch.equal(table.gather(rows), table.weight[rows])
    assert not table.gather(rows).requires_grad
    assert table.used is None
    assert table.num_rows == ROWS


def test_no_rows_are_fine(table):
    optimiser, before = RowAdam(table, LR), table.weight.detach().clone()
    table.gather(torch.zeros(0, dtype=torch.int64)).sum().backward()
    optimiser.step(1, 1.0)
    assert torch.equal(table.weight, before)
