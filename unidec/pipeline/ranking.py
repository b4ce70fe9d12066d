"""Rank labels for the queries of a split and compute metrics, for validation, tuning and the test.

Legend: N queries, n queries of a split, M training queries, L labels, F words, P candidates
(query-label pairs), D width of a head, K predictions per query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import scipy.sparse as sp

from unidec.config import Params
from unidec.cores import thread_pool
from unidec.data.chunks import blocks
from unidec.data.dataset import Split, XMCDataset
from unidec.data.propensity import Propensity
from unidec.data.tokens import Tokens
from unidec.evaluation.metrics import evaluate, filtered_truth, pair_keys, truth_of
from unidec.metric_names import headline
from unidec.model.words import WordSpace, text_blocks
from unidec.pipeline import paths
from unidec.progress import progress, say
from unidec.ranking.exact_index import ExactIndex
from unidec.ranking.fusion import CANDIDATES, Fusion, LabelEvidence
from unidec.ranking.heads import Heads, PairScores, Ranked, unit_rows
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.query_encoder import Encoded
from unidec.ranking.ranker import Ranker, Voting
from unidec.training.precision import autocast_type

if TYPE_CHECKING:
    import torch

    from unidec.config import Index
    from unidec.model.unidec import UniDEC

K = 100
CLF_WEIGHTS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
QUERIES_AT_ONCE = 2048  # limits memory: the votes of a query take a few kilobytes
KNN_WEIGHTS = (0.0, 0.025, 0.05, 0.07, 0.1, 0.14, 0.2, 0.28, 0.4, 0.56, 0.8, 1.1, 1.6, 2.2, 3.2)
NeighboursBy = Literal["model", "words"]
TAILS = (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
# maximum loss of the objective, in points, due to the weight of rare labels; far below its noise
TAIL_TOLERANCE = 0.1
LEAST_QUERIES = 100  # validation queries needed to train a fusion; README's example has fewer
# weights are tuned on between one and two times as many queries: with more, they hardly change
TUNING_QUERIES = 2000
MAX_TURNS = 3  # rounds of tuning both weights in turn; even the second changes little


@dataclass(frozen=True)
class Ranking:
    """The queries of a split and the vectors of all labels; measures how well labels are ranked.

    Attributes:
        rows: int64 [n], rows of the queries in the data set.
        encoded: the encoded queries.
        vectors: the labels' arrays "de", "clf" float32 [L, D] and "bias" [L], as far as the model
        has them.
        device: device for searching labels, that of the model; None: the CPU.
    """

    dataset: XMCDataset
    rows: np.ndarray
    encoded: Encoded
    vectors: Mapping[str, np.ndarray]
    device: torch.device | None = None

    @classmethod
    def of_model(
        cls,
        model: UniDEC,
        dataset: XMCDataset,
        split: Split | np.ndarray,
        precision: str,
        vectors: dict[str, np.ndarray] | None = None,
    ) -> Ranking:
        """Encode the queries of a split or at the given rows, and the labels unless their `vectors`
        are given.
        """
        from unidec.model.frozen import autocast, cached_inputs
        from unidec.training.encoding import label_arrays

        tokens = {which: paths.open_tokens(which) for which in ("queries", "labels")}
        amp = autocast_type(precision, model.device)
        build = cached_inputs(model.encoder, tokens, paths.CACHE, model.device, amp)
        rows = dataset.rows(split) if isinstance(split, str) else split
        with autocast(model.device, amp):
            encoded = Encoded(*model.encode_queries(tokens["queries"], rows, build))
            if vectors is None:
                table = model.classifier_table
                vectors = label_arrays(model, tokens["labels"], build, paths.RUNS, table)
        return cls(dataset, rows, encoded, vectors, model.device)

    def part(self, some: slice) -> Ranking:
        """The same for some of the queries."""
        return replace(self, rows=self.rows[some], encoded=self.encoded.take(some))

    def at_width(self, width: int, is_unit: bool) -> Ranking:
        """The same, with only the first `width` dimensions of both heads' vectors.

        Args:
            is_unit: whether the dual encoder's vectors have unit length.
        """

        def cut(head: str, vectors_ND: np.ndarray | None) -> Any:
            if vectors_ND is None or head == "bias":
                return vectors_ND
            cut_NW = np.ascontiguousarray(vectors_ND[:, :width])
            return unit_rows(cut_NW) if is_unit and head == "de" else cut_NW

        whole = self.encoded
        return replace(
            self,
            encoded=replace(whole, de_BD=cut("de", whole.de_BD), clf_BD=cut("clf", whole.clf_BD)),
            vectors={head: cut(head, array) for head, array in self.vectors.items()},
        )

    def with_words(self, words: WordSpace | None) -> Ranking:
        """The same queries with their words (None: without), to compare with training queries."""
        vectors = words and words.vectors(*paths.open_tokens("queries").ragged(self.rows))
        return replace(self, encoded=replace(self.encoded, words_BF=vectors))

    @cached_property
    def truth(self) -> sp.csr_matrix:
        """Relevance of these queries without filtered pairs."""
        return filtered_truth(self.dataset.relevance[self.rows], self.filter_pairs)

    @cached_property
    def filter_pairs(self) -> sp.csr_matrix:
        """Filter pairs of these queries."""
        return self.dataset.filter_pairs[self.rows]

    @cached_property
    def excluded(self) -> np.ndarray:
        """Keys query * L + label of the filter pairs."""
        return pair_keys(self.filter_pairs)

    def heads(self, index: Index, clf_weight: float = 1.0) -> Heads:
        """How the heads score by section `index`, with this weight of the classifier."""
        return Heads(self.vectors, index.space, index.clf_normalize, clf_weight)

    def ranker(self, heads: Heads, voting: Voting | None = None) -> Ranker:
        """A ranker that compares queries with all labels."""
        return Ranker(heads, ExactIndex(heads, self.device), voting)

    def voting(self, neighbours: Neighbours, num: int) -> Voting:
        """Votes of the `num` nearest training queries."""
        return Voting(neighbours=neighbours, num=num, head="de" if "de" in self.vectors else "clf")

    def joined_to(self, voting: Voting) -> Neighbours:
        """The neighbours with these queries appended. These may vote once no more weights are tuned
        on them.
        """
        neighbours = voting.neighbours
        labels_ML = sp.vstack([neighbours.labels_ML, self.truth > 0], format="csr")
        uids, titles = self.dataset.query_columns(self.rows)
        return neighbours.with_queries(voting.compared(self.encoded), labels_ML, uids, titles)

    @cached_property
    def propensity(self) -> Propensity:
        """The propensities of data/propensity."""
        return paths.open_propensity()

    def metrics(self, heads: Heads) -> dict[str, float]:
        """All metrics of the split by the heads' score, without votes."""
        ranked = self.ranker(heads).search(self.encoded, K, self.excluded)
        return self.metrics_of(ranked.rows)

    def metrics_of(self, labels: np.ndarray) -> dict[str, float]:
        """All metrics of the split for these predictions, int [n, K], best first, -1 = none."""
        return evaluate(labels, self.truth, self.propensity.inverse_L, self.propensity.group_L)

    def relevant(self, labels: np.ndarray) -> np.ndarray:
        """Whether each prediction, int [n, K], is relevant: bool [n, K]; False for filtered pairs
        and -1.
        """
        query_n1 = np.arange(len(labels))[:, None]
        found = self.truth[query_n1, np.maximum(labels, 0)].toarray()
        return found.astype(bool) & (labels >= 0)

    def metrics_of_votes(self, voting: Voting) -> dict[str, float]:
        """All metrics of the split by the votes of training queries alone."""
        every = list(blocks(len(self.rows), QUERIES_AT_ONCE))

        def rank(some: slice) -> np.ndarray:
            part = self.part(some)
            return voting.rank(part.encoded, K, part.excluded).rows

        nothing = np.zeros((0, K), dtype=np.int64)
        with thread_pool() as threads:
            ranked = threads.map(rank, every)
            rows = progress(ranked, total=len(every), desc="rank by votes", unit="block")
            return self.metrics_of(np.concatenate([nothing, *rows]))


