"""Balanced clusters of similar vectors by recursive 2-means; all clusters of a level are split
together. Clusters of queries become batches, and clusters of labels share parameters.

Legend: N points, D dimensions, C clusters of a level, M slots of a cluster (its size, or one more),
A clusters that
have not converged, 2 the halves of a split.

Source: NGAME's batches as UniDEC uses them (spec, detail 7). Each iteration orders the points by
the difference of
their similarities to two centres, cuts them in half and recomputes the centres, until the gain in
mean cosine falls below a tolerance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unidec.errors import DataError
from unidec.model.pool import num_clusters
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks

# most points that are copied at once, on a CPU (for its cache) and on a GPU
POINTS_AT_ONCE = (1 << 16, 1 << 20)
TOLERANCE = 1e-4  # a split has converged when an iteration increases its mean cosine by less
MAX_ITERATIONS = 100


class Clusters(NamedTuple):
    """`order_N[offsets[c] : offsets[c + 1]]`, int64, are the members of cluster c, as positions
    among the points; `objective` is the mean cosine between the points and their cluster's centre.
    """

    order_N: np.ndarray
    offsets: np.ndarray
    objective: float


def balanced_clusters(
    vectors_ND: np.ndarray,
    max_size: int,
    seed: int,
    device: str | torch.device | None = None,
    ranks: Ranks = ALONE,
) -> Clusters:
    """Split points into 2^depth clusters of at most `max_size` points; sizes differ by at most one.

    depth is the smallest with ceil(N / 2^depth) <= max_size. If max_size is 1 and N is not a power
    of two, some clusters are empty.

    Args:
        vectors_ND: float [N, D], finite; scaled to unit length if they are not.
        seed: decides the two points from which each split starts.
        device: where to compute; None: the CPU. It needs memory for 1.5 times the vectors.
        ranks: processes that all call this with all vectors; the first computes the clusters, and
        all return them.

    Raises:
        DataError: the vectors are not finite.
    """
    unit_ND = _unit_vectors(vectors_ND, device)
    num_points = len(vectors_ND)
    slot_CM = torch.arange(num_points, device=unit_ND.device).reshape(1, -1)
    size_C = torch.tensor([num_points], device=unit_ND.device)
    levels = (num_clusters(num_points, max_size) - 1).bit_length()
    objective = float(unit_ND.mean(0).norm()) if num_points else 1.0
    for level in progress(range(levels if ranks.is_first else 0), desc="cluster", unit="level"):
        slot_CM, size_C, objective = _split(
            unit_ND, slot_CM, size_C, np.random.default_rng([seed % 2**63, level])
        )
    filled_CM = torch.arange(slot_CM.shape[1], device=slot_CM.device) < size_C.unsqueeze(1)
    order_N, sizes = (
        ranks.gather_array(x.cpu().numpy() if ranks.is_first else None)
        for x in (slot_CM[filled_CM], size_C)
    )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Clusters(order_N, offsets, ranks.share(objective))


def _split(
    unit_ND: Tensor, slot_CM: Tensor, size_C: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor, float]:
    """Split all clusters of a level. Returns slots and sizes of their halves, and the mean cosine
    of all points.
    """
    num_points = unit_ND.shape[0]
    device = unit_ND.device
    parts = []
    start_C2 = torch.from_numpy(rng.random((len(slot_CM), 2))).to(device)
    # clusters at once: bounds the copy of their points
    at_once = max(1, POINTS_AT_ONCE[device.type == "cuda"] // max(slot_CM.shape[1], 1))
    for begin in range(0, len(slot_CM), at_once):
        some = slice(begin, begin + at_once)
        # the first level needs no copy
        point_CMD = (
            unit_ND[None] if len(slot_CM) == 1 else _members(unit_ND, slot_CM[some], size_C[some])
        )
        parts.append(_split_level(point_CMD, size_C[some], start_C2[some]))
    order_CM, objective_C = (torch.cat(part) for part in zip(*parts, strict=True))
    objective = float((objective_C * size_C).sum() / num_points)
    return *_halves(slot_CM.gather(1, order_CM), size_C), objective


def _unit_vectors(vectors_ND: np.ndarray, device: str | torch.device | None) -> Tensor:
    # torch shares memory with writable arrays only; a read-only memory map is copied
    tensor = torch.from_numpy(np.require(vectors_ND, requirements=["C", "W"])).to(
        device=device, dtype=torch.float32
    )
    norm_N = tensor.norm(dim=1)
    if not bool(torch.isfinite(norm_N).all()):
        bad = torch.nonzero(~torch.isfinite(norm_N)).flatten()[:5].tolist()
        raise DataError(
            "vectors to cluster are not finite",
            got=f"rows {bad}",
            fix="check the last training losses",
        )
    if bool(((norm_N - 1).abs() > 1e-3).any()):
        tensor = F.normalize(tensor, dim=1)
    return tensor


def _members(unit_ND: Tensor, slot_CM: Tensor, size_C: Tensor) -> Tensor:
    """Vectors by cluster and slot, [C, M, D]. Sizes differ by at most one, so only the last slot of
    a cluster can be empty; it has zeros.
    """
    point_CMD = unit_ND[slot_CM]
    if slot_CM.shape[1]:
        point_CMD[:, -1] *= (size_C == slot_CM.shape[1]).to(point_CMD.dtype).unsqueeze(1)
    return point_CMD


def _halves(slot_CM: Tensor, size_C: Tensor) -> tuple[Tensor, Tensor]:
    """Slots and sizes of each cluster's halves, cut from its members in the given order; the first
    half is the larger one if the size is odd.
    """
    first_C = (size_C + 1) // 2
    second_C = size_C - first_C
    width = (slot_CM.shape[1] + 1) // 2
    column_M = torch.arange(width, device=slot_CM.device)
    last = slot_CM.shape[1] - 1
    # positions past the end repeat some member: such a slot counts as empty, since it is not below
    # the cluster's size
    second_CM = slot_CM.gather(1, (first_C.unsqueeze(1) + column_M).clamp_max(last))
    slot_C2M = torch.stack([slot_CM[:, :width], second_CM], dim=1)
    return slot_C2M.reshape(-1, width), torch.stack([first_C, second_C], dim=1).reshape(-1)


def _split_level(point_CMD: Tensor, size_C: Tensor, draw_C2: Tensor) -> tuple[Tensor, Tensor]:
    """Balanced 2-means in all clusters together; a cluster that has converged keeps its split while
    others iterate.

    Args:
        draw_C2: uniform in [0, 1), decides the two points from which each cluster's split starts.

    Returns:
        order_CM: int64, slots of each cluster by decreasing preference for the first centre, empty
        slots last.
        objective_C: float32, mean cosine between the points and the centre of their half.
    """
    num_clusters, num_slots, _ = point_CMD.shape
    device = point_CMD.device
    order_CM = torch.arange(num_slots, device=device).repeat(num_clusters, 1)
    objective_C = torch.full((num_clusters,), -torch.inf, device=device)
    # not converged; tensors [A, ...] below have a row for each
    active_C = torch.arange(num_clusters, device=device)
    size_A = size_C
    point_AMD = point_CMD
    total_AD = point_CMD.sum(1)
    # initial centres: two distinct random members of each cluster (twice the same if it has only
    # one)
    first_C = (draw_C2[:, 0] * size_C).long()
    second_C = (
        first_C + 1 + (draw_C2[:, 1] * (size_C - 1).clamp_min(0)).long()
    ) % size_C.clamp_min(1)
    difference_AD = point_CMD[active_C, first_C] - point_CMD[active_C, second_C]
    column_M = torch.arange(num_slots, device=device)
    for _ in range(MAX_ITERATIONS):
        if not len(active_C):
            break
        score_AM = torch.bmm(point_AMD, difference_AD.unsqueeze(2)).squeeze(2)
        score_AM = score_AM.masked_fill(column_M >= size_A.unsqueeze(1), -torch.inf)
        best_AM = score_AM.argsort(dim=1, descending=True, stable=True)
        in_first_AM = (
            (column_M < ((size_A + 1) // 2).unsqueeze(1)).to(point_AMD.dtype).expand_as(best_AM)
        )
        half_AM = torch.zeros_like(score_AM).scatter_(1, best_AM, in_first_AM)
        first_AD = torch.bmm(half_AM.unsqueeze(1), point_AMD).squeeze(1)
        second_AD = total_AD - first_AD
        # points have unit length: the sum of their cosines with their half's centre is the length
        # of their sum
        now_A = (first_AD.norm(dim=1) + second_AD.norm(dim=1)) / size_A.clamp_min(1)
        gain_A = now_A - objective_C[active_C]
        better_A = gain_A > 0
        order_CM[active_C[better_A]] = best_AM[better_A]
        objective_C[active_C] = torch.maximum(now_A, objective_C[active_C])
        moving_A = gain_A >= TOLERANCE
        difference_AD = F.normalize(first_AD, dim=1) - F.normalize(second_AD, dim=1)
        if bool(moving_A.all()):
            continue
        active_C = active_C[moving_A]
        size_A = size_A[moving_A]
        total_AD = total_AD[moving_A]
        difference_AD = difference_AD[moving_A]
        point_AMD = point_AMD[moving_A]
    return order_CM, objective_C
