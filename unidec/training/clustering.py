"""Balanced clusters of similar vectors by recursive 2-means; all clusters of a level are split
together. Clusters of queries become batches, and clusters of labels share parameters.

Legend: N points, D dimensions, C clusters of a level, M slots of a cluster (its size, or one more),
A clusters that have not converged, 2 the halves of a split.

Source: NGAME's batches as UniDEC uses them. Each iteration orders the points by
the difference of their similarities to two centres, cuts them in half and recomputes the centres,
until the gain in mean cosine falls below a tolerance.

To save memory, float16 points are first cut into parts of at most `PART_BYTES` as float32: the two
centres of a cut are fitted on a sample of the points, and one pass over all of them assigns them to
the halves. Memory is then 8 bytes per point for the order (20 while a cut sorts its points), and
the float32 vectors of one part with the copies of a level."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unidec.data.chunks import blocks, offsets_of
from unidec.model.pool import num_clusters
from unidec.model.search import finite_matrix
from unidec.progress import progress
from unidec.training.distributed import ALONE, Ranks

# maximum points copied at once, on a CPU (for its cache) and on a GPU
POINTS_AT_ONCE = (1 << 16, 1 << 20)
TOLERANCE = 1e-4  # a split has converged when an iteration increases its mean cosine by less
MAX_ITERATIONS = 100
PART_BYTES = 1 << 28  # maximum bytes of float32 points that are clustered in memory
SAMPLE = 1 << 16  # points that decide a cut of more points than are clustered in memory


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
    of two, some clusters are empty. A process alone clusters float16 points in parts.

    Args:
        vectors_ND: float [N, D], finite; scaled to unit length if they are not.
        seed: decides the two points from which each split starts.
        device: where to compute; None: the CPU. It needs memory for 1.5 times the vectors, or those
            of a part.
        ranks: processes that all call this with all vectors; the first computes the clusters, and
        all return them.

    Raises:
        DataError: the vectors are not finite.
    """
    num_points, width = vectors_ND.shape
    num_levels = (num_clusters(num_points, max_size) - 1).bit_length()
    num_cuts = 0
    if vectors_ND.dtype == np.float16 and ranks.alone:
        part_points = max(2, PART_BYTES // (4 * width))
        num_cuts = min(num_levels, (num_clusters(num_points, part_points) - 1).bit_length())
    seed %= 2**63
    parts = [np.arange(num_points)]
    for level in progress(range(num_cuts), desc="cut into parts", unit="level"):
        halves = []
        for number, part_P in enumerate(parts):
            rng = np.random.default_rng([seed, level, number])
            halves += _cut(vectors_ND, part_P, rng, device)
        parts = halves
    levels = range(num_cuts, num_levels if ranks.is_first else 0)
    sizes = []
    total = 0.0
    for number, part_P in enumerate(parts):
        # without a copy of all points
        unit_PD = _unit_vectors(vectors_ND[part_P] if num_cuts else vectors_ND, device, part_P)
        keys = ([seed, level, number] for level in progress(levels, desc="cluster", unit="level"))
        order_P, offsets, objective = _clusters_in_memory(unit_PD, keys)
        part_P[:] = part_P[order_P]
        sizes.append(np.diff(offsets))
        total += objective * len(part_P)
    order_N = ranks.share_array(np.concatenate(parts))
    offsets = ranks.share_array(offsets_of(np.concatenate(sizes)))
    return Clusters(order_N, offsets, ranks.share(total / max(num_points, 1)))


def _clusters_in_memory(unit_ND: Tensor, keys: Iterable[list[int]]) -> Clusters:
    """Clusters after as many levels as there are keys, which seed the draws of their levels."""
    num_points = len(unit_ND)
    device = unit_ND.device
    slot_CM = torch.arange(num_points, device=device).unsqueeze(0)
    size_C = torch.tensor([num_points], device=device)
    objective = float(unit_ND.mean(0).norm()) if num_points else 1.0
    for key in keys:
        rng = np.random.default_rng(key)
        slot_CM, size_C, objective = _split(unit_ND, slot_CM, size_C, rng)
    column_M = torch.arange(slot_CM.shape[1], device=device)
    is_filled_CM = column_M < size_C.unsqueeze(1)
    order_N = slot_CM[is_filled_CM].cpu().numpy()
    return Clusters(order_N, offsets_of(size_C.cpu().numpy()), objective)


def _cut(
    vectors_ND: np.ndarray,
    part_P: np.ndarray,
    rng: np.random.Generator,
    device: str | torch.device | None,
) -> list[np.ndarray]:
    """The halves of a part, ascending positions among all points; the first half is the larger one
    if the size is odd.
    """
    num_points = len(part_P)
    step = -(-num_points // SAMPLE)
    sample_S = part_P[::step]
    sample_SD = _unit_vectors(vectors_ND[sample_S], device, sample_S)
    size_1 = torch.tensor([len(sample_SD)], device=sample_SD.device)
    draw_12 = torch.from_numpy(rng.random((1, 2))).to(sample_SD.device)
    order_1S, _ = _split_level(sample_SD.unsqueeze(0), size_1, draw_12)
    half_S = order_1S[0].split((len(sample_SD) + 1) // 2)
    first_D, second_D = (F.normalize(sample_SD[half].sum(0), dim=0) for half in half_S)
    score_P = np.empty(num_points, dtype=np.float32)
    for some in blocks(num_points, SAMPLE):
        unit_BD = _unit_vectors(vectors_ND[part_P[some]], device, part_P[some])
        score_P[some] = (unit_BD @ (first_D - second_D)).cpu().numpy()
    order_P = np.argsort(-score_P, kind="stable")
    num_first = (num_points + 1) // 2
    return [np.sort(part_P[half_P]) for half_P in np.split(order_P, [num_first])]


def _split(
    unit_ND: Tensor, slot_CM: Tensor, size_C: Tensor, rng: np.random.Generator
) -> tuple[Tensor, Tensor, float]:
    """Split all clusters of a level. Returns slots and sizes of their halves, and the mean cosine
    of all points.
    """
    num_points = len(unit_ND)
    num_clusters, num_slots = slot_CM.shape
    device = unit_ND.device
    draw_C2 = torch.from_numpy(rng.random((num_clusters, 2))).to(device)
    # clusters at once: bounds the copy of their points
    at_once = max(1, POINTS_AT_ONCE[device.type == "cuda"] // max(num_slots, 1))
    orders = []
    objectives = []
    for some in blocks(num_clusters, at_once):
        if num_clusters == 1:  # the first level needs no copy
            point_CMD = unit_ND.unsqueeze(0)
        else:
            point_CMD = _members(unit_ND, slot_CM[some], size_C[some])
        order_CM, objective_C = _split_level(point_CMD, size_C[some], draw_C2[some])
        orders.append(order_CM)
        objectives.append(objective_C)
    objective = (torch.cat(objectives) * size_C).sum() / num_points
    ordered_CM = slot_CM.gather(1, torch.cat(orders))
    return *_halves(ordered_CM, size_C), float(objective)


def _unit_vectors(
    vectors_ND: np.ndarray, device: str | torch.device | None, rows_N: np.ndarray | None
) -> Tensor:
    """Vectors float32 of unit length; `rows_N`: their numbers for an error, if not 0 to N - 1."""
    tensor = finite_matrix(vectors_ND, "vectors to cluster", device, rows_N)
    if bool(((tensor.norm(dim=1) - 1).abs() > 1e-3).any()):
        tensor = F.normalize(tensor, dim=1)
    return tensor


def _members(unit_ND: Tensor, slot_CM: Tensor, size_C: Tensor) -> Tensor:
    """Vectors by cluster and slot, [C, M, D]. Sizes differ by at most one, so only the last slot of
    a cluster can be empty; it has zeros.
    """
    point_CMD = unit_ND[slot_CM]
    num_slots = slot_CM.shape[1]
    if num_slots:
        is_full_C1 = (size_C == num_slots).unsqueeze(1)
        point_CMD[:, -1] *= is_full_C1.to(point_CMD.dtype)
    return point_CMD


def _halves(slot_CM: Tensor, size_C: Tensor) -> tuple[Tensor, Tensor]:
    """Slots and sizes of each cluster's halves, cut from its members in the given order; the first
    half is the larger one if the size is odd.
    """
    num_slots = slot_CM.shape[1]
    width = (num_slots + 1) // 2
    first_C = (size_C + 1) // 2
    size_C2 = torch.stack([first_C, size_C - first_C], dim=1)
    # positions past the end repeat some member: such a slot counts as empty, since it is not below
    # the cluster's size
    place_CM = first_C.unsqueeze(1) + torch.arange(width, device=slot_CM.device)
    second_CM = slot_CM.gather(1, place_CM.clamp_max(num_slots - 1))
    slot_C2M = torch.stack([slot_CM[:, :width], second_CM], dim=1)
    return slot_C2M.flatten(0, 1), size_C2.flatten()


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
    column_M = torch.arange(num_slots, device=device)
    order_CM = column_M.repeat(num_clusters, 1)
    objective_C = torch.full((num_clusters,), -torch.inf, device=device)
    # not converged; tensors [A, ...] below have a row for each
    active_C = torch.arange(num_clusters, device=device)
    size_A = size_C
    point_AMD = point_CMD
    total_AD = point_CMD.sum(1)
    first_C, second_C = _two_members(size_C, draw_C2)
    difference_AD = point_CMD[active_C, first_C] - point_CMD[active_C, second_C]
    for _ in range(MAX_ITERATIONS):
        if not len(active_C):
            break
        score_AM = torch.bmm(point_AMD, difference_AD.unsqueeze(2)).squeeze(2)
        is_empty_AM = column_M >= size_A.unsqueeze(1)
        score_AM = score_AM.masked_fill(is_empty_AM, -torch.inf)
        best_AM = score_AM.argsort(dim=1, descending=True, stable=True)
        # 1 for the slots of the first half
        num_first_A1 = ((size_A + 1) // 2).unsqueeze(1)
        in_first_AM = (column_M < num_first_A1).to(point_AMD.dtype)
        half_AM = torch.zeros_like(score_AM).scatter_(1, best_AM, in_first_AM)
        first_AD = torch.bmm(half_AM.unsqueeze(1), point_AMD).squeeze(1)
        second_AD = total_AD - first_AD
        # points have unit length: the sum of their cosines with their half's centre is the length
        # of their sum
        cosines_A = first_AD.norm(dim=1) + second_AD.norm(dim=1)
        now_A = cosines_A / size_A.clamp_min(1)
        gain_A = now_A - objective_C[active_C]
        better_A = gain_A > 0
        order_CM[active_C[better_A]] = best_AM[better_A]
        objective_C[active_C] = torch.maximum(now_A, objective_C[active_C])
        difference_AD = F.normalize(first_AD, dim=1) - F.normalize(second_AD, dim=1)
        moving_A = gain_A >= TOLERANCE
        if not bool(moving_A.all()):
            active_C = active_C[moving_A]
            size_A = size_A[moving_A]
            total_AD = total_AD[moving_A]
            difference_AD = difference_AD[moving_A]
            point_AMD = point_AMD[moving_A]
    return order_CM, objective_C


def _two_members(size_C: Tensor, draw_C2: Tensor) -> tuple[Tensor, Tensor]:
    """Two distinct random slots of each cluster, its initial centres; twice the same if it has only
    one member.
    """
    first_C = (draw_C2[:, 0] * size_C).long()
    num_others_C = (size_C - 1).clamp_min(0)
    distance_C = 1 + (draw_C2[:, 1] * num_others_C).long()
    return first_C, (first_C + distance_C) % size_C.clamp_min(1)