def training_neighbours(
    model: UniDEC,
    dataset: XMCDataset,
    precision: str,
    by: NeighboursBy = "model",
    tokens: tuple[Tokens, Tokens] | None = None,
    word_head: int = 0,
    width: int = 0,
) -> Neighbours:
    """The queries of the training split as neighbours, without filtered pairs.

    Args:
        by: "model": compared in the dual encoder's space (the classifier's, if the model has no
            other head); "words": compared by their words, with the words of the labels.
        tokens: tokens of only the training split's queries, in order, and of the labels; None:
        data/tokens, with data/cache.
        word_head: number of leading tokens of a text that are also compared separately; only for
        "words".
        width: number of leading dimensions of the model's vectors to compare; 0: all.
    """
    from unidec.model.frozen import autocast, cached_inputs

    if by == "words":
        return word_neighbours(dataset, model.tokenizer_folder, tokens, word_head)
    rows, facts = _training_queries(dataset)
    build = None
    amp = autocast_type(precision, model.device)
    if tokens is None:
        caches = {"queries": paths.open_tokens("queries")}
        build = cached_inputs(model.encoder, caches, paths.CACHE, model.device, amp)
        of_queries: Tokens = caches["queries"]
    else:
        of_queries, _ = tokens
        rows = np.arange(len(rows))
    head: Literal["de", "clf"] = "clf" if model.heads == "clf" else "de"
    with autocast(model.device, amp):
        de, clf = model.vectors(
            "queries", of_queries, rows, build, desc="training queries", only=head
        )
    vectors: Any = de if head == "de" else clf
    return Neighbours(vectors[:, : width or None], *facts)


