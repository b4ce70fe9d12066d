"""Row tables: what is gathered, of which type, and where the rows live."""

import copy
import shutil

import numpy as np
import pytest
import torch

from unidec.errors import ArtifactError
from unidec.model import row_table
from unidec.model.row_table import Placement, RowTable, zeros_on_disk
from unidec.training.optim import ROW_OPTIMISERS

ROWS = 30
WIDTH = 5
CUDA = pytest.mark.cuda


@pytest.fixture
def table(rng):
    return make_table(torch.from_numpy(rng.normal(size=(ROWS, WIDTH))))


def make_table(values, dtype=torch.float32, placement=None):
    table = RowTable(len(values), WIDTH, dtype, placement or Placement()).train()
    with torch.no_grad():
        table.weight.copy_(values)
    return table


# -- gathering
# --------------------------------------------------------------------------------------------------


def test_gathered_twice_in_a_step_is_an_error(table):
    table.gather(torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="already gathered"):
        table.gather(torch.tensor([3]))
    table.forget()
    table.gather(torch.tensor([3]))


def test_only_training_keeps_what_it_gathers(table):
    rows = torch.tensor([4, 0])
    with torch.no_grad():
        assert torch.equal(table.gather(rows), table.weight[rows])
    table.eval()
    assert torch.equal(table.gather(rows), table.weight[rows])
    assert not table.gather(rows).requires_grad
    assert table.used is None
    assert table.num_rows == ROWS


@pytest.mark.parametrize("train", [True, False])
def test_bfloat16_rows_come_as_float32(rng, train):
    values = torch.from_numpy(rng.normal(size=(ROWS, WIDTH)))
    table = make_table(values, torch.bfloat16).train(train)
    for rows in (torch.tensor([7, 2]), None):
        leaf = table.gather(rows)
        assert leaf.dtype == torch.float32 and leaf.requires_grad == train
        expected = (table.weight if rows is None else table.weight[rows]).float()
        assert torch.equal(leaf.detach(), expected)
        table.forget()
    assert table.numpy().dtype == np.float32
    assert np.array_equal(table.numpy(), values.bfloat16().float().numpy())


def test_float32_in_host_memory_is_not_copied_for_numpy(table, tmp_path):
    assert table.numpy().ctypes.data == table.weight.data_ptr()
    on_disk = make_table(table.weight, placement=Placement("disk", tmp_path))
    assert on_disk.numpy().ctypes.data == on_disk.weight.data_ptr()


@pytest.mark.parametrize("train", [True, False])
def test_a_part_of_the_rows_is_gathered_by_global_ids(rng, train):
    values = torch.from_numpy(rng.normal(size=(ROWS, WIDTH))).float()
    table = RowTable(ROWS, WIDTH, placement=Placement(first_row=10, num_rows=12)).train(train)
    assert table.num_rows == ROWS
    assert table.first_row == 10
    assert table.own_rows == 12
    assert len(table.weight) == 12
    with torch.no_grad():
        table.weight.copy_(values[10:22])
    rows = torch.tensor([21, 10, 15])
    assert torch.equal(table.gather(rows).detach(), values[rows])
    table.forget()
    expected = values[10:22]
    assert torch.equal(table.gather(None).detach(), expected)
    empty = RowTable(ROWS, WIDTH, placement=Placement(first_row=ROWS, num_rows=0))
    shape = empty.gather(torch.zeros(0, dtype=torch.int64)).shape
    assert shape == (0, WIDTH)


def test_a_copy_shares_nothing(table, tmp_path):
    for original in (table, make_table(table.weight, placement=Placement("disk", tmp_path))):
        ROW_OPTIMISERS["adam"](original, 0.1)
        before = original.weight.detach().clone()
        copied = copy.deepcopy(original)
        copied.weight.zero_()
        copied.state["first"].fill_(1)
        assert torch.equal(original.weight, before)
        assert not original.state["first"].any()


# -- in parts
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ROW_OPTIMISERS)
def test_parts_of_a_step_add_up(rng, kind):
    """Parts that overlap, gathered again and again, against one gather of everything."""
    values = torch.from_numpy(rng.normal(size=(ROWS, WIDTH)).astype(np.float32))
    one = make_table(values)
    other = make_table(values)
    optimisers = [ROW_OPTIMISERS[kind](table, 0.1) for table in (one, other)]
    rows = np.sort(rng.choice(ROWS, 12, replace=False))
    for step in range(1, 4):
        pieces = [np.sort(rng.choice(rows, size, replace=False)) for size in (5, 1, 12, 7)]
        factors = [
            torch.from_numpy(rng.normal(size=(len(piece), WIDTH)).astype(np.float32))
            for piece in pieces
        ]
        leaf = one.gather(torch.from_numpy(rows))
        sum(
            (leaf[np.searchsorted(rows, piece)] * f).sum() for piece, f in zip(pieces, factors)
        ).backward()
        with other.parts(torch.from_numpy(rows)):
            for piece, factor in zip(pieces, factors):
                part = other.gather(torch.from_numpy(piece))
                expected = other.weight[torch.from_numpy(piece)]
                assert torch.equal(part.detach(), expected)
                (part * factor).sum().backward()
        assert torch.allclose(other.used[1].grad, one.used[1].grad, rtol=1e-5, atol=1e-6)
        for optimiser in optimisers:
            optimiser.step(step, 1.0)
        assert torch.allclose(other.weight, one.weight, rtol=1e-5, atol=1e-6)
        assert one.used is None and other.used is None


