"""The sections of params.yaml: every parameter, its type, bounds, default, what it does, and what conflicts with it.

`unidec.config` reads a file into them; everything else takes one section or plain arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from unidec.metric_names import metric_names

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Severity = Literal["error", "warn", "off"]
Mining = Literal["exact", "faiss"]
LossName = Literal["ds", "supcon", "infonce", "triplet", "bce", "hinge", "softtopk"]


def _known_metric(name: str) -> str:
    known = metric_names()
    if name not in known:
        expected = " or ".join(f"'{one}'" for one in known)
        text = "a metric of outputs/metrics.json: nDCG@5, PSP@3, coverage@10, tail/R@100, ..."
        raise PydanticCustomError("metric", "{text}", {"text": text, "expected": expected})
    return name


Metric = Annotated[str, AfterValidator(_known_metric)]


def _kept_kind(kind: object) -> object:
    instead = {"sq8": "pq", "hnsw-sq8": "pq or hnsw", "ivf-sq8": "ivf-pq"}.get(str(kind))
    if instead:
        raise PydanticCustomError("index_kind", "{text}", {"text": f"{instead}, which takes its place"})
    return kind


IndexKind = Annotated[Literal["flat", "pq", "hnsw", "ivf-pq"], BeforeValidator(_kept_kind)]


def key(default: Any, about: str) -> Any:
    """A parameter's default and what it does."""
    return Field(default, description=about)


class Conflict(NamedTuple):
    """Values that are right one by one and wrong together.

    Attributes:
        keys: their key paths with spaces between, the one to blame first.
        what: what is wrong. fix: what to set.
    """

    keys: str
    what: str
    fix: str


class Section(BaseModel):
    """A frozen group of parameters that refuses keys it does not know."""

    # strict: "3" is no number and true is no count; a mistyped value must not pass as another
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[Conflict]:
        """Every conflict between the values of the section."""
        yield from ()


class Data(Section):
    """Where the raw data is and how queries are split."""

    path: str = key("data/raw/lf-debian", "folder of raw files")
    format: Literal["auto", "xmc-json", "xmc-text", "pecos", "beir", "tables"] = key("auto", "its layout")
    validation_share: Annotated[float, Field(ge=0, lt=0.5)] = key(0.05, "of the training queries, to select models")
    validation_sample: CountOrZero = key(0, "without a validation split: training queries that draw the curves")
    test_share: Annotated[float, Field(ge=0, lt=0.9)] = key(0.2, "of the queries, where the data has no test split")
    split_seed: Seed = key(0, "seed of both splits")
    propensity_a: Positive = key(0.55, "A of the inverse propensities: a property of the data set")
    propensity_b: NonNegative = key(1.5, "B of the inverse propensities")


class RawBounds(Section):
    """What raw files may hold; ingest refuses more."""

    max_row_bytes: Annotated[int, Field(ge=1000, le=2**30)] = key(16 << 20, "bytes of a line or CSV row")
    max_text_chars: Count = key(1_000_000, "characters of a title or a content")
    max_unpack_ratio: Count = key(50, "times its own size that a compressed file may unpack to; 64 MB always")


class Validation(Section):
    """What `unidec data validate` allows: for each check the largest share of rows, and what
    happens beyond it: error stops before training, warn is reported, off: not checked."""

    empty_texts: Share = key(0.01, "share of the queries, and of the labels, whose text is empty")
    empty_texts_severity: Severity = key("error", "of a larger share")
    test_texts_in_train: Share = key(0.01, "share of the test queries whose text is a training query's too")
    test_texts_in_train_severity: Severity = key("error", "of a larger share")
    queries_without_positives: Share = key(0.5, "share of the queries")
    queries_without_positives_severity: Severity = key("error", "of a larger share")
    labels_without_training_points: Share = key(0.5, "share of the labels")
    labels_without_training_points_severity: Severity = key("error", "of a larger share")
    label_texts_given_twice: Share = key(0.2, "share of the labels whose text another label has")
    label_texts_given_twice_severity: Severity = key("error", "of a larger share")
    filtered_positives: Share = key(0.01, "share of the positives that are also filter pairs")
    filtered_positives_severity: Severity = key("warn", "of a larger share")


class Tokens(Section):
    """How texts become token ids."""

    text: Literal["title", "title+content"] = key("title", "short-text or long-text task")
    max_length: Annotated[int, Field(ge=3, le=512)] = key(32, "tokens a text, special tokens included")


