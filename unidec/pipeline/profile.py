"""The training profile that travels in a bundle: what its data looked like, and what it answered held-out queries."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unidec.config import Params
from unidec.data.profile import VERSION, profile_dataset
from unidec.evaluation.drift import served_facts
from unidec.pipeline.ranking import Blend, Ranking
from unidec.retrieval.bundle_folder import read_info
from unidec.retrieval.fusion import FEWEST_CANDIDATES
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.neighbours import Candidates, Neighbours, candidate_keys
from unidec.retrieval.scoring_space import pair_scores

if TYPE_CHECKING:
    from unidec.model.unidec import UniDEC

KEY = "profile"
"""Its key in the card of bundle.json."""


def training_profile(
    params: Params, model: UniDEC, ranking: Ranking, index: LabelIndex, blend: Blend, neighbours: Neighbours | None
) -> dict[str, Any]:
    """`profile_dataset` of the data set; "served": vectors in the searched space and the best label's score, as
    `Bundle.rank` gives it, nothing excluded, of the validation queries (None without any).

    Args:
        ranking: of the validation split. index, blend, neighbours: as the bundle serves them.
    """
    settings = params.index
    profile = profile_dataset(ranking.dataset, model.tokenizer_folder, model.max_length, params.tokens.text)
    space, normalize = settings.space, settings.clf_normalize
    query, scores = ranking.queries(space, blend.clf_weight, normalize), np.zeros((0, 1), dtype=np.float32)
    if not len(query):
        pass
    elif blend.fusion is not None and blend.reader is not None:
        words, none = ranking.words(neighbours), np.zeros(0, dtype=np.int64)
        assert ranking.query_de is not None and ranking.query_clf is not None and words is not None
        found = index.candidates(query, FEWEST_CANDIDATES)[1]
        evidence = blend.reader.read(ranking.query_de, ranking.query_clf, words, found, none)
        scores = blend.reader.rank(blend.fusion, evidence, 1).scores
    else:
        scores, rows = index.search(query, 1)
        if neighbours is not None and blend.knn_weight:
            votes = ranking.votes(neighbours, settings.knn_neighbours)
            candidates = Candidates.of(
                candidate_keys(rows, votes.key_N, votes.shape[1]),
                votes,
                lambda query_P, label_P: pair_scores(query, query_P, label_P, ranking.vectors, space, normalize),
            )
            scores = candidates.top(blend.knn_weight, 1).scores
    return profile | {"served": served_facts(query, scores[:, 0])}


def read_profile(bundle: Path) -> dict[str, Any] | None:
    """The profile in a bundle; None in one of before there were any, or of a version that this code does not know."""
    profile = read_info(bundle).card.get(KEY)
    return profile if isinstance(profile, dict) and profile.get("version") == VERSION else None
