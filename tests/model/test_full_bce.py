"""BCE over all labels in chunks against the dense one: value, every gradient, memory, number
formats.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from unidec.model.full_bce import full_bce
from unidec.model.losses import symmetric_loss
from unidec.model.pairs import PoolTargets

B = 5
L = 23
D = 4


def make_targets(rng, num_rows=B, num_cols=L, soft=False, weighted=False, density=0.2):
    positive = rng.random((num_rows, num_cols)) < density
    ignored = (rng.random((num_rows, num_cols)) < 0.15) & ~positive
    row, col = map(torch.from_numpy, np.nonzero(positive))
    order = torch.randperm(len(row))
    return PoolTargets(
        row[order],
        col[order],
        torch.ones(len(row), dtype=torch.bool),
        torch.from_numpy(rng.random(len(row))) if soft else torch.ones(len(row)),
        torch.from_numpy(positive.sum(1)),
        *map(torch.from_numpy, np.nonzero(ignored)),
        torch.from_numpy(1 + 9 * rng.random(len(row))) if weighted else None,
    )


def make_inputs(rng, bias=True, dtype=torch.float64, num_rows=B, num_cols=L):
    shapes = [(num_rows, D), (num_cols, D), (num_cols, 1), ()]
    query, row, bias_L1, scale = (
        torch.from_numpy(np.asarray(rng.normal(size=s) * 2)).to(dtype) for s in shapes
    )
    return [query, row, bias_L1 if bias else None, scale.abs() + 0.5]


def leaves(inputs):
    return [None if x is None else x.clone().requires_grad_() for x in inputs]


def dense(inputs, targets, normalise):
    query, row, bias, scale = inputs
    score = query @ row.T
    if bias is not None:
        score = score + bias.T
    return symmetric_loss(
        "bce", score * scale, targets, reduction="psl", forward=1.0, normalise=normalise
    )


def gradients(loss, inputs):
    (loss * 1.7).backward()  # an outer factor, as lambda is
    return [None if x is None else x.grad for x in inputs]


@pytest.mark.parametrize("normalise", ["rows", "entries", "sum"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_the_dense_loss_in_value_and_gradients(normalise, bias, soft, weighted, rng):
    targets = make_targets(rng, soft=soft, weighted=weighted)
    inputs = make_inputs(rng, bias)
    theirs = leaves(inputs)
    expected = dense(theirs, targets, normalise)
    expected_grads = gradients(expected, theirs)
    for chunk in (1, 7, L, 100):
        ours = leaves(inputs)
        loss = full_bce(*ours, targets, normalise=normalise, chunk=chunk)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        for grad, other in zip(gradients(loss, ours), expected_grads, strict=True):
            assert (grad is None) == (other is None)
            if grad is not None:
                torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-12)


def test_equals_loops(rng):
    targets, (query, row, bias, scale) = make_targets(rng), make_inputs(rng)
    pairs = set(zip(targets.row_P.tolist(), targets.col_P.tolist(), strict=True))
    ignored = set(zip(targets.ignored_row_F.tolist(), targets.ignored_col_F.tolist(), strict=True))
    total = 0.0
    rows = {i for i, _ in pairs}
    for i in rows:
        for j in range(L):
            x = (query[i] @ row[j] + bias[j, 0]) * scale
            if (i, j) not in ignored:
                total += -F.logsigmoid(x) if (i, j) in pairs else -F.logsigmoid(-x)
    expected = total / len(rows)
    torch.testing.assert_close(full_bce(query, row, bias, scale, targets, chunk=6), expected)


def test_degenerate_cases(rng):
    inputs = make_inputs(rng)
    for density in (0.0, 1.0):
        targets = make_targets(rng, density=density)
        ours = leaves(inputs)
        theirs = leaves(inputs)
        loss = full_bce(*ours, targets, chunk=5)
        expected = dense(theirs, targets, "rows")
        torch.testing.assert_close(loss, expected)
        for grad, other in zip(gradients(loss, ours), gradients(expected, theirs), strict=True):
            torch.testing.assert_close(grad, other)
            assert density or (grad == 0).all()
    huge = make_inputs(rng)
    huge[0] = huge[0] * 1e4
    loss = full_bce(*(ours := leaves(huge)), make_targets(rng))
    assert all(torch.isfinite(grad).all() for grad in gradients(loss, ours))
    nothing = make_inputs(rng, num_cols=0)
    assert full_bce(*nothing, make_targets(rng, num_cols=0)) == 0
    huge[0][0, 0] = float("nan")
    assert torch.isnan(full_bce(*huge, make_targets(rng, density=1.0)))


def test_gradients_that_nobody_wants_are_not_made(rng):
    targets = make_targets(rng)
    inputs = make_inputs(rng)
    query, row, bias, scale = leaves(inputs)
    loss = full_bce(query, row.detach(), bias, scale.detach(), targets, chunk=4)
    made = [None if x is None else tuple(x.shape) for x in loss.grad_fn.next_functions[0][0].grads]
    assert made == [(B, D), None, (L, 1), None]
    with torch.no_grad():
        assert not full_bce(query, row, bias, scale, targets).requires_grad
    loss.backward()
    assert query.grad is not None and row.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_other_formats(dtype, rng):
    targets, (query, row, _, scale) = make_targets(rng), make_inputs(rng, dtype=torch.float32)
    row = row.to(dtype)
    ours = leaves([query, row, None, scale])
    theirs = leaves([query, row.float(), None, scale])
    loss = full_bce(*ours, targets, chunk=9)
    expected = dense(theirs, targets, "rows")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for grad, other, given in zip(
        gradients(loss, ours), gradients(expected, theirs), ours, strict=True
    ):
        if grad is not None:
            assert grad.dtype == given.dtype
            torch.testing.assert_close(grad.float(), other, rtol=tolerance, atol=tolerance)


def test_under_autocast_the_products_are_bfloat16(rng):
    targets = make_targets(rng)
    inputs = make_inputs(rng, dtype=torch.float32)
    ours = leaves(inputs)
    theirs = leaves(inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = full_bce(*ours, targets, chunk=6)
        expected = dense(theirs, targets, "rows")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    for grad, other in zip(gradients(loss, ours), gradients(expected, theirs), strict=True):
        torch.testing.assert_close(
            grad,
            other,
            rtol=5e-2,
            atol=5e-2 * float(other.abs().max()),
        )


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.entries = max(self.entries, x.numel())
        return result


def test_no_tensor_of_all_logits_is_made(rng):
    num_rows = 64
    num_cols = 4000
    targets = make_targets(rng, num_rows, num_cols, density=0.001)
    inputs = make_inputs(rng, dtype=torch.float32, num_rows=num_rows, num_cols=num_cols)
    with Largest() as chunked:
        full_bce(*leaves(inputs), targets, chunk=100).backward()
    with Largest() as whole:
        dense(leaves(inputs), targets, "rows").backward()
    assert whole.entries == num_rows * num_cols  # what is counted is there to be seen
    assert chunked.entries == num_cols * D


def test_nothing_waits_for_values(rng):
    targets = make_targets(rng, soft=True, weighted=True)
    inputs = make_inputs(rng, dtype=torch.float32)
    on_meta = PoolTargets(
        **{name: x.to("meta") for name, x in vars(targets).items() if isinstance(x, torch.Tensor)}
    )
    ours = [x.to("meta").requires_grad_() for x in inputs]
    full_bce(*ours, on_meta, normalise="entries", chunk=8).backward()
    assert ours[1].grad.shape == (L, D)


def test_backward_runs_once(rng):
    targets = make_targets(rng)
    inputs = leaves(make_inputs(rng))
    loss = full_bce(*inputs, targets)
    loss.backward(retain_graph=True)
    with pytest.raises((RuntimeError, TypeError)):
        loss.backward()