def test_parts_of_a_table_are_not_another_gather(table):
    with table.parts(torch.tensor([1, 2])):
        pass
    with pytest.raises(RuntimeError, match="already gathered"):
        table.gather(torch.tensor([3]))
    with pytest.raises(RuntimeError, match="already gathered"), table.parts(torch.tensor([3])):
        pass
    table.forget()
    with table.parts(torch.tensor([1, 2])), torch.no_grad():  # outside training nothing is kept
        shape = table.gather(torch.tensor([5])).shape
        assert shape == (1, WIDTH)
    table.forget()


# -- places
# --------------------------------------------------------------------------------------------------


class Batches:
    """The same random batches, gradients and optimiser for tables in different places."""

    def __init__(self, rng, steps=12, rows=ROWS, count=12):
        self.start = torch.from_numpy(rng.normal(size=(rows, WIDTH)))
        self.rows = [
            rng.choice(rows, size=int(rng.integers(0, count + 1)), replace=False)
            for _ in range(steps)
        ]
        self.rows[3] = self.rows[2].copy()  # the very rows again
        self.grads = [torch.from_numpy(rng.normal(size=(len(r), WIDTH))).float() for r in self.rows]

    def train(self, kind, table):
        optimiser = ROW_OPTIMISERS[kind](table, 0.05, "seed")
        for step, rows in enumerate(self.rows):
            table.gather(torch.from_numpy(rows).to(table.device)).grad = self.grads[step].to(
                table.device
            )
            optimiser.step(step + 1, 1.0)
        return [tensor.cpu() for tensor in table.rows().values()]


# that updates all rows, which must be on the device
FETCHING = sorted(set(ROW_OPTIMISERS) - {"adamw"})


def fetching(table):
    """The table as on a GPU: its rows are fetched and written back, here from host memory to host
    memory.
    """
    table.is_remote = True
    return table


def equal(ours, theirs):
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(ROW_OPTIMISERS))
def test_on_a_cpu_every_place_gives_the_same_bits(rng, tmp_path, kind, dtype):
    batches = Batches(rng)
    device = batches.train(kind, make_table(batches.start, dtype))
    for place in ("host", "disk"):
        table = make_table(batches.start, dtype, Placement(place, tmp_path))
        assert equal(batches.train(kind, table), device), place
        assert not table.is_remote  # a CPU needs no fetching


@pytest.mark.parametrize("kind", FETCHING)
def test_fetched_rows_train_as_if_they_were_there(rng, kind):
    batches = Batches(rng)
    for dtype in (torch.float32, torch.bfloat16):
        device = batches.train(kind, make_table(batches.start, dtype))
        assert equal(batches.train(kind, fetching(make_table(batches.start, dtype))), device)


@pytest.mark.parametrize("kind", FETCHING)
def test_what_is_on_its_way_back_is_seen_by_every_reader(rng, kind):
    batches = Batches(rng, steps=4)
    rows = torch.arange(7)
    grad = torch.from_numpy(rng.normal(size=(7, WIDTH))).float()
    trained = []
    readers = [
        lambda table: table.rows()["weight"],
        lambda table: torch.from_numpy(table.numpy()),
        lambda table: table.state_dict()["weight"],
        lambda table: table.eval().gather(None),
        lambda table: table.eval().gather(torch.arange(ROWS)),
        lambda table: table.gather(torch.arange(ROWS)).detach(),
    ]
    for away in (False, *[True] * len(readers)):
        table = make_table(batches.start)
        table.is_remote = away
        optimiser = ROW_OPTIMISERS[kind](table, 0.05)
        table.gather(rows).grad = grad.clone()
        optimiser.step(1, 1.0)
        if away:
            assert torch.equal(table.weight, batches.start.float()), "still on its way"
            assert torch.equal(readers[len(trained) - 1](table), trained[0])
            assert table._pending is None
        trained.append(table.weight.detach().clone())
    assert equal(trained[1:], trained[:1] * len(readers))
    assert not torch.equal(trained[0], batches.start.float())


def test_copies_have_arrived_before_they_are_read(table):
    """The event that ends them is waited for once, then the values are taken."""
    fetching(table)
    table.gather(torch.arange(3))
    table.write_back(torch.ones(3, WIDTH), {})
    local, values, arrived = table._pending
    assert arrived is None, "a processor has none"

    class Arrived:
        waited = 0

        def synchronize(self):
            self.waited += 1
            values["weight"].fill_(2)  # a copy that ends just now

    table._pending = (local, values, event := Arrived())
    assert bool((table.rows()["weight"][:3] == 2).all())
    table.flush()
    assert event.waited == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FETCHING)
