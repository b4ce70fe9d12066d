"""Example queries of a new label: its vectors are shifted towards them, and they vote for it like
training queries.

Legend: E example queries, S labels whose text is encoded, M training queries, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from unidec.data.csr import ones_at
from unidec.ranking.heads import unit_rows
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.sparse import Floats, Rows


def with_examples(text_SD: Floats | None, query_ED: Floats | None, place_E: Rows) -> Floats | None:
    """Turn each text's vector in the direction of the sum of text and example queries, each at unit
    length.

    Args:
        text_SD, query_ED: float32, output of the same head for texts and for their example queries;
            None if the model lacks the head.
        place_E: int64 [E], row of each query's text.

    Returns:
        float32 [S, D] with the lengths of `text_SD`; texts without a query are unchanged.
    """
    if text_SD is None or query_ED is None:
        return None
    sum_SD = unit_rows(text_SD)
    np.add.at(sum_SD, place_E, unit_rows(query_ED))
    length_S1 = np.linalg.norm(text_SD, axis=1, keepdims=True)
    has_query_S = np.bincount(place_E, minlength=len(text_SD)) > 0
    return np.where(has_query_S[:, None], length_S1 * unit_rows(sum_SD), text_SD)


def with_example_voters(
    voters: Neighbours, texts: Sequence[str], label_E: Rows, compared_E: Any
) -> Neighbours:
    """Add example queries to the training queries that vote.

    If an example has the text of a training query, its label is added to that query; the query's
    other labels then count as co-occurring.

    Args:
        texts: of the E examples. label_E: int64 [E], label row of each example.
        compared_E: their vectors or words (`Voting.compared`).
    """
    row_E = pc.index_in(pa.array(texts, pa.large_string()), voters.titles)
    row_E = row_E.fill_null(-1).to_numpy().astype(np.int64)
    new_N = np.flatnonzero(row_E < 0)
    num_voters = voters.num_queries + len(new_N)
    row_E[new_N] = np.arange(voters.num_queries, num_voters)
    more_ML = ones_at((row_E, label_E), (num_voters, voters.num_labels))
    labels_ML = voters.labels_ML.copy()
    labels_ML.resize(more_ML.shape)
    uids = [f"example {number + 1}" for number in new_N.tolist()]
    titles = [texts[number] for number in new_N.tolist()]
    return voters.with_queries(compared_E[new_N], labels_ML + more_ML, uids, titles)