class LabelGraph(Section):
    """The label graph: soft targets of label texts as queries (Gandalf)."""

    kind: Literal["cooccurrence", "random-walk", "glas", "self"] = key(
        "cooccurrence", "shared queries; the same by random walks; symmetric (GLaS); none"
    )
    threshold: Share = key(0.1, "delta: weaker soft targets become 0")
    share: Annotated[float, Field(gt=0, le=1)] = key(1.0, "share of the labels whose text is a query")
    tail_first: bool = key(False, "with a share below 1: the rarest labels, else a random draw")


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens, both side by side, or convolutions over tokens (InceptionXML)."""

    name: str = key("all-MiniLM-L6-v2", "transformer: an alias, a local folder or a hub name")
    kind: Literal["transformer", "bag", "both", "inception"] = key(
        "both", "which encoders, concatenated; inception: InceptionXML's layers over the bag's tokens"
    )
    pooling: Literal["mean", "cls"] = key("mean", "how the transformer's token vectors become one")
    trainable_layers: Annotated[int, Field(ge=-1)] = key(0, "top layers that train; 0: frozen; -1: all")
    bag_dropout: Share = key(0.0, "share of a text's tokens dropped from the bag in training")
    bag_words: Annotated[int, Field(ge=0, le=2**24)] = key(0, "rows of the bag for hashed words; 0: none")
    bag_head: CountOrZero = key(0, "tokens at a text's start (a title) with a bag of their own; 0: none")
    transformer_tokens: CountOrZero = key(0, "tokens at a text's start that the transformer reads; 0: all")
    inception_tokens: Annotated[int, Field(ge=1, le=512)] = key(16, "tokens at a text's start that inception reads")
    dropout: BelowOne = key(0.0, "dropout of the encoder's output")
    residual: bool = key(False, "a residual network over a bag or a frozen transformer")
    start: str = key("", "exported model folder whose encoder and heads are the start; empty: none")
    frozen: bool = key(False, "nothing of the encoder trains: every text's vector is computed once")

    @property
    def has_transformer(self) -> bool:
        """One of its parts is a transformer."""
        return self.kind in ("transformer", "both")

    @property
    def unit_vectors(self) -> bool:
        """Default of whether the transformer's vectors have unit length: not if it trains alone; beside a bag both do,
        so that neither drowns the other."""
        return self.trainable_layers == 0 or self.kind != "transformer"

    def conflicts(self) -> Iterator[Conflict]:
        if not self.has_transformer and (self.trainable_layers != 0 or self.pooling == "cls"):
            what, fix = "without a transformer there are no layers to train and no pooling", "encoder.kind: both"
            keys = "encoder.trainable_layers encoder.pooling encoder.kind"
            yield Conflict(keys, what, f"{fix}, or encoder.trainable_layers: 0 and encoder.pooling: mean")
        if self.kind != "both" and self.transformer_tokens:
            fix = "tokens.max_length, which is of all parts, or encoder.kind: both"
            yield Conflict("encoder.transformer_tokens encoder.kind", "only one part reads the texts", fix)
        if self.kind == "inception" and (self.bag_words or self.bag_head):
            what, fix = "inception reads a text's tokens alone", "encoder.bag_words: 0 and encoder.bag_head: 0"
            yield Conflict("encoder.bag_words encoder.bag_head encoder.kind", what, f"{fix}, or encoder.kind: bag")
        if self.frozen and self.trainable_layers != 0:
            fix = "encoder.trainable_layers: 0, or encoder.frozen: false"
            yield Conflict("encoder.frozen encoder.trainable_layers", "a frozen encoder has no layers that train", fix)


class Model(Section):
    """Heads and classifier table."""

    heads: Literal["both", "de", "clf"] = key("both", "dual encoder, classifier, or both (UniDEC)")
    projection: bool = key(True, "each head is a trained layer over the encoder; false: its vector as it is")
    normalize: bool = key(True, "the dual encoder's vectors have unit length")
    dim: Count = key(384, "width of each head; without projection the encoder's")
    dropout: BelowOne = key(0.1, "dropout of both heads")
    auxiliary: CountOrZero = key(0, "labels a cluster, which adds a learnt vector to their embeddings (DEXA); 0: none")
    surrogate: CountOrZero = key(0, "labels a cluster, of which the classifier learns one row (Astec); 0: none")
    levels: list[Count] = key(
        [],
        "labels a cluster at each level of a label tree, coarse to fine, a classifier each (CascadeXML); empty: none",
    )
    clf_init: Literal["xavier", "normal", "label_embedding"] = key("label_embedding", "start of Psi")
    clf_residual: bool = key(False, "a label's classifier row is its text's embedding plus a free vector (SiameseXML)")
    clf_gates: bool = key(False, "learnt gates weigh the text and the free vector of such a row (DECAF)")
    clf_graph: bool = key(False, "such a row has the texts of related labels too, by the label graph (ECLARE)")
    clf_queries: CountOrZero = key(
        0, "training queries of each label whose mean joins such a row in a step (GraphSAGE)"
    )
    clf_bias: bool = key(False, "a bias for each label in the classifier's scores")
    clf_dropout: BelowOne = key(0.0, "dropout of the classifier's rows in training")
    clf_dtype: Literal["fp32", "bf16"] = key("fp32", "of the classifier's rows; bf16: stochastic rounding")
    temperature: Positive = key(1 / 18, "tau of both heads")
    learn_temperature: bool = key(False, "train tau, one for each head")

    @property
    def labels_a_cluster(self) -> int:
        """Of the (finest) clusters of labels; 0: labels are not clustered."""
        return self.auxiliary or self.surrogate or min(self.levels, default=0)

    def conflicts(self) -> Iterator[Conflict]:
        if sorted(set(self.levels), reverse=True) != self.levels:
            fix = "fewer labels a cluster at each next level, as in [32, 4]"
            yield Conflict("model.levels", "levels of a label tree go from coarse to fine", fix)


class Pool(Section):
    """Batches, and the labels on which each batch's loss is computed."""

    batches: Literal["clustered", "random"] = key("clustered", "batches of similar queries, or random")
    batch_size: Count = key(512, "queries a batch; a cluster has N / 2^depth of them")
    batch_fit: Literal["most", "least"] = key("most", "batch_size is a cluster's most queries, or (papers) its least")
    cluster_start: CountOrZero = key(0, "queries a cluster at first, then doubled (NGAME); 0: a batch")
    cluster_doublings: list[CountOrZero] = key([], "epochs from which clusters double; empty: each refresh")
    beta: Count = key(3, "positives sampled for each query")
    positives: Literal["uniform", "tail"] = key("uniform", "drawn alike, or by their inverse propensity")
    eta: CountOrZero = key(6, "hard negatives sampled for each query")
    shortlist: CountOrZero = key(
        0, "clusters of each of model.levels kept for a query: hard negatives are their labels; 0: the nearest labels"
    )
    mining: Mining = key("exact", "search for hard negatives; faiss: approximate, for millions of labels without a GPU")
    size: CountOrZero = key(3000, "at most so many labels in a pool; 0: no limit")
    fill: bool = key(False, "further positives of the batch's queries take the room left in a pool; size 0: all")
    de_labels: Literal["pool", "all"] = key("pool", "labels of the encoder's loss; all: DEXML")
    clf_labels: Literal["pool", "all"] | Count = key(
        "pool", "the same for the classifier; N: a pool filled up to N by random labels, all if there are at most 2 N"
    )
    gandalf: bool = key(False, "label texts train as queries too, the label graph as soft targets (Gandalf)")
    simcse: bool = key(False, "each text, of a query or a label, has itself as its only positive (SimCSE)")
    refresh: Count = key(5, "T: epochs between two refreshes of clusters and hard negatives")

    def conflicts(self) -> Iterator[Conflict]:
        if 0 < self.size < self.batch_size:
            what = "the pool is smaller than the batch: queries without a positive in it drop out of the loss"
            fix = "pool.size at least pool.batch_size (the papers: 2 to 5 times), or 0 for no limit"
            yield Conflict("pool.size pool.batch_size", what, fix)