def _training_queries(dataset: XMCDataset) -> tuple[np.ndarray, tuple[Any, Any, Any]]:
    """Rows of the training queries; and their truth, uids and titles."""
    rows = dataset.rows("train")
    return rows, (truth_of(dataset, rows), *dataset.query_columns(rows))


def word_neighbours(
    dataset: XMCDataset,
    tokenizer: Path,
    tokens: tuple[Tokens, Tokens] | None = None,
    word_head: int = 0,
) -> Neighbours:
    """The queries of the training split, compared by words.

    Args:
        tokenizer: its folder.
        tokens, word_head: see `training_neighbours`.
    """
    rows, facts = _training_queries(dataset)
    if tokens is None:
        tokens = (paths.open_tokens("queries"), paths.open_tokens("labels"))
    else:
        rows = np.arange(len(rows))
    of_queries, of_labels = tokens
    every_label = np.arange(len(of_labels))
    texts = chain(text_blocks(of_queries, rows), text_blocks(of_labels, every_label))
    space = WordSpace.fit(tokenizer, texts, word_head)
    return Neighbours(
        space.stacked(text_blocks(of_queries, rows)),
        *facts,
        space,
        space.stacked(text_blocks(of_labels, every_label)),
    )


@dataclass(frozen=True)
class Blend:
    """Weights of the served score.

    Attributes:
        clf_weight, knn_weight: weights of the classifier's score, and of the votes (0: no votes).
        metrics, ranked: metrics and predictions on the ranking's split, by these weights or by the
            fusion. A fusion is cross-validated: its networks rank queries that they were not
            trained on.
        tried: each tuning step as {clf_weight, knn_weight, the objective}, in order; [] without
        votes.
        fusion: the networks that rank instead of the weighted scores; None: the weighted scores
        rank.
        by_tail: headline metrics of the fusion by the weight of rare labels, which is in "tail".
        reader: computes the fusion's features.
    """

    clf_weight: float
    knn_weight: float
    metrics: dict[str, float]
    ranked: Ranked
    tried: list[dict[str, float]] = field(default_factory=list)
    fusion: Fusion | None = None
    by_tail: list[dict[str, float]] = field(default_factory=list)
    reader: LabelEvidence | None = None


