"""Stochastic rounding to bfloat16: a random variable with the right mean, and what a table makes of
it.
"""

import math

import numpy as np
import pytest
import torch

from unidec.model.row_table import RowTable
from unidec.training.optim import ROW_OPTIMISERS, round_to_bfloat16, row_noise

ROWS = 30
WIDTH = 5


def neighbours(x):
    """The bfloat16 values at or below and above float32 x, as float32."""
    near = x.bfloat16()
    down = torch.where(
        near.float() <= x,
        near,
        torch.nextafter(near, torch.tensor(-math.inf, dtype=torch.bfloat16)),
    )
    up = torch.where(
        near.float() >= x, near, torch.nextafter(near, torch.tensor(math.inf, dtype=torch.bfloat16))
    )
    return down.float(), up.float()


def rounded(values, times, seed="seed"):
    """Each value rounded many times: [times, values]."""
    x = torch.tensor(values, dtype=torch.float32).expand(times, -1).clone()
    return round_to_bfloat16(x, row_noise(torch.arange(times), len(values), seed))


def test_rounding_is_unbiased(rng):
    shares = np.linspace(0.03, 0.97, 12)
    values = [
        scale * (1 + share * 2**-7)
        for scale in (1.0, -1.0, 2.0**20, -(2.0**-20))
        for share in shares
    ]
    times = 20_000
    result = rounded(values, times).double()
    x = torch.tensor(values, dtype=torch.float32)
    down, up = neighbours(x)
    assert bool(((result == down) | (result == up)).all())
    share = ((x - down) / (up - down)).double()
    seen = (result == up.double()).double().mean(0)
    sigma = (share * (1 - share) / times).sqrt()
    assert float(((seen - share).abs() / sigma).max()) < 4.5
    # and in columns and rows alike it is independent: the variance of means is that of independent
    # draws
    assert 0.5 < float((((seen - share) / sigma) ** 2).mean()) < 1.6


def test_what_bfloat16_holds_stays():
    exact = [0.0, -0.0, 1.0, -1.5, 3.0e38, 2.0**-126, 1e-40, math.inf, -math.inf, 0.0078125]
    values = torch.tensor(exact).bfloat16().float().tolist()
    result = rounded(values, 500)
    expected = torch.tensor(values).bfloat16().expand(500, -1)
    assert torch.equal(result, expected)
    assert bool((torch.signbit(result[:, 1])).all())


def test_nan_stays_nan_and_the_largest_do_not_wrap():
    payloads = torch.tensor(
        [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, -0x400000], dtype=torch.int32
    ).view(torch.float32)
    noise = row_noise(torch.arange(300), len(payloads), "nan")
    assert bool(round_to_bfloat16(payloads.expand(300, -1).clone(), noise).isnan().all())
    largest = float(torch.finfo(torch.float32).max)
    result = rounded([largest, -largest], 2000).float()
    top = float(torch.finfo(torch.bfloat16).max)
    assert bool((result[:, 0] >= top).all())
    assert bool((result[:, 1] <= -top).all())


def test_small_updates_count_on_average(rng):
    """A hundred updates of a fortieth of a unit each: to nearest nothing would ever change."""
    table = RowTable(2000, 3, torch.bfloat16).train()
    table.weight.fill_(1.0)
    optimiser = ROW_OPTIMISERS["sgd"](table, 1.0)
    update = 2**-7 / 40
    for step in range(100):
        leaf = table.gather(None)
        leaf.grad = torch.full_like(leaf, -update)
        optimiser.step(step + 1, 1.0)
    moved = float((table.weight.float() - 1).mean())
    assert moved == pytest.approx(100 * update, rel=0.05)
    assert (torch.ones(1).bfloat16() + update).item() == 1.0


def test_noise_is_uniform_and_differs_by_all_it_is_made_of():
    rows = torch.randperm(100_000)[:20_000]
    noise = row_noise(rows, 7, "a")
    assert noise.shape == (20_000, 7)
    assert noise.dtype == torch.int16
    for bits in (noise >> 8, noise & 0xFF):
        count = torch.bincount((bits.flatten().to(torch.int64)) & 0xFF, minlength=256).double()
        expected = noise.numel() / 256
        assert float(((count - expected) ** 2 / expected).sum()) < 255 + 5 * math.sqrt(510)
    x = noise.double() / 2**15
    correlation = torch.corrcoef(torch.cat([x.T, torch.roll(x, 1, 0).T]))
    assert float((correlation - torch.eye(14)).abs().max()) < 5 / math.sqrt(len(rows))
    assert torch.equal(row_noise(rows.flip(0), 7, "a"), noise.flip(0))  # whatever the order
    for other in (
        row_noise(rows, 7, "b"),
        row_noise(rows + 1, 7, "a"),
    ):
        assert float((other == noise).double().mean()) < 0.001
    shape = row_noise(torch.zeros(0, dtype=torch.int64), 7, "a").shape
    assert shape == (0, 7)


@pytest.mark.parametrize("kind", sorted(ROW_OPTIMISERS))
def test_rounded_up_or_down_and_no_further(rng, kind):
    """What a step writes in bfloat16 is a neighbour of what it writes in float32."""
    rough = RowTable(ROWS, WIDTH, torch.bfloat16).train()
    fine = RowTable(ROWS, WIDTH).train()
    rough.weight.copy_(torch.from_numpy(rng.normal(size=(ROWS, WIDTH))))
    fine.weight.copy_(rough.weight)
    gradient = torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float()
    for table in (rough, fine):
        optimiser = ROW_OPTIMISERS[kind](table, 1e-3)
        table.gather(None).grad = gradient.clone()
        optimiser.step(1, 1.0)
    down, up = neighbours(fine.weight.detach())
    written = rough.weight.float()
    assert bool(((written == down) | (written == up)).all())
    assert 0.2 < float((written == up).float().mean()) < 0.8