class Loss(Section):
    """Losses on pool logits, reductions and weights."""

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = key("psl", "which positives take part")
    de: LossName = key("ds", "dual encoder's loss")
    clf: LossName = key("ds", "classifier's loss")
    clf_bce: NonNegative = key(1.0, "weight of the auxiliary BCE on the classifier")
    bce_normalise: Literal["rows", "entries"] = key("entries", "mean over entries, or sum over a query's pool")
    balance: Share = key(0.5, "lambda: weight of the dual encoder's loss; the classifier has the rest")
    de_forward: Share = key(0.5, "lambda_D: weight of query to label; label to query has the rest")
    clf_forward: Share = key(0.5, "lambda_C: the same for the classifier")
    margin: NonNegative = key(0.3, "gamma of the triplet loss (cosine units), and of the squared hinge")
    triplet_negatives: Literal["all", "hardest", "softmax"] = key(
        "all", "of the triplet loss; softmax: the hardest, weighted by a softmax (NGAME)"
    )
    triplet_top: Count = key(1, "how many are the hardest")
    topk: Count = key(5, "k of the soft top-k loss")
    weights: Literal["none", "propensity"] = key("none", "of positives: 1, or their inverse propensity")
    mixup: Literal["none", "queries", "labels"] = key("none", "mix queries with others, or with a label's text (MixUp)")
    mixup_alpha: Positive = key(0.4, "of the Beta distribution of a mixture's shares; small: nearly unmixed")


