"""The schema of `bundle.json`.

Legend: L labels, D width of a head.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from unidec.config.index_spec import Count, CountOrZero, IndexOptions, IndexSpec, Kind
from unidec.config.section import Stored
from unidec.data.dataset import Text
from unidec.model.arrays import heads_of
from unidec.ranking.fusion import Fusion
from unidec.ranking.heads import Space, width
from unidec.ranking.neighbours import Neighbours, Vote
from unidec.ranking.ranker import Calibration
from unidec.ranking.word_scores import WORD_FEATURES


class KnnInfo(Stored):
    """How similar training queries vote; see `neighbours.py`.

    Attributes:
        weight: weight of the votes, relative to the heads' score. neighbours: number of training
        queries that vote.
        vote: weight of a vote as a function of its cosine. space: the head in whose space queries
        are compared.
        num_queries, num_pairs: number of training queries, and of their (query, label) pairs.
        num_words: number of words and pairs of words by which queries are compared; None: compared
        in `space`.
        word_head: number of first tokens whose words are also compared separately; 0: none.
        spelt_words: words are identified by their spelling, not by their pieces; omitted if false.
    """

    weight: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    neighbours: Count
    vote: Vote
    space: Literal["de", "clf"]
    num_queries: Count
    num_pairs: CountOrZero
    num_words: CountOrZero | None = None
    word_head: CountOrZero = 0
    spelt_words: bool = Field(False, exclude_if=lambda is_spelt: not is_spelt)

    @classmethod
    def of(
        cls,
        voters: Neighbours,
        weight: float,
        neighbours: int = 100,
        space: Literal["de", "clf"] = "de",
    ) -> KnnInfo:
        """Describe the given training queries."""
        words = voters.words
        return cls(
            weight=float(weight),
            neighbours=neighbours,
            vote=voters.vote,
            space=space,
            num_queries=voters.num_queries,
            num_pairs=int(voters.labels_ML.nnz),
            num_words=None if words is None else words.num_features,
            word_head=0 if words is None else words.head,
            spelt_words=words is not None and words.spelt,
        )


class BundleInfo(Stored):
    """Content of `bundle.json`.

    Attributes:
        space: the searched space: "both", "de" or "clf".
        clf_weight: weight of the classifier's score, relative to the dual encoder's.
        clf_normalize: the classifier's score is a cosine.
        num_labels: L. dim: D, width of a head. width: width of the searched space.
        vectors: shape of each array under vectors/.
        index_kind, index_search: kind of index, and efSearch of HNSW.
        index_bytes: size of index.faiss.
        index_options: build and search options of the index.
        estimated: row ranges [begin, end) of labels added after the training, whose classifier rows
            and biases are estimates (label_change.py).
        knn: votes of similar training queries; None: none vote.
        fusion: ranks instead of the blend of heads and votes; None: the blend ranks.
        calibration: maps scores to probabilities; None: not fitted.
        text: text of a query on which the model was trained: "title" or "title+content".
        dataset: name and sha256 of the data set. metrics: summary of the metrics. params: all
        training parameters.
        card: further facts, shown in reports.
    """

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
    index_options: IndexOptions
    estimated: list[tuple[CountOrZero, CountOrZero]] = Field([])
    knn: KnnInfo | None = None
    fusion: Fusion | None = None
    calibration: Calibration | None = None
    text: Text
    dataset: dict[str, Any]
    metrics: dict[str, Any]
    params: dict[str, Any]
    card: dict[str, Any]
    # written by the first bundles of format 7, and ignored
    index_nodes: Any = Field(None, exclude=True)
    default_k: Any = Field(None, exclude=True)
    max_k: Any = Field(None, exclude=True)

    @model_validator(mode="after")
    def _check(self) -> BundleInfo:
        matrix = [self.num_labels, self.dim]
        shapes = {"de": matrix, "clf": matrix, "bias": [self.num_labels]}
        required = set(heads_of(self.space))
        names = self.vectors.keys()
        if not required <= names or not self.vectors.items() <= shapes.items():
            expected_names = ", ".join(sorted(required))
            raise ValueError(f"vectors {self.vectors}, expected {expected_names} of shape {matrix}")
        for begin, end in self.estimated:
            if not begin < end <= self.num_labels:
                raise ValueError(f"invalid rows of estimated labels: {begin} to {end}")
        expected = width(self.dim, self.space, self.clf_normalize, "bias" in names)
        if self.width != expected:
            raise ValueError(f"the space has width {self.width}, expected {expected}")
        self._check_votes()
        return self

    def _check_votes(self) -> None:
        knn = self.knn
        fusion = self.fusion
        by_words = knn is not None and knn.num_words is not None
        if fusion is not None and (self.space != "both" or not by_words):
            raise ValueError(
                "a fusion needs both heads, and training queries that are compared by words"
            )
        if knn is None:
            return
        if knn.space not in self.vectors:
            raise ValueError(
                f"training queries are compared in the space of a missing head: {knn.space}"
            )
        if (knn.vote == "ridge-labels") != by_words:
            raise ValueError("labels vote if, and only if, queries are compared by words")
        if not knn.weight and fusion is None:
            raise ValueError("the votes have weight 0, and there is no fusion that uses them")
        if fusion is not None and fusion.words is not None:
            num = len(fusion.words.mean)
            expected = len(WORD_FEATURES) * (2 if knn.word_head else 1)
            if num != expected:
                raise ValueError(f"the word network has {num} features, expected {expected}")

    def weights(self, head: Space = "both") -> dict[str, float]:
        """Weight of each part of the score by name (de, clf, knn), in the bundle's own ranking or
        in that by one head alone; parts that the score does not have are missing.
        """
        space = self.space if head == "both" else head
        weights: dict[str, float] = {space: 1.0}
        if space == "both":
            weights = {"de": 1.0, "clf": self.clf_weight}
        if self.knn is not None and head == "both":
            weights["knn"] = self.knn.weight
        return weights

    @property
    def index_spec(self) -> IndexSpec:
        """Kind and numbers of the index."""
        return IndexSpec(kind=self.index_kind, **self.index_options.model_dump())