def test_no_step_of_fetched_rows_waits_for_the_device(
    rng, benchmark_module, kind, dtype, monkeypatch
):
    """The model on "meta", in place of a GPU, the rows on the host."""
    # as to a GPU
    monkeypatch.setattr(row_table, "to_device", lambda x, device: x.to(device, non_blocking=True))
    table = make_table(
        torch.from_numpy(rng.normal(size=(ROWS, WIDTH))), dtype, Placement("host")
    ).to("meta")
    optimiser = ROW_OPTIMISERS[kind](table, 0.05)
    failed = torch.zeros((), device="meta")
    # a number: gradients are not clipped
    for step, scale in enumerate((1.0, failed.new_ones(()), 1.0), start=1):
        with benchmark_module("no_waiting").NoWaiting():
            leaf = table.gather(torch.from_numpy(rng.choice(ROWS, 8, replace=False)))
            assert leaf.device.type == "meta" and leaf.dtype == torch.float32
            leaf.grad = torch.zeros_like(leaf)
            optimiser.step(step, 1.0, scale, failed)
    with benchmark_module("no_waiting").NoWaiting(), pytest.raises(AssertionError, match="waits"):
        table.gather(torch.zeros(2, dtype=torch.int64, device="meta"))  # ids belong on the host


def test_all_rows_are_not_fetched():
    table = fetching(make_table(torch.zeros(ROWS, WIDTH)))
    with pytest.raises(RuntimeError, match="only if they are on the device"):
        table.gather(None)


# -- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 3), (7,), (0, 3), (5, 0)])
def test_a_file_holds_zeros_and_has_no_name(tmp_path, shape, dtype):
    folder = tmp_path / "new" / "folder"
    zeros = zeros_on_disk(folder, shape, dtype)
    assert zeros.shape == shape
    assert zeros.dtype == dtype
    assert not zeros.any()
    zeros += 1
    assert bool((zeros == 1).all())
    assert not folder.exists() or not list(folder.iterdir())


def test_its_space_is_reserved_and_given_back(tmp_path):
    free = lambda: shutil.disk_usage(tmp_path).free  # noqa: E731
    before = free()
    zeros = zeros_on_disk(tmp_path, (64 << 20,), torch.float32)
    held = before - free()
    del zeros
    if held > 128 << 20:  # other tests write too
        assert before - free() < held - (128 << 20)
    else:
        pytest.skip("this file system does not reserve space")


def test_no_room_is_said_before_training(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(row_table.os, "posix_fallocate", refuse)
    with pytest.raises(
        ArtifactError, match=r"not enough disk space .*\n  got: No space .*\n  expected: 600 bytes"
    ):
        RowTable(ROWS, WIDTH, placement=Placement("disk", tmp_path))
    assert not list(tmp_path.iterdir())


def test_state_is_where_the_weight_is(tmp_path):
    mapped = (tmp_path / "maps").as_posix()
    table = RowTable(ROWS, WIDTH, placement=Placement("disk", tmp_path / "maps"))
    state = ROW_OPTIMISERS["adam"](table, 0.1).table.state
    with open("/proc/self/maps", encoding="utf-8") as maps:
        lines = [line for line in maps if mapped in line]
    assert len(lines) == 1 + len(state)


# -- on a GPU
# --------------------------------------------------------------------------------------------------


@CUDA
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", sorted(ROW_OPTIMISERS))
@pytest.mark.parametrize("place", ["host", "disk"])
def test_on_a_gpu_every_place_gives_the_same_bits(rng, tmp_path, place, kind, dtype):
    batches = Batches(rng, steps=50, rows=3000, count=2000)
    device = batches.train(kind, make_table(batches.start, dtype).to("cuda"))
    table = make_table(batches.start, dtype, Placement(place, tmp_path)).to("cuda")
    assert table.weight.device.type == "cpu" and table.is_remote
    assert equal(batches.train(kind, table), device)


@CUDA
def test_rounding_is_the_same_on_a_gpu(rng):
    from unidec.training.optim import round_to_bfloat16, row_noise

    x = torch.from_numpy(rng.normal(size=(500, 33))).float()
    rows = torch.arange(500)
    ours = round_to_bfloat16(x.cuda(), row_noise(rows.cuda(), 33, "a")).cpu()
    expected = round_to_bfloat16(x, row_noise(rows, 33, "a"))
    assert torch.equal(ours, expected)


@CUDA
def test_a_large_table_is_made_on_the_device():
    table = RowTable(ROWS, WIDTH, placement=Placement(device="cuda"))
    assert table.weight.is_cuda and table.device.type == "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_fill_an_array_some_at_a_time(dtype, monkeypatch):
    monkeypatch.setattr(row_table, "_ROWS_AT_ONCE", 3)
    table = RowTable(10, 4, dtype)
    table.weight.data = torch.randn(10, 4).to(dtype)
    into = np.empty((10, 4), np.float32)
    assert np.array_equal(table.numpy(into), table.numpy())
    # rows that need no copy are not copied
    assert np.array_equal(into, table.numpy()) == (dtype == torch.bfloat16)
