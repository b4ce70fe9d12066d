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
import numpy.typing as npt

from unidec.bundle.bundle import Bundle
from unidec.bundle.text_file import text_column
from unidec.data.tokens import Piece, is_blank
from unidec.errors import DataError
from unidec.ranking.heads import SPACES, Space
from unidec.ranking.query_encoder import Encoded, QueryEncoder, Runtime, open_encoder
from unidec.ranking.ranker import Prediction, named_predictions

if TYPE_CHECKING:
    import pandas as pd

Labels = npt.NDArray[np.int64]
BATCH = 256  # requests answered at once
_LEAST_K = 8  # requests for up to this number of labels are searched together


@dataclass(frozen=True)
class Request:
    """A query and how to answer it.

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
    can be negative for "ridge" and "ridge-labels"), and (uid, title) of each of its `labels`.
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


class Answerer:
    """Answers requests from a bundle. Thread-safe.

    The answer to a request does not depend on the other requests of its batch, except for rounding.

    Args:
        encoder: encoder of the bundle's queries, from `open_encoder`.
    """

    def __init__(self, bundle: Bundle, encoder: QueryEncoder) -> None:
        self.bundle = bundle
        self.encoder = encoder

    @classmethod
    def open(
        cls, folder: str | os.PathLike[str], runtime: Runtime = "auto", threads: int = 0
    ) -> Answerer:
        """Open a bundle's folder; arguments and errors as for `open_encoder`, errors also as for
        `Bundle.load`.
        """
        bundle = Bundle.load(folder, lazy=True)
        return cls(bundle, open_encoder(bundle, runtime, threads))

    def check(self, request: Request, where: str = "request") -> None:
        """Raise a DataError if the text (also a blank one), k, tail, min_score or head is invalid
        for this bundle.
        """
        if not isinstance(request.text, str):
            raise DataError(
                "the text is not a string",
                where=f"{where}.text",
                got=type(request.text).__name__,
                expected="a string",
            )
        try:
            request.text.encode()
        except UnicodeEncodeError as error:
            fix = "replace lone surrogates"
            raise DataError(
                "the text is not valid Unicode", where=f"{where}.text", got=str(error), fix=fix
            ) from error
        if is_blank(request.text):
            expected = "a text with something to read"
            raise DataError(
                "the text is blank",
                where=f"{where}.text",
                got=repr(request.text)[:80],
                expected=expected,
            )
        if request.k < 1:
            raise DataError(
                "k is out of range", where=f"{where}.k", got=request.k, expected="at least 1"
            )
        if not math.isfinite(request.tail):
            raise DataError(
                "not a number", where=f"{where}.tail", got=request.tail, expected="a finite number"
            )
        if request.min_score is not None and math.isnan(request.min_score):
            got = request.min_score
            expected = "a number, or none"
            raise DataError("not a number", where=f"{where}.min_score", got=got, expected=expected)
        space = self.bundle.info.space
        heads = SPACES if space == "both" else ("both", space)
        if request.head not in heads:
            raise DataError(
                "this bundle does not rank by that head",
                where=f"{where}.head",
                got=request.head,
                expected=", ".join(heads),
            )

    def answer(self, requests: Sequence[Request]) -> list[Prediction]:
        """Labels of each request, best first, ties ordered by label row; raises DataError, which
        names the request.

        Requests of more than one batch are encoded by length, so that there is little padding.
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
            found = self._answer(batch, self.encoder.encode([request.text for request in batch]))
            predictions |= zip(places, found, strict=True)
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
            k, deny, min_score, head: see `Request`. allow: likewise, but an empty sequence allows
            all labels.

        Raises:
            DataError: the column is missing, or a request is invalid; the error names its position.
        """
        import pandas as pd

        texts = frame[text_column(list(getattr(frame, "columns", [])), None, "the table")].tolist()
        answers = self.answer(
            [Request(text, k, tuple(allow) or None, tuple(deny), min_score, head) for text in texts]
        )
        rows = [
            (text, rank, *label)
            for text, answer in zip(texts, answers, strict=True)
            for rank, label in enumerate(
                zip(answer.labels, answer.titles, answer.scores, strict=True), 1
            )
        ]
        table = pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])
        return table.astype({"rank": "int64", "score": "float64"})

    def explain(self, request: Request, neighbours: int = 10) -> Explanation:
        """The answer to a request and how it came about, with up to `neighbours` similar training
        queries.
        """
        self.check(request)
        bundle = self.bundle
        info = self.bundle.info
        encoded = self.encoder.encode([request.text])
        [prediction] = self._answer([request], encoded)
        weights = {"de": 1.0} if info.space != "clf" and request.head != "clf" else {}
        if info.space != "de" and request.head != "de":
            weights["clf"] = (
                info.clf_weight if (info.space, request.head) == ("both", "both") else 1.0
            )
        if info.knn is not None and request.head == "both":
            weights["knn"] = info.knn.weight
        tokens, cut = bundle.tokenizer.pieces(request.text)
        return Explanation(prediction, weights, self._nearest(encoded, neighbours), tokens, cut)

    def _answer(self, requests: Sequence[Request], encoded: Encoded) -> list[Prediction]:
        """Answers to requests, one search for each group of requests with the same
        search options.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            groups[_search_options(request)].append(place)
        predictions: dict[int, Prediction] = {}
        for places in groups.values():
            queries = encoded if len(groups) == 1 else encoded.take(np.asarray(places))
            predictions |= zip(
                places, self._group([requests[i] for i in places], queries), strict=True
            )
        return [predictions[place] for place in range(len(requests))]

    def _group(self, requests: Sequence[Request], encoded: Encoded) -> list[Prediction]:
        """Answers to requests with the same search options."""
        bundle = self.bundle
        first = requests[0]
        # depends on the search options alone, so that a request alone gets the same answer
        k = min(max(_LEAST_K, _next_power_of_two(first.k)), bundle.info.num_labels)
        denied = [self._rows(request.deny) for request in requests]
        pairs = [
            query * bundle.info.num_labels + row
            for query, (rows, _) in enumerate(denied)
            for row in rows
        ]
        excluded = np.asarray(pairs, dtype=np.int64)
        allowed, unknown_allowed = self._rows(first.allow or ())
        rows = None if first.allow is None else np.asarray(allowed, dtype=np.int64)
        options: Any = {"head": first.head, "tail": first.tail, "allowed": rows}
        ranked = bundle.ranker.rank(encoded, k, excluded, **options)
        count_B = []
        for request, row_K, score_K in zip(requests, ranked.rows, ranked.scores, strict=True):
            valid_K = (
                row_K >= 0
                if request.min_score is None
                else (row_K >= 0) & (score_K >= request.min_score)
            )
            count_B.append(min(int(valid_K.sum()), request.k))
        ranked = bundle.ranker.with_parts(encoded, ranked, max(request.k for request in requests))
        is_own_ranking = first.head == "both" and first.tail == 0
        calibration = bundle.info.calibration if is_own_ranking else None
        predictions = named_predictions(ranked, count_B, bundle.uids, bundle.titles, calibration)
        counts = zip(encoded.num_tokens_B.tolist(), encoded.unknown_B.tolist(), denied, strict=True)
        return [
            replace(
                answer,
                num_tokens=tokens,
                unknown_tokens=unknown,
                unknown_labels=unknown_denied + unknown_allowed,
            )
            for answer, (tokens, unknown, (_, unknown_denied)) in zip(
                predictions, counts, strict=True
            )
        ]

    def _rows(self, uids: Sequence[str]) -> tuple[list[int], int]:
        """Rows of the given labels, ascending, and the number of unknown uids."""
        unique = set(uids)
        rows = (
            sorted(self.bundle.row_of[uid] for uid in unique if uid in self.bundle.row_of)
            if unique
            else []
        )
        return rows, len(unique) - len(rows)

    def _nearest(self, encoded: Encoded, num: int) -> list[TrainingQuery] | None:
        """Up to `num` of the training queries that vote for a single query, nearest first."""
        voting = self.bundle.ranker.voting
        if voting is None:
            return None
        voters = voting.neighbours
        cosine_BN, row_BN = voters.nearest(voting.compared(encoded), voting.num)
        is_query_BN = row_BN < voters.num_queries  # others are labels that vote
        parts = [
            part[is_query_BN] for part in (cosine_BN, voters.weights(cosine_BN, row_BN), row_BN)
        ]
        queries = []
        for cosine, vote, row in zip(*(part[:num].tolist() for part in parts), strict=True):
            if row < 0:
                break
            labels = list(
                zip(*self.bundle.named(np.sort(voters.labels_ML[row].indices)), strict=True)
            )
            queries.append(
                TrainingQuery(
                    voters.uids[row].as_py(), voters.titles[row].as_py(), cosine, vote, labels
                )
            )
        return queries


def _search_options(request: Request) -> Any:
    """Options by which requests are grouped for a search.

    They include the number of labels, rounded up: an approximate search finds more if more labels
    are requested, so
    this number must not depend on the other requests.
    """
    if request.allow is not None:
        return request.head, request.tail, frozenset(request.allow), _next_power_of_two(request.k)
    return request.head, request.tail, max(_LEAST_K, _next_power_of_two(request.k))


def _next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
