"""Multi-label reductions: which positives of a query carry its loss, and with what weight.

Legend: P positive pairs in the pool, B rows (queries; pool labels when the loss runs from label to query).

A reduction gives each positive pair (i, p) a weight; a multi-class loss is then `sum_ip weight_ip * loss(i, p)`
divided by the number of rows that carry any weight (`unidec.model.losses`). OvA has no weights: it is the loss `bce`,
on every entry of the pool. Nothing here waits for the device: no `.item()`, no boolean indexing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unidec.errors import ConfigError

REDUCTIONS = ("psl", "psl-sum", "pal-n", "pol")


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
    """Weight of each positive pair under a reduction; soft targets replace the 1 and the counts by relevances.

    - "psl", pick some labels: 1 / |P_i^B| each, P_i^B = all true positives of the row in the pool (UniDEC v2, L_PSL).
    - "psl-sum": PSL without the factor, each counts in full ("-PAL" rows of the UniDEC v1 ablation).
    - "pal-n", pick all labels, normalised: 1 / |P_i| each, positives outside the pool counted (UniDEC v1, L_PAL-N).
      Exact only when the pool holds every label.
    - "pol", pick one label: one sampled positive of each row has weight 1, all else 0 (DPR, NGAME, DEXML).

    Args:
        kind: one of `REDUCTIONS`.
        row_P: int64 [P], row of each pair. From label to query give the pool positions of the labels (any order).
        sampled_P: bool [P], the label was sampled as this query's own positive; read by "pol" only.
        relevance_P: float [P] soft targets, or None: 1 each. "pol" gives weight 1 whatever they are.
        num_rows: B, the number of rows, those without a pair included.
        num_positives_B: number [B], |P_i|, in the pool or not (soft targets: the row's sum); read by "pal-n" only.
        generator: for "pol", picks one of the sampled positives at random. Without it the row's first one counts, which
            favours low label ids where beta > 1: pairs come ordered by label.

    Returns:
        weight_P: float [P] (float32 without soft targets).

    Raises:
        ConfigError: an unknown reduction.
    """
    if relevance_P is None:
        relevance_P = torch.ones(row_P.shape[0], device=row_P.device)
    elif not relevance_P.is_floating_point():
        relevance_P = relevance_P.float()
    if kind == "psl-sum":
        return relevance_P
    if kind == "pol":
        return _picked(row_P, sampled_P, num_rows, generator).to(relevance_P.dtype)
    if kind == "psl":
        total_B = relevance_P.new_zeros(num_rows).index_add_(0, row_P, relevance_P)
    elif kind == "pal-n":
        total_B = num_positives_B.to(relevance_P.dtype)
    else:
        raise ConfigError("unknown reduction", where="loss.reduction", got=kind, expected=", ".join(REDUCTIONS))
    # A row's total is 0 only where all its relevances are; its weights are then 0, not 0 / 0.
    return relevance_P / total_B.clamp_min(torch.finfo(total_B.dtype).tiny)[row_P]


def _picked(row_P: Tensor, sampled_P: Tensor, num_rows: int, generator: torch.Generator | None) -> Tensor:
    """One sampled pair of each row, bool [P]."""
    num_pairs = row_P.shape[0]
    if generator is None:
        rank_P = torch.arange(num_pairs, device=row_P.device)
    else:
        rank_P = torch.randperm(num_pairs, generator=generator, device=generator.device).to(row_P.device)
    rank_P = torch.where(sampled_P, rank_P, num_pairs)
    first_B = torch.full((num_rows,), num_pairs, dtype=rank_P.dtype, device=row_P.device)
    first_B = first_B.scatter_reduce(0, row_P, rank_P, reduce="amin")
    return (rank_P == first_B[row_P]) & sampled_P
