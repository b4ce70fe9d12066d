"""Row-sparse optimisers against a slow dense reference and torch's own; what they leave alone."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from unidec.model.row_table import Placement, RowTable
from unidec.training.optim import EPS, ROW_OPTIMISERS, RowAdam

ROWS = 30
WIDTH = 5
LR = 0.05
KINDS = sorted(ROW_OPTIMISERS)
SPARSE = sorted(set(KINDS) - {"adamw"})  # those that touch the rows of a step only
DECAY = {"adamw": 0.1, "momentum": 0.1}  # weight decay, of those that have it


def make_table(rng, dtype=torch.float64, width=WIDTH):
    table = RowTable(ROWS, width, dtype).train()
    table.weight.copy_(torch.from_numpy(rng.normal(size=(ROWS, width))))
    return table


@pytest.fixture
def table(rng):
    """In float64: torch's optimisers round in another order."""
    return make_table(rng)


def random_rows(rng, count=8, rows=ROWS):
    return torch.from_numpy(rng.choice(rows, size=count, replace=False))


def random_target(rng, count=8):
    """No entry near 0: SparseAdam's epsilon stands at another place, which tiny gradients would
    show.
    """
    target = rng.normal(size=(count, WIDTH))
    return torch.from_numpy(target + np.sign(target) * 0.5)


def loss_of(rows_UD, target_UD):
    return (rows_UD * target_UD.to(rows_UD.dtype)).sum() + 0.1 * torch.sin(rows_UD).sum()


# -- a slow reference
# --------------------------------------------------------------------------------------------------


class Reference:
    """One value at a time, float64."""

    def __init__(self, kind, weight):
        self.kind = kind
        self.weight = np.array(weight, dtype=np.float64)
        self.first, self.second = np.zeros_like(self.weight), np.zeros_like(self.weight)
        self.velocity, self.sum = np.zeros_like(self.weight), np.zeros(len(self.weight))

    def step(self, rows, grad, step, lr):
        if self.kind == "adamw":  # every row, with gradient 0 where it has none
            own = dict(zip(rows, grad, strict=True))
            rows = range(ROWS)
            grad = [own.get(row, np.zeros(WIDTH)) for row in range(ROWS)]
            self.weight -= lr * DECAY["adamw"] * self.weight
        for row, g in zip(rows, grad, strict=True):
            if self.kind == "adagrad":
                self.sum[row] += sum(value**2 for value in g) / len(g)
            for d, value in enumerate(g):
                self.weight[row, d] -= lr * self.change(row, d, value, step)

    def change(self, row, d, value, step):
        if self.kind == "sgd":
            return value
        if self.kind == "adagrad":
            return value / (math.sqrt(self.sum[row]) + EPS)
        if self.kind == "momentum":
            decayed = value + DECAY["momentum"] * self.weight[row, d]
            self.velocity[row, d] = 0.9 * self.velocity[row, d] + decayed
            return self.velocity[row, d]
        self.first[row, d] = 0.9 * self.first[row, d] + 0.1 * value
        self.second[row, d] = 0.999 * self.second[row, d] + 0.001 * value**2
        first = self.first[row, d] / (1 - 0.9**step)
        second = self.second[row, d] / (1 - 0.999**step)
        return first / (math.sqrt(second) + EPS)

    def state(self):
        moments = {"first": self.first, "second": self.second}
        return {
            "adam": moments,
            "adamw": moments,
            "adagrad": {"sum": self.sum},
            "sgd": {},
            "momentum": {"velocity": self.velocity},
        }[self.kind]


