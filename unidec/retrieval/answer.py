"""Answers to requests that each say how: labels to choose from or to leave out, a least score, one head alone.

Legend: B requests, A labels to choose from, K results, D' width of the searched space.
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

from unidec.data.tokens import Piece
from unidec.errors import DataError
from unidec.retrieval.bundle import Bundle, Prediction
from unidec.retrieval.query_encoder import Encoded, QueryEncoder, Runtime, open_encoder
from unidec.retrieval.scoring_space import SPACES, Space
from unidec.retrieval.text_file import text_column

if TYPE_CHECKING:
    import pandas as pd

Labels = npt.NDArray[np.int64]
BATCH = 256  # requests answered at once
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
        tail: above 0 rare labels rank higher, below 0 lower; for bundles with a fusion, others ignore it.
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
    """A training query near the one asked: `cosine` to it, how much its labels' votes count (`vote`, below 0
    too with "ridge" and "ridge-labels"), `labels`: (uid, title) of each."""

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
        weights: of the parts that count, by name (de, clf, knn): a score is the sum of weight x part; with a fusion
            that sum is one of the things that it reads.
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

    @classmethod
    def open(cls, folder: str | os.PathLike[str], runtime: Runtime = "auto", threads: int = 0) -> Answerer:
        """Of a bundle's folder; errors as of `Bundle.load` and `open_encoder`, which has runtime and threads."""
        bundle = Bundle.load(folder, lazy=True)
        return cls(bundle, open_encoder(bundle, runtime, threads))

    def check(self, request: Request, where: str = "request") -> None:
        """Raise a DataError for what cannot be answered: not a text, k, min_score or head of this bundle."""
        if not isinstance(request.text, str):
            raise DataError("a text is needed", where=f"{where}.text", got=type(request.text).__name__)
        try:
            request.text.encode()
        except UnicodeEncodeError as error:
            raise DataError("a text that is not valid Unicode", where=f"{where}.text", got=str(error)) from error
        if request.k < 1:
            raise DataError("k is out of range", where=f"{where}.k", got=request.k, expected="at least 1")
        if not math.isfinite(request.tail):
            raise DataError("a number is needed", where=f"{where}.tail", got=request.tail)
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
        """The best labels for each request, best first, ties by the label's row; a DataError names the request."""
        for place, request in enumerate(requests):
            self.check(request, f"request {place}")
        batches = (requests[start : start + BATCH] for start in range(0, len(requests), BATCH))
        return [
            found
            for some in batches
            for found in self._answer(some, self.encoder.encode([request.text for request in some]))
        ]

    def table(
        self, frame: Any, k: int = 5, *, allow: Sequence[str] = (), deny: Sequence[str] = (),
        min_score: float | None = None, head: Space = "both",
    ) -> pd.DataFrame:  # fmt: skip
        """A table of queries to one of answers, as MLflow's pyfunc has them: columns query, rank (int64, from 1),
        label, title, score (float64); queries in order, best label first.

        Args:
            frame: DataFrame with a text column `query` or `text`.
            k, deny, min_score, head: see `Request`. allow: too, but empty: all labels.

        Raises:
            DataError: no such column, or a request that cannot be answered; it names the request by its place.
        """
        import pandas as pd

        texts = frame[text_column(list(getattr(frame, "columns", [])), None, "the table")].tolist()
        found = self.answer([Request(text, k, tuple(allow) or None, tuple(deny), min_score, head) for text in texts])
        rows = [
            (text, rank, *named)
            for text, one in zip(texts, found, strict=True)
            for rank, named in enumerate(zip(one.labels, one.titles, one.scores, strict=True), 1)
        ]
        table = pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])
        return table.astype({"rank": "int64", "score": "float64"})

    def explain(self, request: Request, neighbours: int = 10) -> Explanation:
        """The answer to a request with what it comes from, at most so many training queries among it."""
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
        out: dict[int, Prediction] = {}
        for places in groups.values():
            some = asked if len(groups) == 1 else asked.take(np.asarray(places))
            out |= zip(places, self._group([requests[i] for i in places], some), strict=True)
        return [out[place] for place in range(len(requests))]

    def _group(self, requests: Sequence[Request], asked: Encoded) -> list[Prediction]:
        """Requests of one head, one list of labels to choose from, and a like number of results."""
        bundle, first = self.bundle, requests[0]
        # of the whole group, the same for each of them alone
        k = min(max(_LEAST_K, _at_least(first.k)), bundle.num_labels)
        denied = [self._rows(request.deny) for request in requests]
        pairs = [query * bundle.num_labels + row for query, (rows, _) in enumerate(denied) for row in rows]
        excluded = np.asarray(pairs, dtype=np.int64)
        allowed, unknown_allowed = self._rows(first.allow or ())
        rows = None if first.allow is None else np.asarray(allowed, dtype=np.int64)
        found = bundle.rank(asked, k, excluded, first.head, first.tail, rows)
        count_B = []
        for request, row_K, score_K in zip(requests, found.rows, found.scores, strict=True):
            good_K = row_K >= 0 if request.min_score is None else (row_K >= 0) & (score_K >= request.min_score)
            count_B.append(min(int(good_K.sum()), request.k))
        found = bundle.with_parts(asked, found, max(request.k for request in requests))
        named = bundle.predictions(found, count_B, calibrated=first.head == "both" and first.tail == 0)
        counts = zip(asked.num_tokens_B.tolist(), asked.unknown_B.tolist(), denied, strict=True)
        return [
            replace(one, num_tokens=tokens, unknown_tokens=unknown, unknown_labels=unknown_denied + unknown_allowed)
            for one, (tokens, unknown, (_, unknown_denied)) in zip(named, counts, strict=True)
        ]

    def _rows(self, uids: Sequence[str]) -> tuple[list[int], int]:
        """Rows of labels, ascending, and how many of them there are not."""
        wanted = set(uids)
        found = sorted(self.bundle.row_of[uid] for uid in wanted if uid in self.bundle.row_of) if wanted else []
        return found, len(wanted) - len(found)

    def _nearest(self, asked: Encoded, num: int) -> list[TrainingQuery] | None:
        voters, knn = self.bundle.neighbours, self.bundle.info.knn
        if voters is None or knn is None:
            return None
        compared = self.bundle.compared(asked)
        cosine_BN, row_BN = voters.nearest(compared, knn.neighbours)
        parts = [part[row_BN < voters.num_queries] for part in (cosine_BN, voters.weights(cosine_BN, row_BN), row_BN)]
        out = []
        for cosine, count, row in zip(*(part[:num].tolist() for part in parts), strict=True):
            if row < 0:
                break
            labels = zip(*self.bundle.named(np.sort(voters.labels_ML[row].indices)), strict=True)
            out.append(TrainingQuery(voters.uids[row].as_py(), voters.titles[row].as_py(), cosine, count, list(labels)))
        return out


def _searched_alike(request: Request) -> Any:
    """What requests have in common that are searched together: an approximate search finds more the more it is asked
    for, so how many labels that are must not depend on the other requests."""
    if request.allow is not None:
        return request.head, request.tail, frozenset(request.allow), _at_least(request.k)
    return request.head, request.tail, max(_LEAST_K, _at_least(request.k))


def _at_least(count: int) -> int:
    """The power of two from `count` on."""
    return 1 << (count - 1).bit_length()
