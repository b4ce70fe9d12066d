"""Answers requests, each with its own options: allowed or denied labels, a minimum score, ranking
by a single head.

Legend: B requests, K results, N nearest training queries.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from unidec.bundle.bundle import Bundle
from unidec.bundle.text_file import text_column
from unidec.data.tokens import Piece, is_blank
from unidec.errors import DataError
from unidec.ranking.heads import Space
from unidec.ranking.query_encoder import Encoded, QueryEncoder, Runtime, open_encoder
from unidec.ranking.ranker import Prediction, named_predictions
from unidec.ranking.sparse import Rows

if TYPE_CHECKING:
    import pandas as pd

BATCH = 256  # requests answered at once
_LEAST_K = 8  # requests for up to this number of labels are searched together


@dataclass(frozen=True)
class LabelQuery:
    """A query and the options for answering it.

    Attributes:
        text: the query; for a model of long texts, title and content joined by a space.
        k: number of labels, at least 1.
        allow: uids of the only labels that may be returned; None: all labels. Their scores are
        exact for any index.
        deny: uids of labels that must not be returned.
        min_score: labels with a lower score are not returned.
        head: "both": rank as the bundle does (also if it has one head only); "de" or "clf": rank by
        that head alone.
        tail: ranks rare labels higher if positive, lower if negative; ignored by bundles without a
        fusion.
    """

    text: str
    k: int = 5
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    min_score: float | None = None
    head: Space = "both"
    tail: float = 0.0


@dataclass(frozen=True)
class TrainingQuery:
    """A training query similar to the query: its `cosine`, the weight of its votes (`vote`, which
    can be negative for "ridge-labels"), and (uid, title) of each of its `labels`.
    """

    uid: str
    title: str
    cosine: float
    vote: float
    labels: list[tuple[str, str]]


@dataclass(frozen=True)
class Explanation:
    """Why a query receives its labels.

    Attributes:
        prediction: the answer; its de_scores, clf_scores and knn_scores are the unweighted parts of
        the score.
        weights: weight of each part of the score, by name (de, clf, knn). The score is the sum of
            weight * part; for a bundle with a fusion, that sum is one of its features.
        neighbours: the most similar training queries, nearest first; None if training queries do
        not vote.
        tokens: the query's tokens, as the encoder reads them.
        cut: the query was truncated to the model's maximum length.
    """

    prediction: Prediction
    weights: dict[str, float]
    neighbours: list[TrainingQuery] | None
    tokens: list[Piece]
    cut: bool


@dataclass(frozen=True)
class Answerer:
    """Answers requests from a bundle. Thread-safe.

    The answer to a request does not depend on the other requests of its batch, except for rounding.

    Attributes:
        encoder: encoder of the bundle's queries, from `open_encoder`.
    """

    bundle: Bundle
    encoder: QueryEncoder

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], runtime: Runtime = "auto", threads: int = 0
    ) -> Answerer:
        """Open a bundle's folder. Arguments are those of `open_encoder`; errors those of
        `open_encoder` and `Bundle.load`.
        """
        bundle = Bundle.load(folder, lazy=True)
        return cls(bundle, open_encoder(bundle, runtime, threads))

    def check(self, request: LabelQuery, where: str = "request") -> None:
        """Raise a DataError if the text (also a blank one), k, tail, min_score or head is not valid
        for this bundle.
        """

        def refused(name: str, what: str, got: object, expected: str) -> DataError:
            return DataError(what, where=f"{where}.{name}", got=got, expected=expected)

        text = request.text
        if not isinstance(text, str):
            raise refused("text", "the text is not a string", type(text).__name__, "a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            expected = "no lone surrogates"
            raise refused("text", "the text is not valid Unicode", error, expected) from error
        if is_blank(text):
            expected = "a text with something to read"
            raise refused("text", "the text is blank", repr(text)[:80], expected)
        if request.k < 1:
            raise refused("k", "k is out of range", request.k, "at least 1")
        if not math.isfinite(request.tail):
            raise refused("tail", "not a number", request.tail, "a finite number")
        if request.min_score is not None and math.isnan(request.min_score):
            raise refused("min_score", "not a number", request.min_score, "a number, or none")
        heads = ("both", *self.bundle.ranker.heads.names)
        if request.head not in heads:
            what = "this bundle does not rank by that head"
            raise refused("head", what, request.head, ", ".join(heads))

    def answer(self, requests: Sequence[LabelQuery]) -> list[Prediction]:
        """Labels of each request, best first; ties are ordered by label row. Raises a DataError
        that names the invalid request.

        If there is more than one batch, requests are sorted by length to reduce padding.
        """
        for place, request in enumerate(requests):
            self.check(request, f"request {place}")
        order = list(range(len(requests)))
        if len(requests) > BATCH:
            order.sort(key=lambda place: len(requests[place].text))
        predictions: dict[int, Prediction] = {}
        for start in range(0, len(requests), BATCH):
            places = order[start : start + BATCH]
            batch = [requests[place] for place in places]
            encoded = self.encoder.encode([request.text for request in batch])
            predictions |= zip(places, self._answer(batch, encoded), strict=True)
        return [predictions[place] for place in range(len(requests))]

    def table(
        self,
        frame: Any,
        k: int = 5,
        *,
        allow: Sequence[str] = (),
        deny: Sequence[str] = (),
        min_score: float | None = None,
        head: Space = "both",
    ) -> pd.DataFrame:
        """Answer a table of queries with a table, as MLflow's pyfunc does: columns query, rank
        (int64, from 1), label, title, score (float64); queries in order, best label first.

        Args:
            frame: DataFrame with a text column `query` or `text`.
            k, deny, min_score, head: see `LabelQuery`. allow: likewise, but an empty sequence
                allows all labels.

        Raises:
            DataError: the column is missing, or a request is invalid; the error names its position.
        """
        import pandas as pd

        column = text_column(list(getattr(frame, "columns", [])), None, "the table")
        options = LabelQuery(
            "", k, allow=tuple(allow) or None, deny=tuple(deny), min_score=min_score, head=head
        )
        requests = [replace(options, text=text) for text in frame[column].tolist()]
        rows = []
        for request, found in zip(requests, self.answer(requests), strict=True):
            best = zip(found.labels, found.titles, found.scores, strict=True)
            for rank, label in enumerate(best, 1):
                rows.append((request.text, rank, *label))
        table = pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])
        return table.astype({"rank": "int64", "score": "float64"})

    def explain(self, request: LabelQuery, neighbours: int = 10) -> Explanation:
        """The answer to a request, the parts of its score, and up to `neighbours` similar training
        queries.
        """
        self.check(request)
        bundle = self.bundle
        encoded = self.encoder.encode([request.text])
        [prediction] = self._answer([request], encoded)
        weights = bundle.info.weights(request.head)
        tokens, cut = bundle.tokenizer.pieces(request.text)
        return Explanation(prediction, weights, self._nearest(encoded, neighbours), tokens, cut)

    def _answer(self, requests: Sequence[LabelQuery], encoded: Encoded) -> list[Prediction]:
        """Answers to requests; requests with the same search options share one search."""
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            groups[_search_options(request)].append(place)
        predictions: dict[int, Prediction] = {}
        for places in groups.values():
            queries = encoded
            if len(groups) > 1:
                queries = encoded.take(np.asarray(places))
            answers = self._group([requests[place] for place in places], queries)
            predictions |= zip(places, answers, strict=True)
        return [predictions[place] for place in range(len(requests))]

    def _group(self, requests: Sequence[LabelQuery], encoded: Encoded) -> list[Prediction]:
        """Answers to requests with the same search options."""
        bundle = self.bundle
        first = requests[0]
        # depends only on the search options: a request gets the same answer alone and in a batch
        k = min(_searched_k(first), bundle.info.num_labels)
        denied = [self._rows(request.deny) for request in requests]
        excluded = []
        for query, (rows_N, _) in enumerate(denied):
            excluded.append(query * bundle.info.num_labels + rows_N)
        allowed, unknown_allowed = self._rows(first.allow or ())
        ranked = bundle.ranker.rank(
            encoded,
            k,
            np.concatenate(excluded),
            head=first.head,
            tail=first.tail,
            allowed=None if first.allow is None else allowed,
        )
        count_B = []
        for request, row_K, score_K in zip(requests, ranked.rows, ranked.scores, strict=True):
            valid_K = row_K >= 0
            if request.min_score is not None:
                valid_K &= score_K >= request.min_score
            count_B.append(min(int(valid_K.sum()), request.k))
        ranked = bundle.ranker.with_parts(encoded, ranked)
        is_own_ranking = first.head == "both" and first.tail == 0
        calibration = bundle.info.calibration if is_own_ranking else None
        predictions = named_predictions(ranked, count_B, bundle.uids, bundle.titles, calibration)
        return [
            replace(
                prediction,
                num_tokens=int(encoded.num_tokens_B[query]),
                unknown_tokens=int(encoded.unknown_B[query]),
                unknown_labels=denied[query][1] + unknown_allowed,
            )
            for query, prediction in enumerate(predictions)
        ]

    def _rows(self, uids: Sequence[str]) -> tuple[Rows, int]:
        """Rows of the given labels, ascending, and the number of unknown uids."""
        unique = set(uids)
        # `row_of` of all labels is built on first use: not touched without uids
        row_of = self.bundle.row_of if unique else {}
        rows = sorted(row_of[uid] for uid in unique if uid in row_of)
        return np.array(rows, dtype=np.int64), len(unique) - len(rows)

    def _nearest(self, encoded: Encoded, num: int) -> list[TrainingQuery] | None:
        """Up to `num` of the training queries that vote for a single query, nearest first."""
        voting = self.bundle.ranker.voting
        if voting is None:
            return None
        voters = voting.neighbours
        cosine_BN, row_BN = voters.nearest(voting.compared(encoded), voting.num)
        vote_BN = voters.weights(cosine_BN, row_BN)
        queries: list[TrainingQuery] = []
        cosines, votes, rows = (part_BN[0].tolist() for part_BN in (cosine_BN, vote_BN, row_BN))
        for cosine, vote, row in zip(cosines, votes, rows, strict=True):
            if row < 0 or len(queries) == num:
                break
            if row >= voters.num_queries:  # a label that votes
                continue
            label_rows = np.sort(voters.labels_ML[row].indices)
            uids, titles = self.bundle.named(label_rows)
            queries.append(
                TrainingQuery(
                    uid=voters.uids[row].as_py(),
                    title=voters.titles[row].as_py(),
                    cosine=cosine,
                    vote=vote,
                    labels=list(zip(uids, titles, strict=True)),
                )
            )
        return queries


def _search_options(request: LabelQuery) -> Any:
    """The options that requests must share to be searched together."""
    allowed = None if request.allow is None else frozenset(request.allow)
    return request.head, request.tail, allowed, _searched_k(request)


def _searched_k(request: LabelQuery) -> int:
    """The number of labels to search for: k rounded up to a power of two, at least `_LEAST_K`.

    An approximate search finds more if more labels are requested, so this number must not depend on
    the other requests.
    """
    return max(_LEAST_K, 1 << (request.k - 1).bit_length())
