"""Sections of params.yaml: the model, its batches and losses, and how it is trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints
from typing_extensions import TypedDict

from unidec.config.section import (
    BelowOne,
    Conflict,
    Count,
    CountOrZero,
    Decides,
    NonNegative,
    Positive,
    Section,
    Share,
)

Mining = Literal["auto", "exact", "faiss"]
Prompt = Annotated[str, StringConstraints(max_length=4000)]
Pooling = Literal["auto", "mean", "cls", "max", "last", "weighted_mean"]
LossName = Literal["ds", "supcon", "infonce", "triplet", "bce", "hinge", "softtopk"]


class Lora(TypedDict, total=False):
    """Adapters that train in place of a transformer's weights: {} trains the weights.

    Attributes:
        rank: of the adapters; 0: none. alpha: their products count alpha / rank; default: 2 * rank.
        targets: last names of the linear layers that have one; default: all.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    rank: Annotated[int, Field(ge=0, le=1024)]
    alpha: Positive
    targets: list[str]


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens (a weighted sum of their embeddings), both
    concatenated, or convolutions over token embeddings (InceptionXML).
    """

    decides = ("training",)

    name: Annotated[str, Decides("checks", "tokens", "training")] = "all-MiniLM-L6-v2"
    """transformer: an alias, a local folder or a name on the Hugging Face hub"""
    kind: Annotated[
        Literal["transformer", "bag", "both", "inception"], Decides("checks", "tokens", "training")
    ] = "both"
    """encoder: a transformer, a bag of tokens, both concatenated, or InceptionXML's convolutions"""
    pooling: Pooling = "auto"
    """pooling of the transformer's token vectors; auto: as set in its folder, else mean"""
    width: CountOrZero = 0
    """leading dimensions of the transformer's vector that are used (Matryoshka); 0: as set in its
    folder, else all
    """
    query_prompt: Annotated[Prompt, Decides("tokens", "training")] = "auto"
    """text that the transformer reads before each query; auto: as set in its folder; empty: none"""
    label_prompt: Annotated[Prompt, Decides("tokens", "training")] = "auto"
    """text that the transformer reads before each label text; auto and empty: as for queries"""
    trainable_layers: Annotated[int, Field(ge=-1)] = 0
    """top transformer layers to train; 0: none; -1: everything"""
    lora: Lora = {}
    """train adapters instead of the trainable layers: {rank: 16, alpha: 32, targets: []}"""
    bag_dropout: Share = 0.0
    """share of a text's tokens dropped from the bag during training"""
    bag_words: Annotated[int, Field(ge=0, le=2**24)] = 0
    """embedding rows for hashed multi-token words; 0: none"""
    bag_head: CountOrZero = 0
    """first tokens of a text (its title) that are also summed separately; 0: none"""
    transformer_tokens: Annotated[CountOrZero, Decides("checks", "training")] = 0
    """number of first tokens of a text that the transformer reads; 0: all"""
    inception_tokens: Annotated[int, Field(ge=1, le=512)] = 16
    """first tokens of a text that inception reads"""
    dropout: BelowOne = 0.0
    """dropout of the encoder's output"""
    residual: bool = False
    """add a trained residual network on top of a bag or a frozen transformer"""
    start: str = ""
    """folder of an exported model whose encoder and heads are loaded first; empty: none"""
    frozen: bool = False
    """do not train the encoder; each text is then encoded only once"""

    @property
    def has_transformer(self) -> bool:
        """Whether one of the encoders is a transformer."""
        return self.kind in ("transformer", "both")

    @property
    def unit_vectors(self) -> bool:
        """Whether the transformer's vectors are normalised to unit length: not if it is trained and
        there is no bag. Beside a bag both parts have unit length, so that neither dominates.
        """
        return self.trainable_layers == 0 or self.kind != "transformer"

    def conflicts(self) -> Iterator[Conflict]:
        if self.lora.get("rank") and (not self.has_transformer or self.trainable_layers == 0):
            yield Conflict(
                "encoder.lora encoder.trainable_layers encoder.kind",
                "adapters belong to the trainable layers of a transformer, and there are none",
                "encoder.trainable_layers: -1, or encoder.lora: {}",
            )


