"""Trains the networks of a fusion (`fusion.py`).

The fusion is trained on queries that the model was not trained on; its word network is trained on
training queries, each treated as absent from the training data.

Legend: N queries, P pairs of a query and a candidate, X features, H hidden units; of a batch: B
queries, C candidates of a query at most, F padding entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unidec.cores import in_order, num_threads, thread_pool
from unidec.data.chunks import blocks, offsets_of
from unidec.model.losses import decoupled_softmax
from unidec.model.pairs import Pairs
from unidec.progress import progress
from unidec.ranking.fusion import LIMIT, QUERIES_AT_ONCE, Evidence, Fusion, Network
from unidec.ranking.heads import PairScores
from unidec.ranking.sparse import Floats, Rows, first_of_each
from unidec.ranking.word_scores import WordScorer

# folds, and hidden units of each fold's network; measured: benchmarks/results/fusion.md
FOLDS = 4
HIDDEN = 32
BATCH = 128
RATE = 0.01
DECAY = 0.1
# more steps overfit a few hundred queries
MOST_STEPS = 600
STEPS_PER_QUERY = 0.75
WORD_HIDDEN = 64
WORD_BATCH = 256
WORD_STEPS = 1500
LEAST_WORD_QUERIES = 1000
MOST_WORD_QUERIES = 24_000
_LEAST_SCALE = 1e-6


@dataclass(frozen=True)
class Fitted:
    """A trained fusion, and cross-validated scores.

    Attributes:
        fusion: average of the folds' networks.
        held_out_P: float32 [P], each pair's score by the network that was not trained on its query.
    """

    fusion: Fusion
    held_out_P: Floats


def fit_fusion(
    evidence: Evidence,
    relevant_P: np.ndarray,
    propensity: tuple[float, float],
    seed: int = 0,
    by_words: Network | None = None,
) -> Fitted:
    """Train a network for each fold, on the queries outside that fold.

    Args:
        evidence: candidates of queries that the model was not trained on.
        relevant_P: bool [P]. propensity: the data set's constants A and B.
        by_words: the word network that was used to read the evidence.
    """
    pairs = _Training.of(evidence.query_P, evidence.feature_PX, relevant_P, evidence.num_queries)
    x_PX = pairs.x_PX
    num_pairs, num_features = x_PX.shape
    fold_N = np.random.default_rng(seed).permutation(evidence.num_queries) % FOLDS
    held_out_P = np.zeros(num_pairs, dtype=np.float32)

    def fit(fold: int) -> _Network:
        network = _Network(num_features, HIDDEN, seed + fold)
        queries = pairs.with_positive(np.flatnonzero(fold_N != fold))
        num_steps = min(MOST_STEPS, int(STEPS_PER_QUERY * len(queries)))
        generator = np.random.default_rng([seed, fold])
        for _ in pairs.train(network, queries, num_steps, BATCH, generator):
            pass
        in_fold_P = fold_N[evidence.query_P] == fold
        fold_PX = x_PX[torch.from_numpy(in_fold_P)]
        with torch.no_grad():
            held_out_P[in_fold_P] = network(fold_PX).numpy()
        return network

    with thread_pool(FOLDS) as threads:  # parallel folds are faster than parallel operations
        networks = list(threads.map(fit, range(FOLDS)))
    fusion = Fusion(**pairs.network_fields(networks), propensity=propensity, words=by_words)
    return Fitted(fusion, held_out_P)


def fit_word_network(scorer: WordScorer, excluded: Rows, seed: int = 0) -> Network | None:
    """Train a network to rank labels by words on training queries.

    Args:
        excluded: int64 keys training query * L + label of pairs that are not ranked.

    Returns:
        None if there are fewer than `LEAST_WORD_QUERIES` training queries.
    """
    neighbours = scorer.neighbours
    generator = np.random.default_rng(seed)
    num_labels = neighbours.num_labels
    num = min(neighbours.num_queries, MOST_WORD_QUERIES)
    if num < LEAST_WORD_QUERIES:
        return None
    rows = np.sort(generator.choice(neighbours.num_queries, num, replace=False))
    truth = PairScores.of(neighbours.labels_ML[rows].sorted_indices())
    read = words_of_training_queries(scorer, rows, excluded)
    key_P, feature_PX = (np.concatenate(part) for part in zip(*read, strict=True))
    relevant_P = truth.at(key_P) > 0
    pairs = _Training.of(key_P // num_labels, feature_PX, relevant_P, num)
    network = _Network(feature_PX.shape[1], WORD_HIDDEN, seed)
    queries = pairs.with_positive(np.arange(num))
    num_steps = WORD_STEPS if len(queries) else 0
    steps = pairs.train(network, queries, num_steps, WORD_BATCH, generator)
    for _ in progress(steps, total=WORD_STEPS, desc="rank by words", unit="step"):
        pass
    return Network(**pairs.network_fields([network]))


def words_of_training_queries(
    scorer: WordScorer, rows: Rows, excluded: Rows
) -> Iterator[tuple[Rows, Floats]]:
    """Candidates by words for training queries, each treated as absent from the training data;
    yields blocks of `QUERIES_AT_ONCE` queries: keys (index in `rows`) * L + label, int64 [P], and
    features, float32 [P, X].

    Args:
        rows: the training queries. excluded: as for `fit_word_network`.
    """
    neighbours = scorer.neighbours
    num_labels = neighbours.num_labels

    def read(some: slice) -> tuple[Rows, Floats]:
        block = rows[some]
        scores = scorer.score(neighbours.vectors_MD[block], block)
        query_P, label_P = np.divmod(scores.candidates(), num_labels)
        training_key_P = block[query_P] * num_labels + label_P
        kept_P = ~np.isin(training_key_P, excluded)
        query_P = query_P[kept_P]
        label_P = label_P[kept_P]
        key_P = (query_P + some.start) * num_labels + label_P
        return key_P, scores.features(query_P, label_P)

    parts = list(blocks(len(rows), QUERIES_AT_ONCE))
    desc = "words of training queries"
    with thread_pool() as threads:
        read_parts = in_order((threads.submit(read, part) for part in parts), 2 * num_threads())
        yield from progress(read_parts, total=len(parts), desc=desc, unit="block")


class _Network(nn.Module):
    """w . x + sum over h of o_h max(0, v_h . x + b_h)."""

    def __init__(self, num_features: int, num_hidden: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        bound = num_features**-0.5

        def uniform(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator))

        self.linear = nn.Parameter(torch.zeros(num_features))
        self.hidden_HX = uniform(num_hidden, num_features)
        self.bias_H = uniform(num_hidden)
        self.out_H = nn.Parameter(torch.zeros(num_hidden))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(x @ self.hidden_HX.T + self.bias_H)
        return x @ self.linear + hidden @ self.out_H


@dataclass(frozen=True)
class _Training:
    """Training pairs, sorted by query.

    Attributes:
        x_PX: standardised features. relevant_P: bool [P].
        begin_N: int [N + 1], offset of each query's first pair.
        mean_X, scale_X: mean and standard deviation of each feature.
    """

    x_PX: Tensor
    relevant_P: np.ndarray
    begin_N: np.ndarray
    mean_X: Floats
    scale_X: Floats

    @classmethod
    def of(
        cls, query_P: Rows, feature_PX: Floats, relevant_P: np.ndarray, num_queries: int
    ) -> _Training:
        """Standardise the features of pairs, which must be sorted by query."""
        mean_X = feature_PX.mean(axis=0)
        scale_X = np.maximum(feature_PX.std(axis=0), _LEAST_SCALE)
        x_PX = np.clip((feature_PX - mean_X) / scale_X, -LIMIT, LIMIT)
        begin_N = first_of_each(query_P, num_queries)
        return cls(torch.from_numpy(x_PX), relevant_P, begin_N, mean_X, scale_X)

    def with_positive(self, queries: np.ndarray) -> np.ndarray:
        """The given queries that have a relevant candidate."""
        # number of relevant candidates before each pair
        before = offsets_of(self.relevant_P)
        has_positive_N = np.diff(before[self.begin_N]) > 0
        return queries[has_positive_N[queries]]

    def train(
        self,
        network: _Network,
        queries: np.ndarray,
        num_steps: int,
        batch: int,
        generator: np.random.Generator,
    ) -> Iterator[None]:
        """Train on queries that have a relevant candidate; yields after each step."""
        optimiser = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, num_steps))
        num_passes = 1 + num_steps * batch // max(1, len(queries))
        passes = [generator.permutation(queries) for _ in range(num_passes)]
        order = np.concatenate(passes)
        for step in range(num_steps):
            begin = step * batch
            loss = self._loss(network, np.unique(order[begin : begin + batch]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            yield

    def _loss(self, network: _Network, queries_B: np.ndarray) -> Tensor:
        """Decoupled softmax over each query's candidates, averaged over the query's positives."""
        begin_B = self.begin_N[queries_B]
        size_B = self.begin_N[queries_B + 1] - begin_B
        is_pair_BC = np.arange(size_B.max()) < size_B[:, None]
        row_P, column_P = np.nonzero(is_pair_BC)
        pair_P = begin_B[row_P] + column_P
        score_P = network(self.x_PX[torch.from_numpy(pair_P)])
        score_BC = score_P.new_zeros(is_pair_BC.shape)
        score_BC[torch.from_numpy(is_pair_BC)] = score_P
        row_F, column_F = np.nonzero(~is_pair_BC)  # padding after shorter lists
        positive_P = self.relevant_P[pair_P]
        row_P = row_P[positive_P]
        column_P = column_P[positive_P]
        weight_P = (1 / np.bincount(row_P)[row_P]).astype(np.float32)
        parts = (row_P, column_P, weight_P, row_F, column_F)
        return decoupled_softmax(score_BC, Pairs(*map(torch.from_numpy, parts)))

    def network_fields(self, networks: Sequence[_Network]) -> dict[str, Any]:
        """Fields of the `Network` that averages the given networks."""
        num = len(networks)
        layers = {
            "linear": torch.stack([network.linear for network in networks]).mean(dim=0),
            "hidden": torch.cat([network.hidden_HX for network in networks]),
            "hidden_bias": torch.cat([network.bias_H for network in networks]),
            "out": torch.cat([network.out_H / num for network in networks]),
        }
        fields = {name: values.detach().tolist() for name, values in layers.items()}
        return fields | {"mean": self.mean_X.tolist(), "scale": self.scale_X.tolist()}
