"""Ranks: the processes of one training that `torchrun` started, or this process alone.

Legend: R rows held by one rank, G rows of all ranks together, D width, U table rows used in a step.

Every rank draws the same batch and the same pool, encodes its part of both, and gathers the
embeddings of the others. Each rank computes the loss over the whole pool, which equals the loss of
a single process. So parameters applied after the gather (classifier rows, temperatures) have their
full gradient on every rank, and parameters applied before it (encoder, heads, bag) have a part of
it on each: `data_parallel`, `sum_gradients` and `sum_rows` add these up.

Steps have a short timeout, so that a hanging rank ends the job. Work between rounds has a long one,
since ranks may take unequal time there. A rank that dies closes its connections, which the others
notice at once."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from unidec.errors import ConfigError, TrainingError
from unidec.model.row_table import RowTable
from unidec.training.precision import choose_device

# torchrun takes 30 s more to kill hanging ranks, so the job ends within 60 s
STEP_TIMEOUT = timedelta(seconds=25)
# for a refresh, a checkpoint, and the first rank's work between rounds
PATIENCE = timedelta(hours=2)


class LostRank(TrainingError):
    """Another process of the training died or hangs; the error in this process is only a
    consequence.
    """


@dataclass(frozen=True, eq=False, repr=False)
class Ranks:
    """The processes that train together; by default this process alone, for which the methods cost
    nothing.

    Attributes:
        rank: number of this process, from 0; world: number of processes, `local_world` of them on
            this machine.
    """

    rank: int = 0
    world: int = 1
    local_world: int = 1
    # process groups: for a step's tensors on the device, for those on the host, and for host arrays
    # between rounds
    _steps: Any = None
    _flags: Any = None
    _patient: Any = None
    # failures of sums in a backward pass
    _failures: list[RuntimeError] = field(default_factory=list)

    @classmethod
    def from_environment(cls, device: str) -> Ranks:
        """Connect the ranks that `torchrun` started (RANK, WORLD_SIZE, LOCAL_RANK); without
        torchrun: this process alone.

        On GPUs each process uses the GPU with the number LOCAL_RANK, and NCCL.

        Args:
            device: the parameter `device`.

        Raises:
            ConfigError: more processes than GPUs on this machine.
            LostRank: the other processes cannot be reached.
        """
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world == 1:
            return ALONE
        backend = "gloo"
        own_device = choose_device(device)
        if own_device.type == "cuda":
            if own_device.index >= torch.cuda.device_count():
                raise ConfigError(
                    "more processes than GPUs on this machine",
                    where="run.devices",
                    got=own_device.index + 1,
                    expected=f"at most {torch.cuda.device_count()}",
                )
            torch.cuda.set_device(own_device)
            backend = "nccl"
        with _lost_rank():
            if not dist.is_initialized():
                store, rank, world = next(dist.rendezvous("env://", timeout=PATIENCE))
                # torchrun keeps its store when it restarts the ranks: a prefix hides the addresses
                # of dead ones
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"attempt-{attempt}", store),
                    rank=rank,
                    world_size=world,
                    timeout=PATIENCE,
                )
            steps = dist.new_group(backend=backend, timeout=STEP_TIMEOUT)
            flags = steps
            if backend == "nccl":  # for tensors on a device only
                flags = dist.new_group(backend="gloo", timeout=STEP_TIMEOUT)
        return cls(
            rank=dist.get_rank(),
            world=world,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
            _steps=steps,
            _flags=flags,
            _patient=dist.group.WORLD,
        )

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.world == 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints messages for all."""
        return self.rank == 0

    @property
    def is_first_here(self) -> bool:
        """Whether this is the first process of its machine, which verifies the files that all of
        them read there.
        """
        return self.rank % self.local_world == 0

    def part(self, count: int) -> tuple[int, int]:
        """Begin and end of this rank's contiguous part of `count` items; sizes of parts differ by
        at most one.
        """
        bounds = self._bounds(count)
        return bounds[self.rank], bounds[self.rank + 1]

    def own(self, items: np.ndarray) -> np.ndarray:
        """This rank's part of an array, a view."""
        begin, end = self.part(len(items))
        return items[begin:end]

    def sizes(self, count: int) -> list[int]:
        """The size of each rank's part of `count` items, [world]."""
        return np.diff(self._bounds(count)).tolist()

    def sizes_among(self, sorted_ids: np.ndarray, count: int) -> list[int]:
        """The number of ascending ids, all below `count`, in each rank's part of `count` items,
        [world].
        """
        places = np.searchsorted(sorted_ids, self._bounds(count))
        return np.diff(places).tolist()

    def _bounds(self, count: int) -> list[int]:
        return [count * rank // self.world for rank in range(self.world + 1)]

    def gather(self, x_RD: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all ranks [G, D], given the number of rows of each; backward returns this rank's
        slice of the gradient.
        """
        if self.alone:
            return x_RD
        parts = list(self._gather(x_RD, sizes).split(list(sizes)))
        parts[self.rank] = x_RD  # with its graph
        return torch.cat(parts)

    def data_parallel(self, encoder: nn.Module, no_texts: Any) -> nn.Module:
        """The encoder wrapped in torch's DistributedDataParallel: a backward pass through its
        output adds up the gradients of its trained parameters over the ranks, in buckets, while
        further gradients are computed.

        A backward pass through the encoder itself accumulates gradients on this rank only; they are
        added up in the next backward pass through the wrapper. Parameters keep their names in the
        encoder.

        Args:
            encoder: must have trained parameters; its weights are the same on all ranks.
            no_texts: the encoder's input for no texts.
        """
        trained = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
        was_training = encoder.training
        encoder.eval()  # dropout would draw random numbers
        grads = torch.autograd.grad(encoder(no_texts).sum(), trained, allow_unused=True)
        with warnings.catch_warnings():
            # torch 2.13 deprecates the argument; its replacement covers only a part of it
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
            parallel = DistributedDataParallel(
                encoder,
                process_group=self._steps,
                init_sync=False,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
                find_unused_parameters=any(grad is None for grad in grads),
            )
        parallel.register_comm_hook(None, lambda _, bucket: self._sum_bucket(bucket))
        # the first backward pass decides the buckets: with this one, a resumed run adds gradients
        # in the same order
        self.barrier()
        with self.exchanging():
            parallel(no_texts).sum().backward()
        encoder.train(was_training)
        encoder.zero_grad()
        return parallel

    @contextlib.contextmanager
    def exchanging(self) -> Iterator[None]:
        """Context of a backward pass: raises `LostRank` if a sum of `data_parallel` cannot reach a
        rank.
        """
        try:
            yield
        except RuntimeError as error:
            if not self._failures:
                raise
            with _lost_rank():
                # `error` has only the failure's text, not its type
                raise self._failures[0] from error

    def _sum_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The sum of a bucket's gradients over the ranks. DistributedDataParallel's default, the
        mean, would be wrong: each rank has a part of the gradient of the same loss.
        """

        def total(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            try:
                return reduced.value()[0]
            except RuntimeError as error:
                self._failures.append(error)
                raise

        work = dist.all_reduce(bucket.buffer(), group=self._steps, async_op=True)
        assert work is not None
        return work.get_future().then(total)

    def sum_gradients(
        self, parameters: Sequence[torch.nn.Parameter], complete: Collection[Tensor]
    ) -> None:
        """Add up the ranks' gradients of replicated parameters.

        A gradient that is missing on some ranks counts as zero there; if it is missing on all, it
        stays missing.

        Args:
            complete: parameters whose full gradient is on every rank already: the first rank's is
                taken.
        """
        if self.alone or not parameters:
            return
        if not self.is_first:
            for parameter in complete:
                parameter.grad = None
        present = self.any(*(parameter.grad is not None for parameter in parameters))
        for parameter, is_present in zip(parameters, present, strict=True):
            if is_present:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self.all_reduce(parameter.grad)

    def sum_rows(self, tables: Sequence[RowTable]) -> None:
        """Add up the ranks' gradients of the rows that each gathered from replicated tables.

        Afterwards each table's gathered rows, on every rank, are the rows of all ranks, ascending.
        Gradients are added in the order of ranks, so that their bits are the same on all ranks."""
        if self.alone:
            return
        for table in tables:
            if table.used is None:
                continue
            rows_U, leaf = table.used
            grad_UD = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if rows_U is None:  # all rows
                self.all_reduce(grad_UD)
            else:
                rows_U, grad_UD = self._sum_rows(rows_U, grad_UD)
            table.forget()
            with torch.enable_grad():
                table.gather(rows_U).grad = grad_UD

    def _sum_rows(self, rows_U: Tensor, grad_UD: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self._counts(len(rows_U), self._flags)
        rows_G = self._gather(rows_U.unsqueeze(1), sizes).squeeze(1)
        grad_GD = self._gather(grad_UD, sizes)
        all_rows, place_G = torch.unique(rows_G, return_inverse=True)
        sum_UD = grad_GD.new_zeros(len(all_rows), grad_GD.shape[1])
        # rank by rank: a rank has each row once, so the order of the additions is fixed
        for place, grad in zip(place_G.split(sizes), grad_GD.split(sizes), strict=True):
            sum_UD[place] += grad
        return all_rows, sum_UD

    def norm(self, gradients: Sequence[Tensor], sharded: Sequence[Tensor]) -> Tensor:
        """2-norm of all gradients, 0-d float32, with the same bits on every rank.

        Args:
            gradients: all gradients on this rank, already summed over the ranks.
            sharded: gradients of rows that only this rank holds; all others are counted on
            the first rank only.
        """
        counted = gradients if self.is_first else sharded
        if counted:
            norm = torch.nn.utils.get_total_norm(counted)
        else:
            norm = torch.zeros((), device=gradients[0].device)
        if self.alone:
            return norm
        square = norm.double().square()
        self.all_reduce(square)
        return square.sqrt().float()

    def any(self, *flags: bool) -> list[bool]:
        """For each flag whether it is set on any rank."""
        if self.alone:
            return list(flags)
        counts = torch.tensor(flags, dtype=torch.int32)
        self.all_reduce(counts, self._flags)
        return [count > 0 for count in counts.tolist()]

    def all_reduce(self, tensor: Tensor, group: Any = None, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce a tensor over the ranks, in place; default group: for a step, on the device."""
        if tensor.numel():
            with _lost_rank():
                dist.all_reduce(tensor, op, group=group or self._steps)

    def _counts(self, count: int, group: Any) -> list[int]:
        """Each rank's count, [world]."""
        counts = torch.zeros(self.world, dtype=torch.int64)
        counts[self.rank] = count
        self.all_reduce(counts, group)
        return counts.tolist()

    def _gather(self, x_RD: Tensor, sizes: Sequence[int]) -> Tensor:
        """Rows of all ranks, without a graph."""
        padded = x_RD.new_zeros(max(sizes), x_RD.shape[1])
        padded[: len(x_RD)] = x_RD.detach()
        parts = [torch.empty_like(padded) for _ in sizes]
        with _lost_rank():
            dist.all_gather(parts, padded, group=self._steps)
        filled = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        return torch.cat(filled)

    def barrier(self) -> None:
        """Wait for all ranks, up to `PATIENCE`."""
        if not self.alone:
            with _lost_rank():
                dist.barrier(group=self._patient)

    def share(self, value: Any = None) -> Any:
        """The first rank's value, a JSON value, on every rank."""
        if self.alone:
            return value
        # torch's collectives for objects would unpickle data from the network
        encoded = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return json.loads(self.share_array(encoded).tobytes())

    def share_array(self, array: np.ndarray) -> np.ndarray:
        """The first rank's array, on every rank; the other ranks' arrays must have the same dtype
        and the same axes except the first.
        """
        return self.gather_array(array if self.is_first else array[:0])

    def gather_array(self, array: np.ndarray) -> np.ndarray:
        """The arrays of all ranks, concatenated along the first axis; they must agree in type and
        in the other axes.
        """
        if self.alone:
            return array
        sizes = self._counts(len(array), self._patient)
        result = np.empty((sum(sizes), *array.shape[1:]), array.dtype)
        begin = 0
        for rank, size in enumerate(sizes):
            part = result[begin : begin + size]
            begin += size
            if rank == self.rank:
                part[:] = array
            if part.size:
                as_bytes = torch.from_numpy(part.reshape(-1).view(np.uint8))
                with _lost_rank():
                    dist.broadcast(as_bytes, group=self._patient, group_src=rank)
        return result

    def close(self) -> None:
        """Leave the process group."""
        if not self.alone:
            dist.destroy_process_group()


@contextlib.contextmanager
def _lost_rank() -> Iterator[None]:
    """Context that turns errors of torch.distributed into `LostRank`."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # the base class of all errors of torch.distributed
        raise LostRank(
            "another process of this training has died or does not respond",
            where=f"rank {os.environ.get('RANK', '?')}",
            got=str(error).splitlines()[0][:300],
            fix="start the training again: it resumes from its last checkpoint, with any number "
            "of processes",
        ) from error


ALONE = Ranks()