class Optim(Section):
    """Optimisers and schedule."""

    epochs: Count = key(20, "passes over the training queries")
    lr_encoder: Positive = key(1e-4, "learning rate of the transformer")
    lr_bag: Positive = key(1e-3, "learning rate of the bag of tokens")
    lr_heads: Positive = key(2e-4, "learning rate of both heads")
    lr_clf: NonNegative = key(1e-3, "learning rate of the classifier table; 0: rows stay as they start")
    clf_state: Literal["adam", "adagrad", "sgd", "momentum", "adamw"] = key(
        "adam", "the classifier's optimiser; adamw updates all rows in each step, others those of the pool"
    )
    clf_decay: NonNegative = key(0.0, "weight decay of the classifier's rows, by adamw and momentum")
    warmup_epochs: NonNegative = key(1.0, "epochs of linear warm-up before the cosine")
    patience: CountOrZero = key(
        0, "rounds without a better validation nDCG@5 after which one last round ends training; 0: all epochs"
    )
    budget_minutes: NonNegative = key(
        0.0, "with patience: processor minutes (GPU: wall minutes) that training and refreshes may take; 0: no limit"
    )
    weight_decay: NonNegative = key(0.05, "of the transformer's and heads' matrices")
    clip_norm: NonNegative = key(1.0, "gradient norm limit; 0: none")
    encode_chunk: CountOrZero = key(0, "texts whose activations are held at once, gradients cached; 0: all")
    precision: Literal["auto", "fp32", "bf16"] = key("auto", "auto: bf16 where it is faster")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            what, fix = "the warm-up is longer than the training", "optim.warmup_epochs well below optim.epochs"
            yield Conflict("optim.warmup_epochs optim.epochs", what, fix)
        if self.budget_minutes > 0 and self.patience == 0:
            what, fix = "only a training with patience can end early", "optim.patience: 2, or optim.budget_minutes: 0"
            yield Conflict("optim.budget_minutes optim.patience", what, fix)
        if self.clf_decay > 0 and self.clf_state not in ("adamw", "momentum"):
            what, fix = (
                "this optimiser has no weight decay",
                "optim.clf_state: adamw or momentum, or optim.clf_decay: 0",
            )
            yield Conflict("optim.clf_decay optim.clf_state", what, fix)


class Index(Section):
    """The label index and how both heads' scores are blended."""

    kind: IndexKind = key("flat", "faiss kind; `unidec index tune` measures all")
    space: Literal["both", "de", "clf"] = key("both", "which head's vectors are searched")
    hnsw_links: Count = key(32, "M of HNSW")
    hnsw_build: Count = key(200, "efConstruction of HNSW")
    hnsw_search: Count = key(200, "efSearch of HNSW")
    ivf_lists: CountOrZero = key(0, "lists of ivf; 0: 16 x sqrt(labels), of at least 64 labels each")
    ivf_probes: CountOrZero = key(0, "lists a search looks into; 0: a 12th of them")
    pq_dims: Count = key(4, "dimensions that share a code of 4 bits in pq and ivf-pq")
    rescore: Count = key(8, "candidates for each result that a compressed kind scores exactly")
    clf_weight: Positive | Literal["auto"] = key(1.0, "of the classifier's score; auto: tuned on validation")
    clf_normalize: bool = key(True, "cosine of the classifier (the paper), or its raw score")
    knn_weight: NonNegative | Literal["auto"] = key(0.0, "of the votes of similar training queries; 0: none")
    knn_neighbours: Count = key(100, "training queries that vote")
    knn_by: Literal["model", "words"] = key("model", "similar by the model's vectors, or by TF-IDF")
    knn_head: CountOrZero = key(
        0, "first tokens, as a title, whose words are compared alone too, for the fusion; 0: none"
    )
    fusion: bool = key(False, "rank by a small network trained on the validation split, where it gains; for both heads")
    objective: Literal["nDCG@5", "P@1", "PSP@5", "R@100"] = key("nDCG@5", "what weights and fusion are chosen by")

    def conflicts(self) -> Iterator[Conflict]:
        if self.fuses and self.knn_by != "words":
            what = "fusion reads words that queries share"
            yield Conflict("index.fusion index.knn_by", what, "index.knn_by: words, or index.fusion: false")
        if self.knn_head and not self.fuses:
            yield Conflict("index.knn_head index.fusion", "only a fusion reads first words", "index.knn_head: 0")

    @property
    def fuses(self) -> bool:
        """A fusion ranks: it reads both heads."""
        return self.fusion and self.space == "both"


