"""Trains a fusion (`fusion.py`) on queries that the model has not seen.

Legend: N queries, P pairs of a query and a candidate, C candidates of the query that has most, X features, H hidden
units.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from unidec.model.losses import decoupled_softmax
from unidec.model.pairs import Pairs
from unidec.retrieval.fusion import LIMIT, Evidence, Floats, Fusion
from unidec.retrieval.query_encoder import usable_cores

FOLDS, HIDDEN = 8, 32  # hidden units of each fold's network; measured: benchmarks/results/fusion.md
BATCH, RATE, DECAY = 128, 0.01, 0.1
MOST_STEPS, STEPS_PER_QUERY = 600, 0.75  # a few hundred queries are learnt by heart in more
_LEAST_SCALE = 1e-6


@dataclass(frozen=True)
class Fitted:
    """A fusion, and what it gives queries that it has not seen.

    Attributes:
        fusion: the mean of the folds' networks.
        held_out_P: float32 [P], each pair's score by the network of the fold that has not seen its query.
        without_XP: float32 [X, P], the same with one feature after the other at its mean.
    """

    fusion: Fusion
    held_out_P: Floats
    without_XP: Floats


def fit_fusion(evidence: Evidence, relevant_P: np.ndarray, propensity: tuple[float, float], seed: int = 0) -> Fitted:
    """Train a network on each choice of all folds but one, with the decoupled softmax over a query's candidates.

    Args:
        evidence: of queries that the model was not trained on.
        relevant_P: bool [P]. propensity: the data set's constants A and B.
    """
    feature_PX = evidence.feature_PX
    mean_X = feature_PX.mean(axis=0)
    scale_X = np.maximum(feature_PX.std(axis=0), _LEAST_SCALE)
    x_PX = torch.from_numpy(np.clip((feature_PX - mean_X) / scale_X, -LIMIT, LIMIT))
    fold_N = np.random.default_rng(seed).permutation(evidence.num_queries) % FOLDS
    held_out_P = np.zeros(len(x_PX), dtype=np.float32)
    without_XP = np.zeros(x_PX.shape[::-1], dtype=np.float32)

    def fit(fold: int) -> _Network:
        torch.set_num_threads(1)  # of this thread: several folds at once take less time than several threads for one
        network = _Network(x_PX.shape[1], torch.Generator().manual_seed(seed + fold))
        queries, generator = np.flatnonzero(fold_N != fold), np.random.default_rng([seed, fold])
        _train(network, x_PX, evidence, relevant_P, queries, generator)
        with torch.no_grad():
            own_P = fold_N[evidence.query_P] == fold
            own_PX = x_PX[torch.from_numpy(own_P)]
            held_out_P[own_P] = network(own_PX).numpy()
            for without_P, kept_X in zip(without_XP, 1 - torch.eye(len(without_XP)), strict=True):
                without_P[own_P] = network(own_PX * kept_X).numpy()
        return network

    num_threads = torch.get_num_threads()
    with ThreadPoolExecutor(min(FOLDS, usable_cores())) as threads:
        networks = list(threads.map(fit, range(FOLDS)))
    torch.set_num_threads(num_threads)  # of threads that are started from here on

    def joined(*parts: Tensor) -> list[float]:
        return torch.cat(parts).detach().tolist()

    linear_X = torch.stack([network.linear for network in networks]).mean(dim=0)
    fusion = Fusion(
        mean=mean_X.tolist(), scale=scale_X.tolist(), linear=linear_X.tolist(),
        hidden=torch.cat([network.hidden_HX for network in networks]).tolist(),
        hidden_bias=joined(*(network.bias_H for network in networks)),
        out=joined(*(network.out_H / FOLDS for network in networks)), propensity=propensity,
    )  # fmt: skip
    return Fitted(fusion, held_out_P, without_XP)


class _Network(nn.Module):
    """w . x + sum over h of o_h max(0, v_h . x + b_h)."""

    def __init__(self, num_features: int, generator: torch.Generator) -> None:
        super().__init__()
        bound = num_features**-0.5
        self.linear = nn.Parameter(torch.zeros(num_features))
        self.hidden_HX = nn.Parameter(torch.empty(HIDDEN, num_features).uniform_(-bound, bound, generator=generator))
        self.bias_H = nn.Parameter(torch.empty(HIDDEN).uniform_(-bound, bound, generator=generator))
        self.out_H = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.linear + torch.relu(x @ self.hidden_HX.T + self.bias_H) @ self.out_H


def _train(
    network: _Network, x_PX: Tensor, evidence: Evidence, relevant_P: np.ndarray, queries: np.ndarray,
    generator: np.random.Generator,
) -> None:  # fmt: skip
    begin_N = np.searchsorted(evidence.query_P, np.arange(evidence.num_queries + 1))
    has_positive = np.add.reduceat(np.append(relevant_P, False), begin_N[:-1]) * (np.diff(begin_N) > 0) > 0
    queries = queries[has_positive[queries]]
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    num_steps = min(MOST_STEPS, int(STEPS_PER_QUERY * len(queries)))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, num_steps))
    times = 1 + num_steps * BATCH // max(1, len(queries))
    order = np.concatenate([generator.permutation(queries) for _ in range(times)])
    for step in range(num_steps):
        some = np.unique(order[step * BATCH : (step + 1) * BATCH])
        loss = _loss(network, x_PX, relevant_P, begin_N[some], begin_N[some + 1])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()


def _loss(network: _Network, x_PX: Tensor, relevant_P: np.ndarray, begin_B: np.ndarray, end_B: np.ndarray) -> Tensor:
    """The decoupled softmax of some queries over their candidates, the mean over each query's positives."""
    size_B = end_B - begin_B
    row_N = np.repeat(np.arange(len(size_B)), size_B)
    column_N = np.arange(len(row_N)) - np.repeat(np.cumsum(size_B) - size_B, size_B)
    pair_N = np.repeat(begin_B, size_B) + column_N
    score_N = network(x_PX[torch.from_numpy(pair_N)])
    score_BC = score_N.new_zeros(len(size_B), int(size_B.max()))
    score_BC[torch.from_numpy(row_N), torch.from_numpy(column_N)] = score_N
    positive = relevant_P[pair_N]
    row_F, column_F = np.nonzero(np.arange(score_BC.shape[1]) >= size_B[:, None])  # shorter lists are filled up
    row_P = row_N[positive]
    weight_P = (1 / np.bincount(row_P, minlength=len(size_B)))[row_P]
    parts = (row_P, column_N[positive], weight_P.astype(np.float32), row_F, column_F)
    return decoupled_softmax(score_BC, Pairs(*(torch.from_numpy(part) for part in parts)))
