"""One seed gives the same bits twice with two threads; additions in any order are forbidden on a
CPU, and on a GPU by `run.deterministic`.
"""

import os

import pytest
import torch
from helpers.trainings import weights

from unidec.training.precision import deterministic

CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture
def without_workspace(monkeypatch):
    monkeypatch.setenv(CUBLAS_WORKSPACE, "")  # put back after the test
    monkeypatch.delenv(CUBLAS_WORKSPACE)


def gradient(at_N, weight_N):
    x_L = torch.zeros(50, requires_grad=True)
    (x_L[at_N] * weight_N).sum().backward()
    return x_L.grad


def test_gradients_are_added_in_order_inside_the_block(two_threads):
    """Outside, torch adds those of 32,768 or more by atomic operations of two threads."""
    at_N = torch.randint(50, (200_000,), generator=torch.Generator().manual_seed(1))
    weight_N = torch.randn(len(at_N), generator=torch.Generator().manual_seed(2))
    in_order_L = torch.zeros(50).index_add(0, at_N, weight_N)
    with deterministic(True):
        for _ in range(5):
            assert torch.equal(gradient(at_N, weight_N), in_order_L)


def test_torch_is_as_before_after_the_block():
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        with deterministic(True):
            pass
        assert torch.are_deterministic_algorithms_enabled()  # not ours to end
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(KeyError), deterministic(True):
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("wanted", [False, True])
def test_two_trainings_of_two_threads_are_the_same_bits(
    open_trainer, monkeypatch, two_threads, without_workspace, wanted
):
    overrides = {"encoder.bag_dropout": 0.2, "run.deterministic": wanted}
    trained = []
    for run in ("first", "second"):
        trainer = open_trainer(run, **overrides)
        seen = set()
        step = trainer.train_step

        def seeing(batch, step=step, seen=seen):
            seen.add(torch.are_deterministic_algorithms_enabled())
            return step(batch)

        monkeypatch.setattr(trainer, "train_step", seeing)
        trainer.mine()
        trainer.train_round()
        assert seen == {True}  # on a CPU always
        trained.append(weights(trainer))
    assert (CUBLAS_WORKSPACE in os.environ) is wanted
    first, second = trained
    assert first.keys() == second.keys()
    for name, weight in first.items():
        assert torch.equal(weight, second[name]), name
