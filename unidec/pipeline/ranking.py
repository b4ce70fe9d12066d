"""Rank labels for the queries of a split and measure them: for validation, for tuning the index, for the test.

Legend: N queries, n queries of a split, M training queries, L labels, F words, P candidates (query-label pairs),
D width of a head, K places.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.cores import thread_pool
from unidec.data.dataset import Split, XMCDataset
from unidec.data.propensity import Propensity
from unidec.data.tokens import Tokens
from unidec.evaluation.metrics import evaluate, filtered_truth, pair_keys
from unidec.pipeline import paths
from unidec.progress import progress
from unidec.ranking.candidates import Candidates, Ranked, candidate_keys, votes_alone
from unidec.ranking.fusion import CANDIDATES, Fusion, LabelEvidence
from unidec.ranking.heads import LabelRows, Space, pair_scores, query_vectors, unit_rows
from unidec.ranking.neighbours import Neighbours, Vote
from unidec.ranking.sparse import PairScores
from unidec.ranking.words import WordSpace
from unidec.training.precision import autocast_type

if TYPE_CHECKING:
    import torch

    from unidec.model.unidec import UniDEC

K = 100
HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR")
CLF_WEIGHTS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
QUERIES_AT_ONCE = 2048  # bounds memory: the votes of a query take some kilobytes
KNN_WEIGHTS = (0.0, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2, 3.2)
NeighboursBy = Literal["model", "words"]
VOTE: dict[NeighboursBy, Vote] = {"model": "softmax", "words": "ridge-labels"}  # measured: benchmarks/results/votes.md
TAILS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
TAIL_TOLERANCE = 0.1  # points of the objective that weight on rare labels may cost; far below the objective's noise
LEAST_QUERIES = 100  # validation queries needed to train a fusion; README's example has fewer
TUNING_QUERIES = 2000  # validation queries that weights are tuned on: with more, the weights hardly change
MAX_TURNS = 3  # of tuning one weight after the other; already the second changes little


def headline(metrics: dict[str, float]) -> dict[str, float]:
    """The headline metrics among all metrics."""
    return {name: metrics[name] for name in HEADLINE if name in metrics}


@dataclass(frozen=True)
class Ranking:
    """Vectors of both heads for the queries of a split and all labels.

    Attributes:
        rows: int64 [n], data set rows of the queries.
        query_de, query_clf: float32 [n, D]; None if the model lacks that head.
        vectors: those of the labels' arrays "de", "clf" float32 [L, D] and "bias" [L] that the model has.
        device: where labels are searched, the device of the model; None: the CPU.
    """

    dataset: XMCDataset
    rows: np.ndarray
    query_de: np.ndarray | None
    query_clf: np.ndarray | None
    vectors: Mapping[str, np.ndarray]
    device: torch.device | None = None

    @classmethod
    def of_model(
        cls, model: UniDEC, dataset: XMCDataset, split: Split | np.ndarray, precision: str,
        vectors: Mapping[str, np.ndarray] | None = None,
    ) -> Ranking:  # fmt: skip
        """Encode the queries of a split, or of the given rows, and the labels unless their `vectors` are given."""
        import torch

        from unidec.model.frozen import cached_inputs

        tokens = {which: paths.open_tokens(which) for which in ("queries", "labels")}
        amp = autocast_type(precision, model.device)
        build = cached_inputs(model.encoder, tokens, paths.CACHE, model.device, amp)
        rows = dataset.rows(split) if isinstance(split, str) else split
        with torch.autocast(model.device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
            query_de, query_clf = model.encode_queries(tokens["queries"], rows, build)
            if vectors is None:
                label_de = model.encode_labels(tokens["labels"], build) if model.heads != "clf" else None
                parts = zip(("de", "clf", "bias"), (label_de, *model.classifier_table()), strict=True)
                vectors = {name: array for name, array in parts if array is not None}
        return cls(dataset, rows, query_de, query_clf, vectors, model.device)

    def part(self, some: slice) -> Ranking:
        """The ranking of some of the queries."""
        de, clf = (None if head is None else head[some] for head in (self.query_de, self.query_clf))
        return replace(self, rows=self.rows[some], query_de=de, query_clf=clf)

    @cached_property
    def truth(self) -> sp.csr_matrix:
        """Relevance of these queries without filtered pairs."""
        return filtered_truth(self.dataset.relevance[self.rows], self.filter_pairs)

    @cached_property
    def filter_pairs(self) -> sp.csr_matrix:
        """Filter pairs of these queries."""
        return self.dataset.filter_pairs[self.rows]

    def labels(self, space: Space, clf_normalize: bool) -> np.ndarray:
        """Label vectors in a space, float32 [L, D']."""
        return LabelRows(self.vectors, space, clf_normalize).take(slice(None))

    def queries(self, space: Space, clf_weight: float, clf_normalize: bool) -> np.ndarray:
        """Query vectors in a space, float32 [n, D']."""
        has_bias = "bias" in self.vectors
        return query_vectors(self.query_de, self.query_clf, space, clf_weight, clf_normalize, has_bias)

    def top(self, space: Space, clf_weight: float, clf_normalize: bool, k: int = K) -> tuple[np.ndarray, np.ndarray]:
        """Exact search without filtered pairs: scores float32 and labels int64, [n, k], -1 = none. Equal scores are
        ordered by label number."""
        from unidec.model.search import exact_search

        query, label = self.queries(space, clf_weight, clf_normalize), self.labels(space, clf_normalize)
        options = {"exclude": self.filter_pairs, "device": self.device, "desc": "exact search"}
        scores, labels = exact_search(query, label, min(k, len(label)), **options)
        order = np.lexsort((labels, -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(labels, order, axis=1)

    def votes(self, neighbours: Neighbours, num: int) -> PairScores:
        """Votes of the `num` nearest training queries."""
        return neighbours.votes(self.compared(neighbours), num)

    def compared(self, neighbours: Neighbours) -> np.ndarray | sp.csr_matrix:
        """The features by which the queries are compared with training queries: words, CSR [n, F], or else vectors,
        float32 [n, D]."""
        features = (self.words(neighbours), self.query_de, self.query_clf)
        return next(one for one in features if one is not None)

    def words(self, neighbours: Neighbours | None) -> sp.csr_matrix | None:
        """The queries' words, float32 CSR [n, F]; None if training queries are not compared by words."""
        if neighbours is None or neighbours.words is None:
            return None
        return neighbours.words.vectors(*paths.open_tokens("queries").ragged(self.rows))

    def joined_to(self, neighbours: Neighbours) -> Neighbours:
        """The neighbours and, appended to them, these queries. They may vote once no more weights are tuned on them."""
        features = self.compared(neighbours)
        if neighbours.words is None:
            vectors: Any = np.concatenate([neighbours.vectors_MD, unit_rows(features).astype(np.float16)])
        else:
            vectors = sp.vstack([neighbours.vectors_MD, features], format="csr")
        labels = sp.vstack([neighbours.labels_ML, self.truth > 0], format="csr")
        uids = [*neighbours.uids.to_pylist(), *self.dataset.query_uids(self.rows)]
        titles = [*neighbours.titles.to_pylist(), *self.dataset.query_texts(self.rows)]
        return Neighbours(vectors, labels, uids, titles, neighbours.vote, neighbours.words, neighbours.label_words_LF)

    def candidates(
        self, space: Space, clf_weights: Sequence[float], clf_normalize: bool, votes: PairScores, k: int = K
    ) -> Callable[[float], Candidates]:
        """Candidates for the k best labels by the heads' score and the votes, under any weight of the votes.

        The candidates are all labels with votes, and the k best by the heads' score under the first, the middle and
        the last of `clf_weights` (ascending): only these three are searched.

        Returns:
            a function from the classifier's weight to the candidates with their scores, which are linear in the weight.
        """
        searched = sorted({clf_weights[0], clf_weights[len(clf_weights) // 2], clf_weights[-1]})
        found = np.concatenate([self.top(space, weight, clf_normalize, k)[1] for weight in searched], axis=1)
        key_P = candidate_keys(found, votes.key_N, votes.shape[1], pair_keys(self.filter_pairs))

        def scored(in_space: Space, weight: float) -> Candidates:
            query = self.queries(in_space, weight, clf_normalize)
            heads = partial(pair_scores, query, vectors=self.vectors, space=in_space, clf_normalize=clf_normalize)
            return Candidates.of(key_P, votes, heads)

        at_0 = scored("de" if space == "both" else space, 0.0)
        slope_P = scored("clf", 1.0).heads_P if space == "both" else np.zeros_like(at_0.heads_P)
        return lambda weight: replace(at_0, heads_P=at_0.heads_P + np.float32(weight) * slope_P)

    @cached_property
    def propensity(self) -> Propensity:
        """The propensities of data/propensity."""
        return paths.open_propensity()

    def metrics(self, space: Space, clf_weight: float, clf_normalize: bool) -> dict[str, float]:
        """All metrics of the split by the heads' score in a space, without votes."""
        return self.metrics_of(self.top(space, clf_weight, clf_normalize)[1])

    def metrics_of(self, labels: np.ndarray) -> dict[str, float]:
        """All metrics of the split for these predictions, int [n, K], best first, -1 = none."""
        return evaluate(labels, self.truth, self.propensity.inverse_L, self.propensity.group_L)

    def relevant(self, labels: np.ndarray) -> np.ndarray:
        """Whether each prediction, int [n, K], is relevant: bool [n, K]; False for filtered pairs and -1."""
        found = self.truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()
        return np.asarray(found).astype(bool) & (labels >= 0)

    def metrics_of_votes(self, neighbours: Neighbours, num: int) -> dict[str, float]:
        """All metrics of the split by the votes of the `num` nearest training queries alone."""
        labels = np.full((len(self.rows), K), -1, dtype=np.int64)
        features = self.compared(neighbours)

        def rank(start: int) -> None:
            block = slice(start, start + QUERIES_AT_ONCE)
            votes = neighbours.votes(features[block], num)
            labels[block] = votes_alone(votes, K, pair_keys(self.filter_pairs[block])).rows

        with thread_pool() as threads:
            starts = range(0, len(labels), QUERIES_AT_ONCE)
            list(progress(threads.map(rank, starts), total=len(starts), desc="rank by votes", unit="block"))
        return self.metrics_of(labels)


def training_neighbours(
    model: UniDEC, dataset: XMCDataset, precision: str, vote: Vote | None = None, by: NeighboursBy = "model",
    tokens: tuple[Tokens, Tokens] | None = None, word_head: int = 0,
) -> Neighbours:  # fmt: skip
    """The queries of the training split as neighbours, without filtered pairs.

    Args:
        by: "model": compared in the dual encoder's space (the classifier's, if the model has no other head); "words":
            compared by their words, with the words of the labels.
        tokens: of only the training split's queries, in order, and of the labels; None: data/tokens, with data/cache.
        word_head: number of first tokens of a text that are also compared separately; only for "words".
    """
    import torch

    from unidec.model.frozen import cached_inputs

    rows, build = dataset.rows("train"), None
    token_rows = rows if tokens is None else np.arange(len(rows))
    amp = autocast_type(precision, model.device)
    if tokens is None:
        query_tokens = paths.open_tokens("queries")
        if by == "model":
            build = cached_inputs(model.encoder, {"queries": query_tokens}, paths.CACHE, model.device, amp)
        tokens = (query_tokens, paths.open_tokens("labels"))
    labels = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    facts = (dataset.query_uids(rows), dataset.query_texts(rows), vote or VOTE[by])
    if by == "words":
        ragged = [tokens[0].ragged(token_rows), tokens[1].ragged(np.arange(dataset.num_labels))]
        (flat, offsets), (label_flat, label_offsets) = ragged
        all_texts = (np.concatenate([flat, label_flat]), np.concatenate([offsets, offsets[-1] + label_offsets[1:]]))
        space = WordSpace.fit(model.tokenizer_folder, *all_texts, word_head)
        vectors, label_words = (space.vectors(*each) for each in ragged)
        return Neighbours(vectors, labels, *facts, space, label_words)
    head: Literal["de", "clf"] = "clf" if model.heads == "clf" else "de"
    with torch.autocast(model.device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
        de, clf = model.vectors("queries", tokens[0], token_rows, build, desc="training queries", only=head)
    vectors = de if head == "de" else clf
    assert vectors is not None
    return Neighbours(vectors, labels, *facts)


@dataclass(frozen=True)
class Blend:
    """Weights of the served score.

    Attributes:
        clf_weight, knn_weight: of the classifier's score, and of the votes (0: none).
        metrics, ranked: metrics and predictions of the ranking's split under these weights, or under the fusion. A
            fusion is cross-validated: its networks rank queries that they were not trained on.
        tried: each tuning step as {clf_weight, knn_weight, the objective}, in order; [] without votes.
        fusion: the networks that rank instead of the weighted scores; None: the weighted scores rank.
        by_tail: headline metrics of the fusion by the weight of rare labels, which is in "tail".
        lost_without: for each feature of the fusion, points of the objective lost if it is replaced by its mean.
        reader: computes the fusion's features.
    """

    clf_weight: float
    knn_weight: float
    metrics: dict[str, float]
    ranked: Ranked
    tried: list[dict[str, float]] = field(default_factory=list)
    fusion: Fusion | None = None
    by_tail: list[dict[str, float]] = field(default_factory=list)
    lost_without: dict[str, float] = field(default_factory=dict)
    reader: LabelEvidence | None = None


def tuned_blend(ranking: Ranking, params: Params, neighbours: Neighbours | None) -> Blend:
    """The score weights: as given, or if they are "auto", tuned on the ranking's split.

    The two weights are tuned in turn until neither changes, starting with the best classifier weight without votes; of
    equally good weights the smaller is taken. The same candidates serve normalised and raw classifier scores, since raw
    ones are training logits times tau, of the order of cosines. At most about `TUNING_QUERIES` evenly spaced queries
    are used.
    """
    index, objective, tried = params.index, params.index.objective, dict[tuple[float, float], dict[str, float]]()
    clf_weights = CLF_WEIGHTS if index.clf_weight == "auto" else (float(index.clf_weight),)
    knn_weights = KNN_WEIGHTS if index.knn_weight == "auto" else (float(index.knn_weight),)

    def candidates(of: Ranking, weights: Sequence[float]) -> Callable[[float], Candidates]:
        none = PairScores.none((len(of.rows), of.dataset.num_labels))
        votes = none if neighbours is None else of.votes(neighbours, index.knn_neighbours)
        return of.candidates(index.space, weights, index.clf_normalize, votes, CANDIDATES)

    sample = ranking.part(slice(None, None, max(1, len(ranking.rows) // TUNING_QUERIES)))
    sample_candidates = candidates(sample, clf_weights)

    def quality(weights: tuple[float, float]) -> float:
        if weights not in tried:
            tried[weights] = sample.metrics_of(sample_candidates(weights[0]).top(weights[1], K).rows)
        return tried[weights][objective]

    best = max([(weight, 0.0) for weight in clf_weights], key=quality)
    for _ in range(MAX_TURNS if neighbours is not None else 0):
        before = best
        best = max([(best[0], weight) for weight in knn_weights], key=quality)
        if not best[1]:  # without votes this classifier weight is the best one already
            break
        best = max([(weight, best[1]) for weight in clf_weights], key=quality)
        if best == before:
            break
    steps = [{"clf_weight": c, "knn_weight": v, objective: metrics[objective]} for (c, v), metrics in tried.items()]
    is_whole = len(sample.rows) == len(ranking.rows)
    all_candidates = sample_candidates if is_whole else candidates(ranking, best[:1])
    ranked = all_candidates(best[0]).top(best[1], K)
    return Blend(*best, ranking.metrics_of(ranked.rows), ranked, steps if neighbours is not None else [])


def fused(ranking: Ranking, params: Params, neighbours: Neighbours, blend: Blend) -> Blend:
    """The blend with a fusion trained on the ranking's split.

    The blend is returned unchanged if the split has too few queries, or if the fusion is not better by
    `index.objective` on queries that it was not trained on."""
    from unidec.ranking.fusion_fit import fit_fusion, fit_word_network

    index, num_queries = params.index, len(ranking.rows)
    objective = index.objective
    if num_queries < LEAST_QUERIES:
        why = f"{num_queries} validation queries, {LEAST_QUERIES} are needed; the weighted sum of the scores ranks"
        print(f"no fusion: {why}", file=sys.stderr)  # stdout is for the printed result
        return blend
    propensity = (params.data.propensity_a, params.data.propensity_b)
    reader = LabelEvidence(
        ranking.vectors, blend.clf_weight, index.clf_normalize, neighbours, index.knn_neighbours, propensity
    )
    training_filter = ranking.dataset.filter_pairs[ranking.dataset.rows("train")]
    reader.by_words = fit_word_network(reader.words, pair_keys(training_filter), params.seed)
    found = ranking.top(index.space, blend.clf_weight, index.clf_normalize, CANDIDATES)[1]
    words = ranking.words(neighbours)
    assert words is not None and ranking.query_de is not None and ranking.query_clf is not None
    evidence = reader.read(ranking.query_de, ranking.query_clf, words, found, pair_keys(ranking.filter_pairs))
    key_P = evidence.query_P * ranking.dataset.num_labels + evidence.label_P
    fitted = fit_fusion(evidence, PairScores.of(ranking.truth).at(key_P) > 0, propensity, params.seed, reader.by_words)
    log_inverse_P = reader.log_inverse_L[evidence.label_P]

    def ranked(score_P: np.ndarray, tail: float) -> Ranked:
        return evidence.top(score_P + np.float32(tail) * log_inverse_P, K)

    def measured(score_P: np.ndarray, tail: float) -> dict[str, float]:
        return ranking.metrics_of(ranked(score_P, tail).rows)

    by_tail = {tail: measured(fitted.held_out_P, tail) for tail in TAILS}
    best = max(metrics[objective] for metrics in by_tail.values())
    tail = max(tail for tail, metrics in by_tail.items() if metrics[objective] >= best - TAIL_TOLERANCE)
    metrics = by_tail[tail]
    if metrics[objective] <= blend.metrics[objective]:
        why = f"{objective} {metrics[objective]:.2f}, by the weighted sum of the scores {blend.metrics[objective]:.2f}"
        print(f"no fusion: {why}", file=sys.stderr)
        return blend
    gain = {name: round(value - blend.metrics[name], 4) for name, value in headline(metrics).items()}
    without = [measured(without_P, tail)[objective] for without_P in fitted.without_XP]
    return replace(
        blend, metrics=metrics, ranked=ranked(fitted.held_out_P, tail), reader=reader,
        fusion=fitted.fusion.model_copy(update={"tail": tail, "gain": gain}),
        by_tail=[{"tail": weight, **headline(of_tail)} for weight, of_tail in by_tail.items()],
        lost_without={name: metrics[objective] - value
                      for name, value in zip(fitted.fusion.features, without, strict=True)},
    )  # fmt: skip


def validation_metrics(ranking: Ranking, params: Params) -> dict[str, float]:
    """Metrics of the validation split by the served space's score, without votes; {} without validation queries."""
    if not len(ranking.rows):
        return {}
    index = params.index
    weight = 1.0 if index.clf_weight == "auto" else float(index.clf_weight)
    return ranking.metrics(index.space, weight, index.clf_normalize)
