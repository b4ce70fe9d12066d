"""Dropout: which entries are kept, their scale and gradient."""

from __future__ import annotations

import pytest
import torch

from unidec.model.dropout import Dropout, dropout


@pytest.mark.parametrize("p", [0.1, 0.4, 0.99])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_entries_their_scale_and_gradient(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.full((300, 1001), 3.0, dtype=dtype, requires_grad=True)
    out = dropout(x, p, training=True)
    is_kept = out != 0
    scale = torch.ones((), dtype=dtype) / (1 - p)
    assert out.dtype == dtype
    assert torch.equal(out, torch.where(is_kept, 3.0 * scale, 0.0).to(dtype))
    deviation = (p * (1 - p) / x.numel()) ** 0.5
    assert is_kept.float().mean() == pytest.approx(1 - p, abs=5 * deviation)
    by_column = is_kept.float().mean(0)  # entries are independent
    assert by_column.std() == pytest.approx((p * (1 - p) / len(x)) ** 0.5, rel=0.1)
    out.float().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(is_kept, scale, 0.0).to(dtype))


def test_a_seed_draws_the_same_entries_and_the_next_call_others() -> None:
    x = torch.ones(100, 10)
    torch.manual_seed(1)
    first, second = dropout(x, 0.5, True), dropout(x, 0.5, True)
    torch.manual_seed(1)
    assert torch.equal(dropout(x, 0.5, True), first)
    assert not torch.equal(first, second)


def test_without_training_or_probability_nothing_changes() -> None:
    x = torch.randn(5, 7)
    layer = Dropout(0.5)
    assert torch.equal(layer.eval()(x), x)
    assert not torch.equal(layer.train()(x), x)
    assert torch.equal(dropout(x, 0.0, True), x)
    assert dropout(x[:0], 0.5, True).shape == (0, 7)
