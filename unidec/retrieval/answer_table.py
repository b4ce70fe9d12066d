"""A table of queries to a table of answers: what MLflow's pyfunc flavour takes and gives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unidec.retrieval.answer import Answerer, Request
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.query_encoder import Runtime, open_encoder
from unidec.retrieval.scoring_space import Space
from unidec.retrieval.text_file import text_column

if TYPE_CHECKING:
    import pandas as pd


class TableAnswerer:
    """Answers tables of queries. Safe from several threads at once.

    Args:
        bundle: its folder; every file's hash is checked first.
        runtime, threads: see `open_encoder`.

    Raises:
        ArtifactError: the bundle is missing or damaged.
    """

    def __init__(self, bundle: str | os.PathLike[str], runtime: Runtime = "auto", threads: int = 0) -> None:
        loaded = Bundle.load(bundle, lazy=True)
        self.answerer = Answerer(loaded, open_encoder(loaded, runtime, threads))

    def predict(
        self, frame: Any, k: int = 5, *, allow: Sequence[str] = (), deny: Sequence[str] = (),
        min_score: float | None = None, head: Space = "both",
    ) -> pd.DataFrame:  # fmt: skip
        """The best labels of each query: columns query, rank (int64, from 1), label, title, score (float64); queries in
        order, best label first.

        Args:
            frame: DataFrame with a text column `query` or `text`.
            k, min_score, head: see `answer.Request`.
            allow: uids of the only labels to choose from; empty: all. deny: uids of labels to leave out.

        Raises:
            DataError: no such column, or a request that cannot be answered; it names the request by its place.
        """
        import pandas as pd

        texts = frame[text_column(list(getattr(frame, "columns", [])), None, "the table")].tolist()
        requests = [Request(text, k, tuple(allow) or None, tuple(deny), min_score, head) for text in texts]
        rows = [
            (text, rank, *named)
            for text, one in zip(texts, self.answerer.answer(requests), strict=True)
            for rank, named in enumerate(zip(one.labels, one.titles, one.scores, strict=True), 1)
        ]
        table = pd.DataFrame(rows, columns=["query", "rank", "label", "title", "score"])
        return table.astype({"rank": "int64", "score": "float64"})
