"""What `bundle.json` holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from unidec.retrieval.index import IndexOptions, Kind
from unidec.retrieval.neighbours import Vote
from unidec.retrieval.scoring_space import Space

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Row = Annotated[int, Field(ge=0, le=1 << 40)]


class KnnInfo(BaseModel):
    """How similar training queries vote; see `neighbours.py`.

    Attributes:
        weight: of their votes beside the heads' score. neighbours: how many of them vote.
        vote: what a vote counts by its cosine. space: the head in whose space queries are compared.
        num_queries, num_pairs: training queries, and their labels in all.
        num_words: words and pairs of words that queries are compared by; None: by their vectors in `space`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    neighbours: Count
    vote: Vote
    space: Literal["de", "clf"]
    num_queries: Count
    num_pairs: Annotated[int, Field(ge=0, le=1 << 40)]
    num_words: Annotated[int, Field(ge=0, le=1 << 40)] | None = None


class BundleInfo(BaseModel):
    """`bundle.json`.

    Attributes:
        space: what is searched: "both", "de" or "clf".
        clf_weight: weight of the classifier's score beside the dual encoder's.
        clf_normalize: the classifier's score is a cosine.
        num_labels: L. dim: D, width of a head. width: width of the searched space.
        vectors: shape of each array under vectors/.
        index_kind, index_search: kind of index, and efSearch of HNSW.
        index_bytes: size of index.faiss.
        index_options: how it was built and is searched; None in a bundle of before format 4.
        index_nodes: nodes of a graph some of whose labels left (index_rows.npy); None: as many as labels.
        estimated: row ranges [begin, end) of labels that came after the training: their classifier rows and biases are
            estimates (label_change.py).
        knn: the votes of similar training queries; None where there are none.
        default_k, max_k: what a server offers.
        text: which text of a query the model was trained on: "title" or "title+content".
        dataset: name and sha256 of the data set. metrics: their summary. params: all parameters of the training.
        card: any further facts for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    space: Space
    clf_weight: Annotated[float, Field(allow_inf_nan=False)]
    clf_normalize: bool
    num_labels: Count
    dim: Count
    width: Count
    vectors: dict[Literal["de", "clf", "bias"], list[Count]]
    index_kind: Kind
    index_search: Count
    index_bytes: Count
    index_options: IndexOptions | None = None
    index_nodes: Count | None = None
    estimated: list[tuple[Row, Row]] = []
    knn: KnnInfo | None = None
    default_k: Count = 5
    max_k: Count = 100
    text: str
    dataset: dict[str, Any]
    metrics: dict[str, Any]
    params: dict[str, Any]
    card: dict[str, Any]