def random_step(rng, table, which):
    """Gather, and give the leaf a random gradient: (ids, gradient)."""
    rows = {
        "some": lambda: random_rows(rng),
        "none": lambda: torch.zeros(0, dtype=torch.int64),
        "all": lambda: None,
    }
    rows = rows[which]()
    leaf = table.gather(rows)
    grad = rng.normal(size=tuple(leaf.shape))
    if len(grad):
        grad[0] = 0.0  # a row without a gradient
    leaf.grad = torch.from_numpy(grad).to(leaf.dtype)
    return (np.arange(ROWS) if rows is None else rows.numpy()), leaf.grad.double().numpy().copy()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "clip", [1.0, 0.3, torch.tensor(0.3)], ids=["unclipped", "number", "tensor"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_the_slow_reference(rng, kind, clip, dtype):
    table = make_table(rng, dtype)
    optimiser = ROW_OPTIMISERS[kind](table, LR, decay=DECAY.get(kind, 0.0))
    slow = Reference(kind, table.weight.double().numpy())
    exact = dtype == torch.float64
    tolerance = 1e-10 if exact else 1e-5  # of what is computed
    rounding = 2**-7 if dtype == torch.bfloat16 else tolerance  # of what is written
    for step, which in enumerate(
        ["some", "some", "none", "all", "some", "all", "some", "some"], start=1
    ):
        before = table.weight.detach().clone()
        rows, grad = random_step(rng, table, which)
        optimiser.step(step, 1 - step / 20, clip)
        slow.step(rows, grad * float(clip), step, LR * (1 - step / 20))
        np.testing.assert_allclose(
            table.weight.double().numpy(), slow.weight, rtol=rounding, atol=1e-6
        )
        for name, values in slow.state().items():
            np.testing.assert_allclose(
                optimiser.table.state[name].numpy(),
                values,
                tolerance,
                1e-12 if exact else 1e-6,
                err_msg=name,
            )
        others = np.setdiff1d(np.arange(ROWS), rows)
        assert kind == "adamw" or torch.equal(table.weight[others], before[others])
        # bfloat16 drifts from the reference by what was rounded: every step is compared on its own
        slow.weight[:] = table.weight.double().numpy()


# -- torch's optimisers
# ------------------------------------------------------------------------------------------------


def test_rows_equal_sparse_adam(table, rng):
    reference = torch.nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
    reference.weight.data.copy_(table.weight)
    theirs = torch.optim.SparseAdam(reference.parameters(), lr=LR)
    ours = RowAdam(table, LR)
    for step in range(12):
        rows = random_rows(rng)
        target = random_target(rng)
        factor = 1 - step / 20
        theirs.param_groups[0]["lr"] = LR * factor
        theirs.zero_grad()
        loss_of(reference(rows), target).backward()
        theirs.step()
        loss_of(table.gather(rows), target).backward()
        ours.step(step + 1, factor)
    torch.testing.assert_close(
        table.weight.detach(), reference.weight.detach(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "width", "theirs"),
    [
        ("adam", WIDTH, lambda p: torch.optim.Adam(p, lr=LR)),
        # of width 1 it is AdaGrad itself
        ("adagrad", 1, lambda p: torch.optim.Adagrad(p, lr=LR, eps=EPS)),
        ("sgd", WIDTH, lambda p: torch.optim.SGD(p, lr=LR)),
        (
            "momentum",
            WIDTH,
            lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=DECAY["momentum"]),
        ),
        ("adamw", WIDTH, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=DECAY["adamw"])),
    ],
)
def test_all_rows_equal_torch(rng, kind, width, theirs):
    table = make_table(rng, width=width)
    reference = table.weight.detach().clone().requires_grad_()
    theirs = theirs([reference])
    ours = ROW_OPTIMISERS[kind](table, LR, decay=DECAY.get(kind, 0.0))
    for step in range(12):
        target = random_target(rng, ROWS)[:, :width]
        theirs.zero_grad()
        loss_of(reference, target).backward()
        theirs.step()
        loss_of(table.gather(None), target).backward()
        ours.step(step + 1, 1.0)
    torch.testing.assert_close(
        table.weight.detach(),
        reference.detach(),
        rtol=1e-6,
        atol=1e-6,
    )


def test_all_rows_adamw_equals_torch_where_steps_use_some_rows(table, rng):
    """With torch's, the gradient of the other rows is 0: their moments fade, and they move and
    decay all the same.
    """
    reference = table.weight.detach().clone().requires_grad_()
    decay = DECAY["adamw"]
    theirs = torch.optim.AdamW([reference], lr=LR, weight_decay=decay)
    ours = ROW_OPTIMISERS["adamw"](table, LR, decay=decay)
    for step in range(12):
        rows = random_rows(rng)
        target = random_target(rng)
        theirs.zero_grad()
        loss_of(reference[rows], target).backward()
        theirs.step()
        loss_of(table.gather(rows), target).backward()
        ours.step(step + 1, 1.0)
    torch.testing.assert_close(
        table.weight.detach(),
        reference.detach(),
        rtol=1e-6,
        atol=1e-6,
    )