class Model(Section):
    """The heads (dual encoder, classifier) and the table of classifier rows, one row per label."""

    decides = ("training",)

    heads: Literal["both", "de", "clf"] = "both"
    """heads to train: dual encoder, classifier, or both (UniDEC)"""
    projection: bool = True
    """each head is a trained layer over the encoder's vector; false: that vector itself"""
    query_head: bool = False
    """queries have their own layer in the dual encoder; it starts as a copy of the labels'"""
    normalize: bool = True
    """normalise the dual encoder's vectors to unit length"""
    dim: Count = 384
    """dimension of each head's vectors; without projection it must be the encoder's dimension"""
    dropout: BelowOne = 0.1
    """dropout of both heads"""
    auxiliary: CountOrZero = 0
    """labels per cluster that share an added learnt vector (DEXA); 0: no such vector"""
    surrogate: CountOrZero = 0
    """labels per cluster that share a classifier row (Astec); 0: one row per label"""
    levels: list[Count] = []
    """labels per cluster at each level of a label tree, coarse to fine (CascadeXML); empty: no
    label tree
    """
    clf_init: Literal["xavier", "normal", "label_embedding"] = "label_embedding"
    """initial values of the classifier's rows: random, or the embeddings of the label texts"""
    clf_residual: bool = False
    """a classifier row is its label text's embedding plus a learnt vector (SiameseXML)"""
    clf_gates: bool = False
    """with clf_residual: learnt gates scale text embedding and learnt vector (DECAF)"""
    clf_graph: bool = False
    """with clf_residual: add texts of related labels, from the label graph (ECLARE)"""
    clf_queries: CountOrZero = 0
    """with clf_residual: training queries whose mean joins a row (GraphSAGE); 0: none"""
    clf_bias: bool = False
    """add a learnt bias per label to the classifier's scores"""
    clf_dropout: BelowOne = 0.0
    """dropout of the classifier's rows during training"""
    clf_cosine: bool = False
    """the classifier's loss is on cosines of its rows and the queries (NGAME)"""
    clf_dtype: Literal["fp32", "bf16"] = "fp32"
    """type of the classifier's rows; bf16: with stochastic rounding"""
    temperature: Positive = 1 / 18
    """tau: the scores of both heads are divided by it in the loss"""
    learn_temperature: bool = False
    """train the temperature, one per head"""

    @property
    def labels_a_cluster(self) -> int:
        """Number of labels per cluster (with a label tree, at the finest level); 0: labels are not
        clustered.
        """
        return self.auxiliary or self.surrogate or min(self.levels, default=0)

    def conflicts(self) -> Iterator[Conflict]:
        if sorted(set(self.levels), reverse=True) != self.levels:
            yield Conflict(
                "model.levels",
                "the levels of a label tree must go from coarse to fine",
                "fewer labels per cluster at each next level, as in [32, 4]",
            )


class Pool(Section):
    """Batches of queries, and the pool: the labels on which the loss of a batch is computed."""

    decides = ("training",)

    batches: Literal["clustered", "random"] = "clustered"
    """batches of similar queries, or of random ones"""
    batch_size: Count = 512
    """queries per batch; clustered batches have N / 2^depth of the N training queries"""
    batch_fit: Literal["most", "least"] = "most"
    """pool.batch_size is an upper or (published code) a lower limit"""
    cluster_start: CountOrZero = 0
    """queries per cluster at first, later doubled (NGAME); 0: the batch size"""
    cluster_doublings: list[CountOrZero] = []
    """epochs at which the cluster size doubles; empty: at each refresh"""
    beta: Count = 3
    """positives sampled per query for the pool"""
    positives: Literal["uniform", "tail"] = "uniform"
    """how they are sampled: uniformly, or by inverse propensity"""
    eta: CountOrZero = 6
    """hard negatives sampled per query for the pool"""
    shortlist: CountOrZero = 0
    """with model.levels: best clusters per level whose labels are a query's hard negatives; 0: the
    nearest labels
    """
    mining: Mining = "auto"
    """search for hard negatives; faiss: approximate, on the CPU; auto: faiss above 50,000 labels,
    unless a GPU holds their vectors
    """
    size: CountOrZero = 3000
    """maximum number of labels in a pool; 0: no limit"""
    clf_beta: CountOrZero = 0
    """beta_C: further positives per query, in the classifier's pool only"""
    fill: bool = False
    """fill the pool up to pool.size (0: with all) with further positives of its queries"""
    de_labels: Literal["pool", "all"] = "pool"
    """labels in the dual encoder's loss; all: as in DEXML"""
    clf_labels: Literal["pool", "all"] | Count = "pool"
    """labels in the classifier's loss; N: the pool filled up to N with random labels (all if at
    most 2 N)
    """
    gandalf: bool = False
    """also train on label texts as queries, with soft targets of the label graph (Gandalf)"""
    gandalf_rows: Literal["all", "labels", "sample"] = "all"
    """with pool.gandalf: queries and label texts, label texts alone, or a random sample of both as
    large as the queries
    """
    simcse: bool = False
    """a text's only positive is itself, under another dropout mask (SimCSE)"""
    refresh: Count = 5
    """T: epochs between refreshes (clustering the queries and mining hard negatives)"""
    start_epoch: CountOrZero = 0
    """epochs of random batches without hard negatives, before the first refresh"""

    def conflicts(self) -> Iterator[Conflict]:
        if rest := self.start_epoch % self.refresh:
            epochs = self.start_epoch - rest
            yield Conflict(
                "pool.start_epoch pool.refresh",
                "clusters and hard negatives begin with a refresh",
                f"pool.start_epoch: {epochs} or {epochs + self.refresh}",
            )
        if 0 < self.size < self.batch_size:
            yield Conflict(
                "pool.size pool.batch_size",
                "the pool is smaller than the batch: queries without a positive in the pool are "
                "left out of the loss",
                "pool.size at least pool.batch_size (the papers: 2 to 5 times), or 0 for no limit",
            )


