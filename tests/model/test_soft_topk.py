"""The soft top-k operator: threshold against bisection on wide and narrow gaps, gradient against
differences.
"""

import numpy as np
import pytest
import torch

from unidec.model import soft_topk as module
from unidec.model.pairs import MASKED, Pairs
from unidec.model.soft_topk import soft_topk, thresholds

NONE = torch.empty(0, dtype=torch.int64)


def gap(levels):
    """Rows of 1,000 entries: `levels` gives (value, how many), the rest is -18."""
    x = np.full((3, 1000), -18.0)
    begin = 0
    for value, count in levels:
        x[:, begin : begin + count] = value
        begin += count
    return x


def rows(name, rng):
    return {
        "cosines": lambda: rng.normal(size=(8, 3000)) * 1.8,
        "anything": lambda: (rng.random((8, 500)) * 2 - 1) * 18,
        "all alike": lambda: np.zeros((3, 100)),
        "k far above": lambda: gap([(18, 5)]),
        "fewer than k far above": lambda: gap([(18, 3)]),
        "more than k far above": lambda: gap([(18, 200)]),
        "three levels": lambda: gap([(18, 4), (0, 300)]),
        "heavy tails": lambda: rng.normal(size=(8, 700)) ** 3,
        "one more than k": lambda: rng.normal(size=(8, 6)) * 5,
    }[name]()


def bisection(x, k):
    """The t of a float64 row with as many sigmoids lost below as gained above, where float64 can
    tell.
    """
    order = np.argsort(-x)
    head = x[order[:k]]
    rest = x[order[k:]]
    low = -x.max() - 60
    high = -x.min() + 60
    for _ in range(200):
        t = (low + high) / 2
        low, high = (
            (t, high)
            if (1 / (1 + np.exp(-rest - t))).sum() < (1 / (1 + np.exp(head + t))).sum()
            else (low, t)
        )
    return low


CASES = (
    "cosines",
    "anything",
    "all alike",
    "k far above",
    "fewer than k far above",
    "more than k far above",
    "three levels",
    "heavy tails",
    "one more than k",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_threshold_equals_bisection(name, dtype, rng):
    x = torch.from_numpy(rows(name, rng)).to(dtype)
    before = x.clone()
    t = thresholds(x, 5)
    assert torch.equal(x, before)
    expected = [bisection(row, 5) for row in x.double().numpy()]
    np.testing.assert_allclose(
        t.double(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-10
    )
    torch.testing.assert_close(
        torch.sigmoid(x + t.unsqueeze(1)).sum(1),
        torch.full((len(x),), 5.0, dtype=dtype),
        rtol=2e-6,
        atol=0,
    )


def test_a_device_that_takes_all_steps_ends_where_the_host_stops(rng, monkeypatch):
    x = torch.from_numpy(rows("anything", rng))
    few = thresholds(x.clone(), 5)
    monkeypatch.setattr(module, "STEPS", 40)
    torch.testing.assert_close(
        thresholds(x.clone(), 5),
        few,
        rtol=0,
        atol=1e-12,
    )


def test_rows_with_k_labels_or_fewer_are_free_and_masks_do_not_count(rng):
    x = torch.from_numpy(rng.normal(size=(3, 9)))
    x[0, 3:], x[1, 5:] = MASKED, MASKED  # 3 and 5 entries are left
    t = thresholds(x.clone(), 5)
    assert t[0] == t[1] == -MASKED
    assert t[2].abs() < 10
    some = x[2:, torch.randperm(9)[:7]]
    masked = x[2:].clone()
    masked[:, :2] = MASKED
    expected = thresholds(x[2:, 2:].clone(), 3)
    np.testing.assert_allclose(thresholds(masked, 3), expected, rtol=1e-12)
    assert (thresholds(some.clone(), 7) == -MASKED).all()


def slow_loss(x, positive, k):
    """Numbers only: bisection, then the cross entropy."""
    total = 0.0
    for row, is_positive in zip(x, positive, strict=True):
        t = bisection(row, k)
        total += np.log1p(np.exp(-row[is_positive] - t)).sum()
    return total / len(x)


@pytest.mark.parametrize("k", [1, 3, 5])
def test_gradient_equals_differences_of_the_bisected_loss(k, rng):
    x = rng.normal(size=(3, 8)) * 3
    positive = rng.random((3, 8)) < 0.4
    positive[:, 0] = True
    logit = torch.from_numpy(x).requires_grad_()
    row, col = torch.from_numpy(positive).nonzero(as_tuple=True)
    loss = soft_topk(logit, Pairs(row, col, torch.ones(len(row)), NONE, NONE), topk=k)
    loss.backward()
    expected = slow_loss(x, positive, k)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    step = 1e-5
    for i, j in np.ndindex(x.shape):
        up = x.copy()
        down = x.copy()
        up[i, j] += step
        down[i, j] -= step
        slope = (slow_loss(up, positive, k) - slow_loss(down, positive, k)) / (2 * step)
        assert logit.grad[i, j].item() == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_a_positive_among_the_first_k_costs_little_whatever_their_order():
    logit = torch.tensor([[9.0, 8.0, 7.0, -5.0, -6.0]])
    one = torch.ones(1)

    def loss(col, k):
        return soft_topk(
            logit, Pairs(torch.tensor([0]), torch.tensor([col]), one, NONE, NONE), topk=k
        ).item()

    assert max(loss(col, 3) for col in range(3)) < 0.01
    assert loss(3, 3) > 5
    assert loss(2, 1) > loss(1, 1) > loss(0, 1) > 0.1


def test_shifting_a_row_changes_nothing(rng):
    """t takes up a constant: gradients of a row sum to 0."""
    logit = torch.from_numpy(rng.normal(size=(4, 30)) * 4).requires_grad_()
    row = torch.arange(4)
    col = torch.from_numpy(rng.integers(0, 30, 4))
    pairs = Pairs(row, col, torch.ones(4), NONE, NONE)
    loss = soft_topk(logit, pairs)
    moved = soft_topk(logit + torch.arange(4.0).double().unsqueeze(1), pairs)
    torch.testing.assert_close(loss, moved)
    loss.backward()
    torch.testing.assert_close(
        logit.grad.sum(1),
        torch.zeros(4).double(),
        rtol=0,
        atol=1e-12,
    )