def test_some_rows_then_all_rows_share_their_moments(table, rng):
    """A table used by rows in some steps and whole in others is one Adam: rows that are always used
    equal torch's.
    """
    reference = table.weight.detach().clone().requires_grad_()
    theirs = torch.optim.Adam([reference], lr=LR)
    ours = RowAdam(table, LR)
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
    torch.testing.assert_close(
        table.weight.detach(),
        reference.detach(),
        rtol=1e-6,
        atol=1e-6,
    )


# -- what a step touches
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SPARSE)
def test_rows_not_used_are_not_touched(rng, kind, dtype):
    table = make_table(rng, dtype)
    optimiser = ROW_OPTIMISERS[kind](table, LR)
    for step in range(5):
        before = [t.detach().clone() for t in (table.weight, *optimiser.table.state.values())]
        rows = random_rows(rng)
        loss_of(table.gather(rows), random_target(rng)).backward()
        optimiser.step(step + 1, 1.0)
        others = np.setdiff1d(np.arange(ROWS), rows.numpy())
        for was, now in zip(before, (table.weight, *optimiser.table.state.values()), strict=True):
            assert torch.equal(was[others], now[others])
            assert not torch.equal(was[rows], now[rows])


def resident_bytes(address):
    """Bytes of memory behind the mapping that holds an address (Linux)."""
    with open("/proc/self/smaps", encoding="ascii") as smaps:
        inside = False
        for line in smaps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin <= address < end
            elif inside and first == "Rss:":
                return int(line.split()[1]) * 1024
    raise AssertionError("the table is not mapped")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux says what is resident")
@pytest.mark.parametrize("kind", SPARSE)
def test_a_step_neither_reads_nor_writes_the_rest_of_the_table(rng, kind, tmp_path):
    """Of a million rows (256 MB) that nobody touched, 5 steps bring in the pages of the rows that
    they use.
    """
    num_rows = 1_000_000
    width = 64
    used = 50
    table = RowTable(num_rows, width, torch.float32, Placement("disk", tmp_path)).train()
    optimiser = ROW_OPTIMISERS[kind](table, LR)
    for step in range(5):
        leaf = table.gather(random_rows(rng, used, num_rows))
        leaf.grad = torch.ones_like(leaf)
        optimiser.step(step + 1, 1.0)
    # the system brings in what is around an address: here 64 KiB, elsewhere perhaps more
    limit = 5 * used << 18
    assert limit < table.weight.nbytes / 3
    for tensor in (table.weight, *optimiser.table.state.values()):
        assert 0 < resident_bytes(tensor.data_ptr()) <= limit
    changed = int((table.weight != 0).any(1).sum())
    assert 0.95 * 5 * used < changed <= 5 * used