class Loss(Section):
    """Losses of both heads on the pool, and how they are combined and weighted."""

    decides = ("training",)

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = "psl"
    """how the losses of a query's positives combine: mean over those in the pool, their sum, sum
    divided by the number of all its positives, or one positive only
    """
    de: LossName = "ds"
    """the dual encoder's loss (docs/training.md)"""
    clf: LossName = "ds"
    """the classifier's loss (docs/training.md)"""
    clf_bce: NonNegative = 1.0
    """weight of an additional BCE loss on the classifier; 0: none"""
    bce_normalise: Literal["rows", "entries", "sum"] = "entries"
    """BCE and hinge: sum over the labels of a query's pool, mean over all query-label entries, or
    sum over them (Renee)
    """
    balance: Share = 0.5
    """lambda: weight of the dual encoder's loss; the classifier's loss has 1 - lambda; both are
    means over queries and labels
    """
    de_forward: Share = 0.5
    """lambda_D: the dual encoder's query-to-label weight; label-to-query has the rest"""
    clf_forward: Share = 0.5
    """lambda_C: the classifier's query-to-label weight; label-to-query has the rest"""
    margin: NonNegative = 0.3
    """gamma: margin of the triplet loss (in cosine units) and of the squared hinge"""
    triplet_negatives: Literal["all", "hardest", "softmax"] = "all"
    """negatives of the triplet loss: all, the hardest, or the hardest weighted by a softmax (NGAME)
    """
    triplet_top: Count = 1
    """number of hardest negatives that the triplet loss uses"""
    triplet_positives: CountOrZero = 0
    """number of hardest positives that the triplet loss pairs with them (NGAME's classifier); 0:
    the positives of loss.reduction
    """
    topk: Count = 5
    """k of the soft top-k loss"""
    widths: list[Count] = []
    """leading dimensions of the heads that are also trained on their own (Matryoshka), as in [64,
    128, 256]; index.width can be one of them
    """
    weights: Literal["none", "propensity"] = "none"
    """weights of positives: 1, or their inverse propensity"""
    mixup: Literal["none", "queries", "labels"] = "none"
    """mix queries with others, or with a label's text (MixUp)"""
    mixup_alpha: Positive = 0.4
    """alpha of the Beta distribution of mixing weights; small values mix little"""
    synonyms: BelowOne = 0.0
    """share of a query's tokens that a step replaces by similar ones (synonym replacement)"""


class Teacher(Section):
    """Scores that both heads learn too (knowledge distillation): those of an earlier model, or what
    words say of the training queries.
    """

    decides = ("training",)

    bundle: str = ""
    """folder of an earlier model's bundle, with the same labels; empty: none"""
    words: bool = False
    """train the heads to rank as the word network does, which leaves out the query itself"""
    weight: Positive = 1.0
    """weight of the teacher's loss beside each head's own"""
    temperature: Positive = 1 / 18
    """the scores of teacher.bundle are divided by it"""