class Run(Section):
    """Where training runs and how often it saves: nothing here changes what is learnt."""

    devices: Count = key(1, "processes that train together, a GPU each (more than 1: torchrun)")
    restarts: CountOrZero = key(0, "restarts from the newest checkpoint after a process died")
    table_place: Literal["device", "host", "disk"] = key("device", "of classifier rows and optimiser state")
    checkpoint_minutes: NonNegative = key(5.0, "minutes between two checkpoints within a round; 0: only at its end")
    checkpoint_steps: CountOrZero = key(0, "the same in steps; 0: by the clock only")
    recompute: bool = key(False, "activations again in backward: less memory, a third more work")
    compile: bool = key(False, "torch.compile of the transformer: a minute or two at the start, faster steps on a GPU")
    check_memory: bool = key(True, "refuse to start what by `unidec plan` does not fit")


class Source(Section):
    """Where a retraining fetches new raw data from, into `data.path`; secrets are never here."""

    kind: Literal["none", "folder", "files", "dvc"] = key("none", "where new raw data comes from")
    path: str = key("", "the folder, or DVC's target: data/raw/mine or data/raw/mine.dvc")
    queries: str = key("", "files: table of queries (csv, tsv, parquet, jsonl)")
    labels: str = key("", "files: table of labels")
    pairs: str = key("", "files: table of pairs")
    revision: str = key("", "dvc: git revision of an import; empty: as in the import")
    secrets: dict[str, str] = key({}, "environment variable: Prefect secret block")

    def conflicts(self) -> Iterator[Conflict]:
        if self.kind in ("folder", "dvc") and not self.path:
            fix = "source.path: the folder, or DVC's target; or source.kind: none"
            yield Conflict("source.path source.kind", "there is nowhere to fetch from", fix)
        if self.kind == "files" and not (self.queries and self.labels and self.pairs):
            keys = "source.queries source.labels source.pairs source.kind"
            yield Conflict(keys, "three tables make a data set", "all three tables, or source.kind: none")


class Warm(Section):
    """A training that starts from an earlier model (data/start.json names it)."""

    epochs: Count = key(4, "passes over the training queries")
    lr_scale: Positive = key(0.7, "times every learning rate")
    warmup_epochs: NonNegative = key(0.25, "epochs of linear warm-up")
    keep: Share = key(0.25, "share of a classifier row that is taken over; the rest begins as the label's text")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            what, fix = "the warm-up is longer than the training", "warm.warmup_epochs well below warm.epochs"
            yield Conflict("warm.warmup_epochs warm.epochs", what, fix)


class Retrain(Section):
    """What a retraining does around training."""

    start: Literal["auto", "warm", "cold"] = key("auto", "from the champion, or from nothing; auto: see cold_every")
    cold_every: CountOrZero = key(10, "auto: cold after so many warm starts in a row; 0: only the first")
    promote: bool = key(True, "a challenger that passes the gate becomes champion")
    push: bool = key(False, "`dvc push` what was made")
    commit: Literal["none", "commit", "tag"] = key("none", "dvc.lock and metrics in git, and a tag")