def tuned_blend(ranking: Ranking, params: Params, neighbours: Neighbours | None) -> Blend:
    """The score weights: as given, or if they are "auto", tuned on the ranking's split.

    The two weights are tuned in turn until neither changes, at most `MAX_TURNS` times, starting
    with the best classifier weight without votes; of equally good weights the smaller is taken. The
    same grid serves normalised and raw classifier scores: raw ones are training logits times tau,
    of the same magnitude as cosines. Of a large split, evenly spaced queries are used
    (`TUNING_QUERIES`).
    """
    index = params.index
    objective = index.objective
    tried: dict[tuple[float, float], dict[str, float]] = {}
    clf_weights = CLF_WEIGHTS if index.clf_weight == "auto" else (index.clf_weight,)
    knn_weights: tuple[float, ...] = (0.0,)
    voting = None
    if neighbours is not None:
        knn_weights = KNN_WEIGHTS if index.knn_weight == "auto" else (index.knn_weight,)
        voting = ranking.voting(neighbours, index.knn_neighbours)
    ranker = ranking.ranker(ranking.heads(index), voting)
    step = max(1, len(ranking.rows) // TUNING_QUERIES)
    sample = ranking.part(slice(None, None, step))
    ranked = ranker.candidates(sample.encoded, clf_weights, CANDIDATES, sample.excluded)

    def quality(weights: tuple[float, float]) -> float:
        if weights not in tried:
            tried[weights] = sample.metrics_of(ranked(*weights, K).rows)
        return tried[weights][objective]

    best = max([(weight, 0.0) for weight in clf_weights], key=quality)
    for _ in range(MAX_TURNS):
        before = best
        best = max([(best[0], weight) for weight in knn_weights], key=quality)
        if not best[1]:  # this classifier weight is already the best one without votes
            break
        best = max([(weight, best[1]) for weight in clf_weights], key=quality)
        if best == before:
            break
    steps = [
        {"clf_weight": clf_weight, "knn_weight": knn_weight, objective: metrics[objective]}
        for (clf_weight, knn_weight), metrics in tried.items()
    ]
    if step > 1:
        ranked = ranker.candidates(ranking.encoded, best[:1], CANDIDATES, ranking.excluded)
    of_all = ranked(*best, K)
    return Blend(
        *best,
        metrics=ranking.metrics_of(of_all.rows),
        ranked=of_all,
        tried=[] if voting is None else steps,
    )


def quality_by_width(ranking: Ranking, params: Params, is_unit: bool) -> list[dict[str, float]]:
    """Headline metrics of the heads without votes, at each width used in training and at the full
    width, each with its "width"; an "auto" weight of the classifier is tuned for each width. [] if
    the heads were trained at no other width, or if the split has no queries.

    Args:
        is_unit: as for `Ranking.at_width`.
    """
    if not params.loss.widths or not len(ranking.rows):
        return []
    return [
        {
            "width": width,
            **headline(tuned_blend(ranking.at_width(width, is_unit), params, None).metrics),
        }
        for width in (*params.loss.widths, params.model.dim)
    ]


def fused(ranking: Ranking, params: Params, neighbours: Neighbours, blend: Blend) -> Blend:
    """Add a fusion, trained on the ranking's split, to the blend.

    The blend is returned unchanged if the split has too few queries, or if the fusion is not better
    by `index.objective` on queries that it was not trained on.
    """
    from unidec.ranking.fusion_fit import fit_fusion, fit_word_network

    index = params.index
    objective = index.objective
    num_queries = len(ranking.rows)
    if num_queries < LEAST_QUERIES:
        _no_fusion(f"{num_queries} validation queries, {LEAST_QUERIES} are needed")
        return blend
    dataset = ranking.dataset
    propensity = (params.data.propensity_a, params.data.propensity_b)
    heads = ranking.heads(index, blend.clf_weight)
    reader = LabelEvidence(heads, neighbours, index.knn_neighbours, propensity)
    not_ranked = pair_keys(dataset.filter_pairs[dataset.rows("train")])
    reader.by_words = fit_word_network(reader.words, not_ranked, params.seed)
    found = ranking.ranker(heads).search(ranking.encoded, CANDIDATES, ranking.excluded)
    evidence = reader.read(ranking.encoded, found.rows, ranking.excluded)
    key_P = evidence.query_P * dataset.num_labels + evidence.label_P
    relevant_P = PairScores.of(ranking.truth).at(key_P) > 0
    fitted = fit_fusion(evidence, relevant_P, propensity, params.seed, reader.by_words)
    log_inverse_P = reader.log_inverse_L[evidence.label_P]

    def ranked(tail: float) -> Ranked:
        return evidence.best(fitted.held_out_P + np.float32(tail) * log_inverse_P, K)

    by_tail = {tail: ranking.metrics_of(ranked(tail).rows) for tail in TAILS}
    least = max(metrics[objective] for metrics in by_tail.values()) - TAIL_TOLERANCE
    tail = max(tail for tail, metrics in by_tail.items() if metrics[objective] >= least)
    metrics = by_tail[tail]
    fused_quality = metrics[objective]
    blend_quality = blend.metrics[objective]
    if fused_quality <= blend_quality:
        _no_fusion(f"{objective} {fused_quality:.2f}, without one {blend_quality:.2f}")
        return blend
    gain = {
        name: round(value - blend.metrics[name], 4) for name, value in headline(metrics).items()
    }
    return replace(
        blend,
        metrics=metrics,
        ranked=ranked(tail),
        reader=reader,
        fusion=fitted.fusion.model_copy(update={"tail": tail, "gain": gain}),
        by_tail=[{"tail": tail, **headline(of_tail)} for tail, of_tail in by_tail.items()],
    )


def _no_fusion(why: str) -> None:
    say(f"no fusion: {why}; the weighted sum of the scores ranks")


def validation_metrics(ranking: Ranking, params: Params) -> dict[str, float]:
    """Metrics of the validation split by the served space's score, without votes; {} without
    validation queries.
    """
    if not len(ranking.rows):
        return {}
    index = params.index
    weight = 1.0 if index.clf_weight == "auto" else float(index.clf_weight)
    return ranking.metrics(ranking.heads(index, weight))
