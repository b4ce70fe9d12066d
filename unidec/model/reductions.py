"""Multi-label reductions: which positives of a query carry its loss, and with what weight.

Legend: P positive pairs in the pool, B rows (queries; pool labels when the loss runs from label to query).

A reduction gives each positive pair (i, p) a weight; a multi-class loss is then `sum_ip weight_ip * loss(i, p)`
divided by the number of rows that carry any weight (`unidec.model.losses`). OvA has no weights: it is the loss `bce`,
on every entry of the pool.

Everything here runs without waiting for the device: no `.item()`, no boolean indexing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from unidec.errors import ConfigError


@dataclass(frozen=True)
class PairFacts:
    """What a reduction may read: the arguments of `target_weights`."""

    row_P: Tensor
    sampled_P: Tensor
    relevance_P: Tensor
    num_rows: int
    num_positives_B: Tensor
    generator: torch.Generator | None


def psl(pairs: PairFacts) -> Tensor:
    """Pick some labels: 1 / |P_i^B| each, P_i^B = all true positives of the row in the pool (UniDEC v2, L_PSL).

    Soft targets: relevance divided by the row's sum of relevances in the pool.
    """
    total_B = pairs.relevance_P.new_zeros(pairs.num_rows).index_add_(0, pairs.row_P, pairs.relevance_P)
    # A row's total is 0 only where all its relevances are; its weights are then 0, not 0 / 0.
    return pairs.relevance_P / total_B.clamp_min(torch.finfo(total_B.dtype).tiny)[pairs.row_P]


def psl_sum(pairs: PairFacts) -> Tensor:
    """PSL without the 1 / |P_i^B| factor: each positive counts in full ("-PAL" rows of the UniDEC v1 ablation)."""
    return pairs.relevance_P


def pal_n(pairs: PairFacts) -> Tensor:
    """Pick all labels, normalised: 1 / |P_i| each, positives outside the pool counted (UniDEC v1, L_PAL-N).

    Exact only when the pool holds every label. Soft targets: give the row's sum of relevances as `num_positives_B`.
    """
    relevance_P = pairs.relevance_P
    total_B = pairs.num_positives_B.to(relevance_P.dtype).clamp_min(torch.finfo(relevance_P.dtype).tiny)
    return relevance_P / total_B[pairs.row_P]


def pol(pairs: PairFacts) -> Tensor:
    """Pick one label: one sampled positive of each row has weight 1, all else 0 (DPR, NGAME, DEXML).

    Without a generator it is the row's first sampled pair. Pairs come ordered by label, so with beta > 1 that favours
    low label ids: sample one positive (beta = 1) or give a generator, which picks uniformly among the sampled ones.
    """
    row_P, num_pairs, generator = pairs.row_P, pairs.row_P.shape[0], pairs.generator
    if generator is None:
        rank_P = torch.arange(num_pairs, device=row_P.device)
    else:
        rank_P = torch.randperm(num_pairs, generator=generator, device=generator.device).to(row_P.device)
    rank_P = torch.where(pairs.sampled_P, rank_P, num_pairs)
    first_B = torch.full((pairs.num_rows,), num_pairs, dtype=rank_P.dtype, device=row_P.device)
    first_B = first_B.scatter_reduce(0, row_P, rank_P, reduce="amin")
    return ((rank_P == first_B[row_P]) & pairs.sampled_P).to(pairs.relevance_P.dtype)


REDUCTIONS: dict[str, Callable[[PairFacts], Tensor]] = {"psl": psl, "psl-sum": psl_sum, "pal-n": pal_n, "pol": pol}


def target_weights(
    kind: str,
    *,
    row_P: Tensor,
    sampled_P: Tensor,
    relevance_P: Tensor | None,
    num_rows: int,
    num_positives_B: Tensor,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Weight of each positive pair under a reduction.

    Args:
        kind: a key of `REDUCTIONS`: "psl", "psl-sum", "pal-n" or "pol".
        row_P: int64 [P], row of each pair. From label to query give the pool positions of the labels (any order).
        sampled_P: bool [P], the label was sampled as this query's own positive; read by "pol" only.
        relevance_P: float [P] soft targets, or None: 1 each. "pol" gives weight 1 whatever they are.
        num_rows: B, the number of rows, those without a pair included.
        num_positives_B: number [B], |P_i|, in the pool or not; read by "pal-n" only.
        generator: for "pol", picks one of the sampled positives at random instead of the first.

    Returns:
        weight_P: float [P] (float32 without soft targets).

    Raises:
        ConfigError: an unknown reduction.
    """
    if kind not in REDUCTIONS:
        raise ConfigError("unknown reduction", where="loss.reduction", got=kind, expected=", ".join(REDUCTIONS))
    if relevance_P is None:
        relevance_P = torch.ones(row_P.shape[0], device=row_P.device)
    elif not relevance_P.is_floating_point():
        relevance_P = relevance_P.float()
    return REDUCTIONS[kind](PairFacts(row_P, sampled_P, relevance_P, num_rows, num_positives_B, generator))
