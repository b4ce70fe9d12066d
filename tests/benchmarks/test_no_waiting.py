"""The mode that refuses what would make a GPU's host wait."""

import pytest
import torch


@pytest.fixture
def no_waiting(benchmark_module):
    return benchmark_module("no_waiting").NoWaiting


def test_what_waits_is_refused(no_waiting):
    x = torch.arange(3.0)
    mask = torch.tensor([True, False, True])
    waits = [
        x.sum().item,
        lambda: bool(mask.any()),
        mask.nonzero,
        lambda: x[mask],
        lambda: x.unique(),
        lambda: x.masked_select(mask),
        lambda: x.index_put_((mask,), torch.zeros(2)),
    ]
    for wait in waits:
        with no_waiting(), pytest.raises(AssertionError, match="waits"):
            wait()
    with no_waiting():
        x[torch.tensor([0, 2])], torch.where(mask, x, 0.0), x.masked_fill(mask, 1.0)


def test_copies_between_host_and_device(no_waiting):
    """On "meta", in place of a GPU."""
    host = torch.arange(3.0)
    far = torch.empty(3, device="meta")
    waits = [
        far.cpu,
        lambda: host.copy_(far),
        lambda: far.to("cpu", non_blocking=True),
        lambda: far.copy_(host),
        lambda: host.to("meta"),
        lambda: torch.where(far > 0, 0.0, torch.tensor(1.0)),
    ]
    for wait in waits:
        with no_waiting(), pytest.raises(AssertionError, match=r"waits|before they have arrived"):
            wait()
    with no_waiting():
        (
            host.copy_(far, non_blocking=True),
            host.to("meta", non_blocking=True),
            far.copy_(host, non_blocking=True),
        )
        (
            torch.where(far > 0, 0.0, far),
            torch.where(far > 0, far, 1.0),
            far + torch.tensor(1.0),
            far.double(),
        )
    assert host.tolist() == [0, 1, 2]
