"""Answers to requests that each say how: labels to choose from or to leave out, a least score, one head alone.

Legend: B requests, A labels to choose from, K results, D' width of the searched space.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unidec.data.tokens import Piece
from unidec.errors import DataError
from unidec.retrieval.bundle import Bundle, Prediction
from unidec.retrieval.encoded import Encoded, QueryEncoder
from unidec.retrieval.neighbours import VOTES, Ranked
from unidec.retrieval.scoring_space import SPACES, Space, exact_scores

Labels = npt.NDArray[np.int64]
_LEAST_K = 8  # requests of fewer labels are searched together


@dataclass(frozen=True)
class Request:
    """One query and how to answer it.

    Attributes:
        text: for a model of long texts title and content joined by a space.
        k: labels at most, at least 1.
        allow: uids of the only labels to choose from; None: all. Their scores are exact, whatever the index.
        deny: uids of labels that must not be returned.
        min_score: labels that score less are not returned.
        head: "both": as the bundle ranks (also where it has one head only); "de" or "clf": by that head alone.
    """

    text: str
    k: int = 5
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    min_score: float | None = None
    head: Space = "both"


@dataclass(frozen=True)
class TrainingQuery:
    """A training query near the one asked: `cosine` to it, how much its labels' votes count (`vote`, the nearest's is
    the largest), `labels`: (uid, title) of each."""

    uid: str
    title: str
    cosine: float
    vote: float
    labels: list[tuple[str, str]]


@dataclass(frozen=True)
class Explanation:
    """Why a query gets its labels.

    Attributes:
        prediction: the answer; its de_scores, clf_scores and knn_scores are the parts before their weights.
        weights: of the parts that count, by name (de, clf, knn): a score is the sum of weight x part.
        neighbours: the nearest training queries, nearest first; None where the bundle has none.
        tokens: the query as the encoder sees it.
        cut: the query had more tokens than the model takes.
    """

    prediction: Prediction
    weights: dict[str, float]
    neighbours: list[TrainingQuery] | None
    tokens: list[Piece]
    cut: bool


class Answerer:
    """Answers requests from a bundle. Safe from several threads at once.

    What a request gets does not depend on the others in its batch, but for rounding.

    Args:
        bundle: what answers.
        encoder: of `open_encoder`.
    """

    def __init__(self, bundle: Bundle, encoder: QueryEncoder) -> None:
        self.bundle, self.encoder = bundle, encoder

    def check(self, request: Request, where: str = "request") -> None:
        """Refuse what cannot be answered, before anything is computed.

        Raises:
            DataError: a text, k, min_score or head that is none, or a head by which this bundle does not rank.
        """
        if not isinstance(request.text, str):
            raise DataError("a text is needed", where=f"{where}.text", got=type(request.text).__name__)
        try:
            request.text.encode()
        except UnicodeEncodeError as error:
            raise DataError("a text that is not valid Unicode", where=f"{where}.text", got=str(error)) from error
        if request.k < 1:
            raise DataError("k is out of range", where=f"{where}.k", got=request.k, expected="at least 1")
        if request.min_score is not None and math.isnan(request.min_score):
            raise DataError("a number is needed", where=f"{where}.min_score", got=request.min_score)
        space = self.bundle.info.space
        known = SPACES if space == "both" else ("both", space)
        if request.head not in known:
            raise DataError(
                "this bundle does not rank by that head", where=f"{where}.head", got=request.head,
                expected=", ".join(known),
            )  # fmt: skip

    def answer(self, requests: Sequence[Request]) -> list[Prediction]:
        """The best labels for each request, best first, ties by the label's row.

        Raises:
            DataError: as in `check`; it names the request by its place.
        """
        for place, request in enumerate(requests):
            self.check(request, f"request {place}")
        if not requests:
            return []
        return self._answer(requests, self.encoder.encode([request.text for request in requests]))

    def explain(self, request: Request, neighbours: int = 10) -> Explanation:
        """The answer to a request with what it comes from.

        Args:
            neighbours: training queries to show at most.

        Raises:
            DataError: as in `check`.
        """
        self.check(request)
        bundle, info = self.bundle, self.bundle.info
        asked = self.encoder.encode([request.text])
        [prediction] = self._answer([request], asked)
        weights = {"de": 1.0} if info.space != "clf" and request.head != "clf" else {}
        if info.space != "de" and request.head != "de":
            weights["clf"] = info.clf_weight if (info.space, request.head) == ("both", "both") else 1.0
        if info.knn is not None and request.head == "both":
            weights["knn"] = info.knn.weight
        tokens, cut = bundle.tokenizer.pieces(request.text)
        return Explanation(prediction, weights, self._nearest(asked, neighbours), tokens, cut)

    def _answer(self, requests: Sequence[Request], asked: Encoded) -> list[Prediction]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            groups[_searched_alike(request)].append(place)
        out: list[Prediction | None] = [None] * len(requests)
        for places in groups.values():
            some = asked if len(groups) == 1 else asked.take(np.asarray(places))
            for place, prediction in zip(places, self._group([requests[i] for i in places], some), strict=True):
                out[place] = prediction
        return [prediction for prediction in out if prediction is not None]

    def _group(self, requests: Sequence[Request], asked: Encoded) -> list[Prediction]:
        """Requests of one head, one list of labels to choose from, and a like number of results."""
        bundle, first = self.bundle, requests[0]
        # of the whole group, the same for each of them alone
        k = min(max(_LEAST_K, _at_least(first.k)), bundle.num_labels)
        unknown_B = [0] * len(requests)
        denied_B: list[set[int]] = [set() for _ in requests]
        for place, request in enumerate(requests):
            if request.deny:
                denied_B[place], unknown_B[place] = self._rows(request.deny)
        allowed: set[int] | None = None
        if first.allow is not None:
            allowed, unknown = self._rows(first.allow)
            unknown_B = [count + unknown for count in unknown_B]
        pairs = [query * bundle.num_labels + row for query, rows in enumerate(denied_B) for row in rows]
        excluded = np.asarray(pairs, dtype=np.int64)
        if allowed is None:
            found = bundle.rank(asked.de_BD, asked.clf_BD, k, excluded, asked.words_BF, first.head)
        else:
            rows_A = np.asarray(sorted(allowed), dtype=np.int64)
            found = self._rank_allowed(asked, rows_A, k, excluded, first.head)
        return self._predictions(requests, asked, found, unknown_B)

    def _rank_allowed(self, asked: Encoded, rows_A: Labels, k: int, excluded: Labels, head: Space) -> Ranked:
        """The k best of some labels by their exact scores; rows ascend."""
        bundle, info, num_queries = self.bundle, self.bundle.info, len(asked)
        query_BD = bundle.searched(asked.de_BD, asked.clf_BD, head)
        score_BA = exact_scores(query_BD, rows_A, bundle.vectors, info.space, info.clf_normalize)
        votes_BA = None
        votes_BL = bundle.votes(asked.de_BD, asked.clf_BD, asked.words_BF) if head == "both" else None
        if votes_BL is not None and info.knn is not None:
            votes_BA = votes_BL[:, rows_A].toarray()
            score_BA = score_BA + np.float32(info.knn.weight) * votes_BA
        if excluded.size:
            query, row = np.divmod(excluded, bundle.num_labels)
            at = np.minimum(np.searchsorted(rows_A, row), max(len(rows_A) - 1, 0))
            here = rows_A[at] == row if len(rows_A) else np.zeros(len(row), dtype=bool)
            score_BA[query[here], at[here]] = -np.inf
        order_BK = np.argsort(-score_BA, axis=1, kind="stable")[:, :k]
        width = order_BK.shape[1]
        scores = np.full((num_queries, k), -np.inf, dtype=np.float32)
        scores[:, :width] = np.take_along_axis(score_BA, order_BK, axis=1)
        missing = np.isneginf(scores)
        rows = np.full((num_queries, k), -1, dtype=np.int64)
        rows[:, :width] = rows_A[order_BK]
        rows[missing] = -1
        votes = None
        if votes_BA is not None:
            votes = np.full((num_queries, k), np.nan, dtype=np.float32)
            votes[:, :width] = np.take_along_axis(votes_BA, order_BK, axis=1)
            votes[missing] = np.nan
        return Ranked(rows, scores, votes)

    def _rows(self, uids: Sequence[str]) -> tuple[set[int], int]:
        """Rows of labels, and how many of them there are not."""
        row_of, wanted = self.bundle.row_of, set(uids)
        found = {row_of[uid] for uid in wanted if uid in row_of}
        return found, len(wanted) - len(found)

    def _predictions(
        self, requests: Sequence[Request], asked: Encoded, found: Ranked, unknown_B: Sequence[int]
    ) -> list[Prediction]:
        most = max(request.k for request in requests)
        de_BK, clf_BK = self.bundle.parts(asked, found.rows[:, :most])
        count_B = []
        for query, request in enumerate(requests):
            count = min(int((found.rows[query] >= 0).sum()), request.k)
            if request.min_score is not None:
                count = min(count, int((found.scores[query] >= request.min_score).sum()))
            count_B.append(count)
        # all names at once: a look-up costs the same for one and for a thousand
        uids, titles = self.bundle.named(np.concatenate([row[:n] for row, n in zip(found.rows, count_B, strict=True)]))
        out, start = [], 0
        for query, count in enumerate(count_B):
            own = slice(start, start + count)
            start += count
            scores, de, clf, votes = (
                [] if part is None else part[query, :count].tolist()
                for part in (found.scores, de_BK, clf_BK, found.votes)
            )
            tokens = int(asked.num_tokens_B[query]), int(asked.unknown_B[query])
            out.append(Prediction(uids[own], titles[own], scores, de, clf, votes, *tokens, unknown_B[query]))
        return out

    def _nearest(self, asked: Encoded, num: int) -> list[TrainingQuery] | None:
        voters, knn = self.bundle.neighbours, self.bundle.info.knn
        if voters is None or knn is None:
            return None
        compared = self.bundle.compared(asked.de_BD, asked.clf_BD, asked.words_BF)
        cosine_BN, row_BN = voters.nearest(compared, min(num, knn.neighbours))
        vote: Callable[..., Any] = VOTES[voters.vote]
        out = []
        for cosine, count, row in zip(cosine_BN[0], vote(cosine_BN)[0], row_BN[0], strict=True):
            labels = zip(*self.bundle.named(np.sort(voters.labels_ML[int(row)].indices)), strict=True)
            uid, title = (column[int(row)].as_py() for column in (voters.uids, voters.titles))
            out.append(TrainingQuery(uid, title, float(cosine), float(count), list(labels)))
        return out


def _searched_alike(request: Request) -> Any:
    """What requests have in common that are searched together: an approximate search finds more the more it is asked
    for, so how many labels that are must not depend on the other requests."""
    if request.allow is not None:
        return request.head, frozenset(request.allow), _at_least(request.k)
    return request.head, max(_LEAST_K, _at_least(request.k))


def _at_least(count: int) -> int:
    """The power of two from `count` on."""
    return 1 << (count - 1).bit_length()
