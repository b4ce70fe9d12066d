"""Labels ranked for the queries of a split, and their metrics: for validation in training, for the index, for the test.

Legend: N queries, n queries of a split, M training queries, L labels, D width of a head, K places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.data.dataset import Split, XMCDataset
from unidec.data.propensity import Propensity
from unidec.data.tokens import Tokens
from unidec.evaluation.metrics import evaluate, filtered_truth, pair_keys
from unidec.pipeline import paths
from unidec.progress import progress
from unidec.retrieval.fusion import CANDIDATES, Fusion, LabelEvidence
from unidec.retrieval.neighbours import Candidates, Neighbours, Ranked, Vote, candidate_keys, votes_alone
from unidec.retrieval.query_encoder import usable_cores
from unidec.retrieval.scoring_space import LabelRows, Space, pair_scores, query_vectors, unit_rows
from unidec.retrieval.sparse import PairScores
from unidec.retrieval.words import WordSpace
from unidec.training.precision import autocast_type

if TYPE_CHECKING:
    import torch

    from unidec.model.unidec import UniDEC

K = 100
HEADLINE = ("P@1", "P@3", "P@5", "nDCG@5", "PSP@1", "PSP@3", "PSP@5", "R@10", "R@100", "coverage@5", "MRR")
CLF_WEIGHTS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
QUERIES_AT_ONCE = 2048  # the votes of a query take some kilobytes
KNN_WEIGHTS = (0.0, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2, 3.2)
NeighboursBy = Literal["model", "words"]
VOTE: dict[NeighboursBy, Vote] = {"model": "softmax", "words": "ridge-labels"}  # measured: benchmarks/results/votes.md
TAILS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
TAIL_TOLERANCE = 0.1  # points of the objective, far below its noise, that rare labels may cost
LEAST_QUERIES = 100  # of a validation split that a fusion is trained on; README's example has fewer
TUNING_QUERIES = 2000  # that choose weights: more of them change none that matters
MAX_TURNS = 3  # of tuning one weight after the other: the second changes little


def headline(metrics: dict[str, float]) -> dict[str, float]:
    """The few figures people compare."""
    return {name: metrics[name] for name in HEADLINE if name in metrics}


@dataclass(frozen=True)
class Ranking:
    """Vectors of both heads for the queries of a split and all labels.

    Attributes:
        rows: int64 [n], data set rows of the queries.
        query_de, query_clf: float32 [n, D]; None for a head that is not there.
        vectors: the labels' arrays "de", "clf" float32 [L, D] and "bias" [L]; those that exist.
        device: where labels are searched, the model's; None: the CPU.
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
        """Encode the queries of a split, or of these rows, and the labels where no `vectors` of them are given."""
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
        """Of some of its queries alone."""
        de, clf = (None if part is None else part[some] for part in (self.query_de, self.query_clf))
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
        """Label side of a space, float32 [L, D']."""
        return LabelRows(self.vectors, space, clf_normalize).take(slice(None))

    def queries(self, space: Space, clf_weight: float, clf_normalize: bool) -> np.ndarray:
        """Query side of a space, float32 [n, D']."""
        has_bias = "bias" in self.vectors
        return query_vectors(self.query_de, self.query_clf, space, clf_weight, clf_normalize, has_bias)

    def top(self, space: Space, clf_weight: float, clf_normalize: bool, k: int = K) -> tuple[np.ndarray, np.ndarray]:
        """Exact search without filtered pairs: (scores float32, labels int64) [n, k], -1 where there is no label. Of
        equal scores the smaller label number comes first."""
        from unidec.model.search import exact_search

        query, label = self.queries(space, clf_weight, clf_normalize), self.labels(space, clf_normalize)
        only = {"exclude": self.filter_pairs, "device": self.device, "desc": "exact search"}
        scores, labels = exact_search(query, label, min(k, len(label)), **only)
        order = np.lexsort((labels, -scores), axis=1)
        return np.take_along_axis(scores, order, axis=1), np.take_along_axis(labels, order, axis=1)

    def votes(self, neighbours: Neighbours, num: int) -> PairScores:
        """Votes of the `num` nearest training queries."""
        return neighbours.votes(self.compared(neighbours), num)

    def compared(self, neighbours: Neighbours) -> np.ndarray | sp.csr_matrix:
        """What of the queries is compared with training queries: float32 [n, D], or their words, CSR [n, F]."""
        sides = (self.words(neighbours), self.query_de, self.query_clf)
        return next(side for side in sides if side is not None)

    def words(self, neighbours: Neighbours | None) -> sp.csr_matrix | None:
        """The queries' words, float32 CSR [n, F]; None where training queries are not compared by them."""
        if neighbours is None or neighbours.words is None:
            return None
        return neighbours.words.vectors(*paths.open_tokens("queries").ragged(self.rows))

    def joined_to(self, neighbours: Neighbours) -> Neighbours:
        """The neighbours, and these queries, which vote too once nothing more is chosen by them."""
        own, truth = self.compared(neighbours), self.truth
        if neighbours.words is None:
            vectors: Any = np.concatenate([neighbours.vectors_MD, unit_rows(own).astype(np.float16)])
        else:
            vectors = sp.vstack([neighbours.vectors_MD, own], format="csr")
        labels = sp.vstack([neighbours.labels_ML, truth > 0], format="csr")
        uids = [*neighbours.uids.to_pylist(), *self.dataset.query_uids(self.rows)]
        titles = [*neighbours.titles.to_pylist(), *self.dataset.query_texts(self.rows)]
        return Neighbours(vectors, labels, uids, titles, neighbours.vote, neighbours.words, neighbours.label_words_LF)

    def candidates(
        self, space: Space, clf_weights: Sequence[float], clf_normalize: bool, votes: PairScores, k: int = K
    ) -> Callable[[float], Candidates]:
        """By the classifier's weight, what can be among the k best labels of the heads' score and the votes, whatever
        the votes' weight: the k best by the first, the middle and the last of some ascending weights, the only ones
        that are searched by, and all labels with votes. The heads' score is linear in the weight."""
        searched = sorted({clf_weights[0], clf_weights[len(clf_weights) // 2], clf_weights[-1]})
        found = np.concatenate([self.top(space, weight, clf_normalize, k)[1] for weight in searched], axis=1)
        key_P = candidate_keys(found, votes.key_N, votes.shape[1], pair_keys(self.filter_pairs))

        def scored(own: Space, weight: float) -> Candidates:
            query = self.queries(own, weight, clf_normalize)
            heads = partial(pair_scores, query, vectors=self.vectors, space=own, clf_normalize=clf_normalize)
            return Candidates.of(key_P, votes, heads)

        at_0 = scored("de" if space == "both" else space, 0.0)
        slope_P = scored("clf", 1.0).heads_P if space == "both" else np.zeros_like(at_0.heads_P)
        return lambda weight: replace(at_0, heads_P=at_0.heads_P + np.float32(weight) * slope_P)

    @cached_property
    def propensity(self) -> Propensity:
        """Of data/propensity."""
        return paths.open_propensity()

    def metrics(self, space: Space, clf_weight: float, clf_normalize: bool) -> dict[str, float]:
        """Every metric of the split under one space, by the heads alone."""
        return self.metrics_of(self.top(space, clf_weight, clf_normalize)[1])

    def metrics_of(self, labels: np.ndarray) -> dict[str, float]:
        """Every metric of the split for these labels, int [n, K], best first, -1 where there is no label."""
        return evaluate(labels, self.truth, self.propensity.inverse_L, self.propensity.group_L)

    def relevant(self, labels: np.ndarray) -> np.ndarray:
        """Whether each of these labels is relevant, bool [n, K]; filtered pairs are not, nor is -1."""
        found = self.truth[np.arange(len(labels))[:, None], np.maximum(labels, 0)].todense()
        return np.asarray(found).astype(bool) & (labels >= 0)

    def metrics_of_votes(self, neighbours: Neighbours, num: int) -> dict[str, float]:
        """Every metric of the split by the votes of similar training queries alone."""
        labels = np.full((len(self.rows), K), -1, dtype=np.int64)
        compared = self.compared(neighbours)

        def rank(start: int) -> None:
            some = slice(start, start + QUERIES_AT_ONCE)
            votes = neighbours.votes(compared[some], num)
            labels[some] = votes_alone(votes, K, pair_keys(self.filter_pairs[some])).rows

        with ThreadPoolExecutor(usable_cores()) as threads:
            starts = range(0, len(labels), QUERIES_AT_ONCE)
            list(progress(threads.map(rank, starts), total=len(starts), desc="votes alone", unit="block"))
        return self.metrics_of(labels)


def training_neighbours(
    model: UniDEC, dataset: XMCDataset, precision: str, vote: Vote | None = None, by: NeighboursBy = "model",
    tokens: tuple[Tokens, Tokens] | None = None, word_head: int = 0,
) -> Neighbours:  # fmt: skip
    """The training split's queries as neighbours without filtered pairs, compared in the dual encoder's space (the
    classifier's where it is alone), or by their words, with the labels' words.

    Args:
        tokens: of the training split's queries alone, in their order, and of the labels; None: data/tokens, and
            data/cache.
        word_head: of a comparison by words: first tokens of a text that are compared alone too.
    """
    import torch

    from unidec.model.frozen import cached_inputs

    rows, build = dataset.rows("train"), None
    places = rows if tokens is None else np.arange(len(rows))
    amp = autocast_type(precision, model.device)
    if tokens is None:
        of_queries = paths.open_tokens("queries")
        if by == "model":
            build = cached_inputs(model.encoder, {"queries": of_queries}, paths.CACHE, model.device, amp)
        tokens = (of_queries, paths.open_tokens("labels"))
    labels = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows])
    texts = (dataset.query_uids(rows), dataset.query_texts(rows), vote or VOTE[by])
    if by == "words":
        ragged = [tokens[0].ragged(places), tokens[1].ragged(np.arange(dataset.num_labels))]
        (flat, offsets), (label_flat, label_offsets) = ragged
        every = (np.concatenate([flat, label_flat]), np.concatenate([offsets, offsets[-1] + label_offsets[1:]]))
        space = WordSpace.fit(model.tokenizer_folder, *every, word_head)
        vectors, label_words = (space.vectors(*each) for each in ragged)
        return Neighbours(vectors, labels, *texts, space, label_words)
    head: Literal["de", "clf"] = "clf" if model.heads == "clf" else "de"
    with torch.autocast(model.device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
        de, clf = model.vectors("queries", tokens[0], places, build, desc="training queries", only=head)
    vectors = de if head == "de" else clf
    assert vectors is not None
    return Neighbours(vectors, labels, *texts)


@dataclass(frozen=True)
class Blend:
    """Weights of the served score.

    Attributes:
        clf_weight, knn_weight: of the classifier's score, and of the votes (0: none).
        metrics: of the ranking's split under it.
        ranked: the labels of the split's queries under it.
        tried: what was tried to find the weights, {clf_weight, knn_weight, the objective}, in order; [] without votes.
        fusion: what ranks in the blend's place; then `metrics` and `ranked` are of queries that each network had not
            seen.
        by_tail: headline metrics under each weight of rare labels, which is there as "tail".
        lost_without: points of the objective that are lost where a feature of the fusion is at its mean.
        reader: what the fusion reads of the labels.
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
    """The weights: as given, or tuned on the ranking's split ("auto"), one after the other until neither changes.

    The classifier's weight starts as the best without votes. Of equals the smaller weight is taken. Raw classifier
    scores are training logits times tau, of the order of cosines: one range of weights serves both forms. Of many
    queries some `TUNING_QUERIES`, evenly spaced, decide.
    """
    index, objective, found = params.index, params.index.objective, dict[tuple[float, float], dict[str, float]]()
    clf_weights = CLF_WEIGHTS if index.clf_weight == "auto" else (float(index.clf_weight),)
    knn_weights = KNN_WEIGHTS if index.knn_weight == "auto" else (float(index.knn_weight),)

    def candidates(some: Ranking, weights: Sequence[float]) -> Callable[[float], Candidates]:
        none = PairScores.none((len(some.rows), some.dataset.num_labels))
        votes = none if neighbours is None else some.votes(neighbours, index.knn_neighbours)
        return some.candidates(index.space, weights, index.clf_normalize, votes, CANDIDATES)

    some = ranking.part(slice(None, None, max(1, len(ranking.rows) // TUNING_QUERIES)))
    of_some = candidates(some, clf_weights)

    def quality(weights: tuple[float, float]) -> float:
        if weights not in found:
            found[weights] = some.metrics_of(of_some(weights[0]).top(weights[1], K).rows)
        return found[weights][objective]

    at = max([(weight, 0.0) for weight in clf_weights], key=quality)
    for _ in range(MAX_TURNS if neighbours is not None else 0):
        before = at
        at = max([(at[0], weight) for weight in knn_weights], key=quality)
        if not at[1]:  # without votes the classifier's weight is the best already
            break
        at = max([(weight, at[1]) for weight in clf_weights], key=quality)
        if at == before:
            break
    tried = [{"clf_weight": c, "knn_weight": v, objective: metrics[objective]} for (c, v), metrics in found.items()]
    every = of_some if len(some.rows) == len(ranking.rows) else candidates(ranking, at[:1])
    ranked = every(at[0]).top(at[1], K)
    return Blend(*at, ranking.metrics_of(ranked.rows), ranked, tried if neighbours is not None else [])


def fused(ranking: Ranking, params: Params, neighbours: Neighbours, blend: Blend) -> Blend:
    """The blend with a fusion trained on the ranking's split, where that has enough queries and the fusion ranks
    queries that it has not seen better than the blend does, by `index.objective`; else the blend."""
    from unidec.retrieval.fusion_fit import fit_fusion, fit_word_network

    index, num_queries = params.index, len(ranking.rows)
    if num_queries < LEAST_QUERIES:
        print(f"no fusion: {num_queries} validation queries, {LEAST_QUERIES} are needed; the blend of the scores ranks")
        return blend
    propensity = (params.data.propensity_a, params.data.propensity_b)
    reader = LabelEvidence(
        ranking.vectors, blend.clf_weight, index.clf_normalize, neighbours, index.knn_neighbours, propensity
    )
    of_training = ranking.dataset.filter_pairs[ranking.dataset.rows("train")]
    reader.by_words = fit_word_network(reader.words, pair_keys(of_training), params.seed)
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
    best = max(metrics[index.objective] for metrics in by_tail.values())
    tail = max(tail for tail, metrics in by_tail.items() if metrics[index.objective] >= best - TAIL_TOLERANCE)
    metrics = by_tail[tail]
    if metrics[index.objective] <= blend.metrics[index.objective]:
        by_blend = blend.metrics[index.objective]
        print(f"no fusion: {index.objective} {metrics[index.objective]:.2f}, by the blend {by_blend:.2f}")
        return blend
    gain = {name: round(value - blend.metrics[name], 4) for name, value in headline(metrics).items()}
    without = [measured(without_P, tail)[index.objective] for without_P in fitted.without_XP]
    lost = {name: metrics[index.objective] - value for name, value in zip(fitted.fusion.features, without, strict=True)}
    return replace(
        blend, metrics=metrics, ranked=ranked(fitted.held_out_P, tail), reader=reader,
        fusion=fitted.fusion.model_copy(update={"tail": tail, "gain": gain}),
        by_tail=[{"tail": weight, **headline(own)} for weight, own in by_tail.items()],
        lost_without=lost,
    )  # fmt: skip


def validation_metrics(ranking: Ranking, params: Params) -> dict[str, float]:
    """Metrics of the validation split in the space that will be served, without votes; {} without such a split."""
    if not len(ranking.rows):
        return {}
    index = params.index
    weight = 1.0 if index.clf_weight == "auto" else float(index.clf_weight)
    return ranking.metrics(index.space, weight, index.clf_normalize)