class Gate(Section):
    """What a challenger must show before it becomes champion; points are percent points on the test split."""

    metric: Metric = key("nDCG@5", "the metric that decides")
    margin: float = key(0.0, "points that the challenger must be ahead of the champion")
    confidence: BelowOne = key(0.9, "of the paired bootstrap that it is ahead by at least the margin; 0: not asked for")
    tolerance: NonNegative = key(0.5, "points that a guarded metric may lose")
    guarded: list[Metric] = key(["P@1", "PSP@5", "tail/R@10", "coverage@5"], "metrics that may not lose more than that")
    max_latency_ms: NonNegative = key(
        0.0, "95th percentile of one query's answer in a fresh process, by the wall clock; 0: no limit"
    )
    max_latency_ratio: NonNegative = key(2.0, "the same in processor time, times the champion's; 0: none")
    max_megabytes: NonNegative = key(0.0, "size of the bundle; 0: no limit")
    max_size_ratio: NonNegative = key(1.5, "the same, times the champion's; 0: none")
    max_load_seconds: NonNegative = key(0.0, "until a fresh process answers, by the wall clock; 0: no limit")
    max_load_ratio: NonNegative = key(2.0, "the same in processor time, times the champion's; 0: none")
    probes: Count = key(64, "queries that a fresh process must answer")
    allow_dirty: bool = key(False, "promote also what was made with uncommitted changes")

    def conflicts(self) -> Iterator[Conflict]:
        if self.confidence > 0 and "coverage@" in self.metric:
            what = "coverage belongs to all queries together: there is no bootstrap over them"
            fix = "gate.confidence: 0, or another gate.metric with coverage among gate.guarded"
            yield Conflict("gate.confidence gate.metric", what, fix)


class Drift(Section):
    """How far data may move from the version that the champion was trained on; shares from 0 to 1."""

    warn_change: NonNegative = key(0.1, "relative change of a count, a length or a share that warns")
    stop_change: NonNegative = key(0.5, "... that stops a retraining")
    warn_distance: Share = key(0.1, "distance of two distributions (Jensen-Shannon) that warns")
    stop_distance: Share = key(0.5, "... that stops a retraining")
    warn_shift: NonNegative = key(
        0.2, "shift of a window's mean embedding that warns, in standard deviations of single queries"
    )
    warn_low_score: Share = key(0.2, "share of a window's queries with a low top score that warns")
    low_score_quantile: Annotated[float, Field(gt=0, lt=1)] = key(
        0.05, "top scores below this quantile of the validation queries' count as low"
    )
    min_window: Count = key(200, "queries that a window needs to be judged")


class Serve(Section):
    """`unidec serve`: where it listens, and what it bounds."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all, then set an API key")
    port: Annotated[int, Field(ge=0, le=65535)] = key(8080, "0: any free one")
    hosts: list[str] = key(
        [],
        "names by which it may be asked (header Host), beside addresses and localhost; empty: no others on "
        "127.0.0.1 without an API key, else any",
    )
    max_body_bytes: Count = key(1_000_000, "of a request")
    max_queries: Count = key(256, "of a request")
    max_query_chars: Count = key(8000, "of a query")
    max_k: Count = key(100, "labels for each query")
    max_filter_labels: Count = key(10_000, "in a request's lists of allowed and denied labels")
    max_connections: Count = key(1024, "at once; beyond them 503")
    queue_queries: Count = key(1024, "queries that may wait; beyond them 503 with Retry-After")
    timeout_seconds: Positive = key(5.0, "a request that waits longer gets 503")
    batch_queries: Count = key(32, "queries answered together at most")
    batch_wait_ms: NonNegative = key(
        0.0,
        "an idle model waits so long for as many queries as came together before, one alone never. 0: "
        "queries gather while it works, which is as good on a CPU; on a GPU 1 or 2 may pay",
    )
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = key(
        "auto", "what encodes queries; auto: the fastest that keeps quality (docs/serving.md)"
    )
    threads: CountOrZero = key(0, "of encoder and search; 0: what the machine has")
    cache_queries: CountOrZero = key(10_000, "answers kept for repeated queries; 0: none")
    follow_seconds: NonNegative = key(10.0, "between two looks at the alias in the registry; 0: never")
    keep_previous: bool = key(True, "keep the model before in memory, to swap back at once")
    api_key_env: str = key(
        "UNIDEC_API_KEY", "environment variable with the API key; none is asked for where it is not set"
    )
    feedback: Annotated[str, Field(pattern=r"(^|\.jsonl)$")] = key(
        "", "file (.jsonl) that the page's buttons `relevant` and `not relevant` append to; empty: no buttons"
    )
    feedback_bytes: Count = key(10_000_000, "of that file; what comes when it is full is refused")


class Tracking(Section):
    """Names under which MLflow keeps runs and models; the tracking server is the usual environment variable."""

    experiment: str = key("unidec", "MLflow experiment")
    model_name: str = key("unidec", "registered model")