def test_scale_is_a_scaled_gradient(table, rng):
    other = RowTable(ROWS, WIDTH).double().train()
    other.weight.copy_(table.weight)
    rows = random_rows(rng)
    target = random_target(rng)
    (loss_of(table.gather(rows), target) * 0.125).backward()
    loss_of(other.gather(rows), target).backward()
    for optimiser, scale in (
        (RowAdam(table, LR), 1.0),
        (RowAdam(other, LR), torch.tensor(0.125)),
    ):
        optimiser.step(1, 1.0, scale)
    assert torch.equal(table.weight, other.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_gradient_changes_nothing_and_forgets(table, kind):
    before = table.weight.detach().clone()
    optimiser = ROW_OPTIMISERS[kind](table, LR)
    optimiser.step(1, 1.0)  # nothing gathered
    table.gather(torch.tensor([1, 2]))  # gathered, no backward
    optimiser.step(2, 1.0)
    assert torch.equal(table.weight, before)
    assert table.used is None


# -- lazy rows: what benchmarks/results/classifier-rows.md says
# --------------------------------------------------------


@pytest.mark.parametrize("gap", [7, 1000])
def test_one_late_use_moves_a_row_a_tenth_as_far_as_dense_adam(gap):
    """Lazy: (1 - b1) / sqrt(1 - b2) = 3.16 rates, at once. Dense moves in the steps between, too:
    31.8 in the end.
    """
    step = 100_000  # the bias corrections are 1
    table = RowTable(1, 1, torch.float64).train()
    optimiser = ROW_OPTIMISERS["adam"](table, 1.0)
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    dense = torch.optim.Adam([weight], lr=1.0)
    weight.grad = torch.zeros_like(weight)
    dense.step()
    dense.state[weight]["step"] += step - 1
    table.gather(torch.tensor([0])).grad = torch.ones(1, 1, dtype=torch.float64)
    optimiser.step(step, 1.0)
    for number in range(gap):
        weight.grad.fill_(float(number == 0))
        dense.step()
    first = 0.1 / math.sqrt(0.001)
    assert -float(table.weight) == pytest.approx(first, rel=1e-4)
    ratio = 0.9 / math.sqrt(0.999)
    expected = first * (1 - ratio**gap) / (1 - ratio)
    assert -float(weight.detach()) == pytest.approx(expected, rel=1e-4)
    assert first / (1 - ratio) == pytest.approx(31.8, abs=0.1)


def test_lazy_moments_neither_decay_nor_shrink_the_row():
    table = make_table(np.random.default_rng(0))
    optimiser = RowAdam(table, LR)
    for step in range(1, 200):
        rows = torch.tensor([0]) if step == 1 else torch.tensor([1])
        table.gather(rows).grad = torch.ones(1, WIDTH, dtype=torch.float64)
        before = table.weight[0].clone()
        optimiser.step(step, 1.0)
        assert step == 1 or torch.equal(before, table.weight[0])
    assert float(optimiser.table.state["first"][0, 0]) == pytest.approx(0.1)
    assert float(optimiser.table.state["second"][0, 0]) == pytest.approx(0.001)


# -- bfloat16
# --------------------------------------------------------------------------------------------------


def copy_state(one, other):
    for name, tensor in other.table.state.items():
        tensor.copy_(one.table.state[name])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_continues_bit_for_bit(rng, kind):
    gradients = torch.from_numpy(rng.normal(size=(6, 8, WIDTH))).float()
    rows = [random_rows(rng) for _ in range(6)]

    def steps(table, optimiser, begin, end):
        for step in range(begin, end):
            table.gather(rows[step]).grad = gradients[step].clone()
            optimiser.step(step + 1, 1.0)

    whole = make_table(rng, torch.bfloat16)
    optimiser = ROW_OPTIMISERS[kind](whole, LR, "seed")
    steps(whole, optimiser, 0, 3)
    half = make_table(rng, torch.bfloat16)
    half.weight.copy_(whole.weight)
    resumed = ROW_OPTIMISERS[kind](half, LR, "seed")
    copy_state(optimiser, resumed)
    other = make_table(rng, torch.bfloat16)
    other.weight.copy_(whole.weight)
    another_seed = ROW_OPTIMISERS[kind](other, LR, "another")
    copy_state(optimiser, another_seed)
    for table, its in (
        (whole, optimiser),
        (half, resumed),
        (other, another_seed),
    ):
        steps(table, its, 3, 6)
    assert torch.equal(whole.weight, half.weight)
    assert not torch.equal(whole.weight, other.weight)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_table_train_as_the_whole(rng, kind):
    """Two halves, each with its own rows, write what the whole writes: the rounding too."""
    whole = make_table(rng, torch.bfloat16)
    cut = 13
    halves = []
    for first, count in (
        (0, cut),
        (cut, ROWS - cut),
    ):
        half = RowTable(
            ROWS, WIDTH, torch.bfloat16, Placement(first_row=first, num_rows=count)
        ).train()
        half.weight.copy_(whole.weight[first : first + count])
        halves.append(half)
    everyone = [ROW_OPTIMISERS[kind](table, LR) for table in (whole, *halves)]
    for step in range(6):
        rows = random_rows(rng, 10).sort().values if step % 3 else None
        grad = torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float()
        for optimiser in everyone:
            table = optimiser.table
            first = table.first_row
            last = table.first_row + table.own_rows
            own = None if rows is None else rows[(rows >= first) & (rows < last)]
            table.gather(own).grad = grad[first:last].clone() if own is None else grad[own].clone()
            optimiser.step(step + 1, 1.0)
    expected = torch.cat([half.weight for half in halves])
    assert torch.equal(whole.weight, expected)
