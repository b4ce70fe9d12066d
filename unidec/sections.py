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
    """Values that are each valid but conflict with each other.

    Attributes:
        keys: their key paths, separated by spaces; the one to blame first.
        what: what is wrong. fix: what to set.
    """

    keys: str
    what: str
    fix: str


class Section(BaseModel):
    """A frozen group of parameters that rejects unknown keys."""

    # strict: "3" is no number and true is no count; a mistyped value must not pass as another
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[Conflict]:
        """Every conflict between the values of the section."""
        yield from ()


class Data(Section):
    """Location of the raw data, and how queries are split."""

    path: str = key("data/raw/lf-debian", "folder of raw files")
    format: Literal["auto", "xmc-json", "xmc-text", "pecos", "beir", "tables"] = key("auto", "layout of the raw files")
    validation_share: Annotated[float, Field(ge=0, lt=0.5)] = key(0.05, "share of the training queries to validate on")
    validation_sample: CountOrZero = key(0, "training queries for the curves, if there is no validation split")
    test_share: Annotated[float, Field(ge=0, lt=0.9)] = key(0.2, "share of queries to test on, without a test split")
    split_seed: Seed = key(0, "seed of both splits")
    propensity_a: Positive = key(0.55, "A of the inverse propensities: a property of the data set")
    propensity_b: NonNegative = key(1.5, "B of the inverse propensities")


class RawBounds(Section):
    """Limits of raw files; ingest rejects files beyond them."""

    max_row_bytes: Annotated[int, Field(ge=1000, le=2**30)] = key(16 << 20, "maximum bytes per line or CSV row")
    max_text_chars: Count = key(1_000_000, "maximum characters per title or content")
    max_unpack_ratio: Count = key(50, "maximum unpacked size, as a multiple of a file's size; 64 MB are always allowed")


class Validation(Section):
    """Limits of `unidec data validate`: the allowed share of rows per check, and the severity of a larger share (error:
    training does not start; warn: reported; off: not checked)."""

    empty_texts: Share = key(0.01, "allowed share of queries, and of labels, with an empty text")
    empty_texts_severity: Severity = key("error", "severity of a larger share")
    test_texts_in_train: Share = key(0.01, "allowed share of test queries whose text is also a training query")
    test_texts_in_train_severity: Severity = key("error", "severity of a larger share")
    queries_without_positives: Share = key(0.5, "allowed share of queries without positives")
    queries_without_positives_severity: Severity = key("error", "severity of a larger share")
    labels_without_training_points: Share = key(0.5, "allowed share of labels without training queries")
    labels_without_training_points_severity: Severity = key("error", "severity of a larger share")
    label_texts_given_twice: Share = key(0.2, "allowed share of labels whose text is another label's, too")
    label_texts_given_twice_severity: Severity = key("error", "severity of a larger share")
    filtered_positives: Share = key(0.01, "allowed share of positives that are also filter pairs")
    filtered_positives_severity: Severity = key("warn", "severity of a larger share")


class Tokens(Section):
    """How texts become token ids."""

    text: Literal["title", "title+content"] = key("title", "fields of a text (short-text, long-text task)")
    max_length: Annotated[int, Field(ge=3, le=512)] = key(32, "maximum tokens per text, including special tokens")


class LabelGraph(Section):
    """The label graph: soft targets of label texts as queries (Gandalf)."""

    kind: Literal["cooccurrence", "random-walk", "glas", "self"] = key(
        "cooccurrence", "targets by shared queries, by random walks, symmetric (GLaS), or the label itself only"
    )
    threshold: Share = key(0.1, "delta: weaker soft targets become 0")
    share: Annotated[float, Field(gt=0, le=1)] = key(1.0, "share of the labels whose text is used as a query")
    tail_first: bool = key(False, "with a share below 1: use the rarest labels instead of random ones")


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens, both side by side, or convolutions over tokens (InceptionXML)."""

    name: str = key("all-MiniLM-L6-v2", "transformer: an alias, a local folder or a hub name")
    kind: Literal["transformer", "bag", "both", "inception"] = key(
        "both", "encoders (both: concatenated); inception: InceptionXML's layers over the bag's tokens"
    )
    pooling: Literal["mean", "cls"] = key("mean", "pooling of the transformer's token vectors")
    trainable_layers: Annotated[int, Field(ge=-1)] = key(0, "number of top layers to train; 0: frozen; -1: all")
    bag_dropout: Share = key(0.0, "share of a text's tokens dropped from the bag during training")
    bag_words: Annotated[int, Field(ge=0, le=2**24)] = key(0, "rows of the bag for hashed words; 0: none")
    bag_head: CountOrZero = key(0, "first tokens of a text (a title) with a bag of their own; 0: none")
    transformer_tokens: CountOrZero = key(0, "first tokens of a text that the transformer reads; 0: all")
    inception_tokens: Annotated[int, Field(ge=1, le=512)] = key(16, "first tokens of a text that inception reads")
    dropout: BelowOne = key(0.0, "dropout of the encoder's output")
    residual: bool = key(False, "a residual network over a bag or a frozen transformer")
    start: str = key("", "folder of an exported model to start encoder and heads from; empty: none")
    frozen: bool = key(False, "freeze the whole encoder: each text is encoded once")

    @property
    def has_transformer(self) -> bool:
        """Whether one of the encoders is a transformer."""
        return self.kind in ("transformer", "both")

    @property
    def unit_vectors(self) -> bool:
        """Whether the transformer's vectors have unit length by default: not if it trains alone; next to a bag both
        have, so that neither dominates."""
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
    projection: bool = key(True, "each head is a trained layer over the encoder; false: the encoder's own vector")
    normalize: bool = key(True, "the dual encoder's vectors have unit length")
    dim: Count = key(384, "dimension of each head; without projection, the encoder's")
    dropout: BelowOne = key(0.1, "dropout of both heads")
    auxiliary: CountOrZero = key(0, "labels per cluster; each adds a learnt vector to its labels (DEXA); 0: none")
    surrogate: CountOrZero = key(0, "labels per cluster; the classifier learns a row for each (Astec); 0: none")
    levels: list[Count] = key(
        [],
        "labels per cluster at each level of a label tree, coarse to fine, one classifier per level (CascadeXML); "
        "empty: none",
    )
    clf_init: Literal["xavier", "normal", "label_embedding"] = key("label_embedding", "initial classifier rows (Psi)")
    clf_residual: bool = key(False, "a label's classifier row is its text's embedding plus a free vector (SiameseXML)")
    clf_gates: bool = key(False, "learnt gates weigh the text and the free vector of a residual row (DECAF)")
    clf_graph: bool = key(False, "residual rows include the texts of related labels, by the label graph (ECLARE)")
    clf_queries: CountOrZero = key(
        0, "training queries per label whose mean is part of its residual row in a step (GraphSAGE)"
    )
    clf_bias: bool = key(False, "a bias per label in the classifier's scores")
    clf_dropout: BelowOne = key(0.0, "dropout of the classifier's rows during training")
    clf_dtype: Literal["fp32", "bf16"] = key("fp32", "type of the classifier's rows; bf16: with stochastic rounding")
    temperature: Positive = key(1 / 18, "tau of both heads")
    learn_temperature: bool = key(False, "train tau, one per head")

    @property
    def labels_a_cluster(self) -> int:
        """Labels per cluster, at the finest level; 0: labels are not clustered."""
        return self.auxiliary or self.surrogate or min(self.levels, default=0)

    def conflicts(self) -> Iterator[Conflict]:
        if sorted(set(self.levels), reverse=True) != self.levels:
            fix = "fewer labels a cluster at each next level, as in [32, 4]"
            yield Conflict("model.levels", "levels of a label tree go from coarse to fine", fix)


class Pool(Section):
    """Batches, and the pool of labels on which each batch's loss is computed."""

    batches: Literal["clustered", "random"] = key("clustered", "batches of similar queries, or random")
    batch_size: Count = key(512, "queries per batch; a cluster has N / 2^depth of them")
    batch_fit: Literal["most", "least"] = key("most", "batch_size is the maximum (papers: minimum) size of a cluster")
    cluster_start: CountOrZero = key(0, "initial queries per cluster, then doubled (NGAME); 0: a batch")
    cluster_doublings: list[CountOrZero] = key([], "epochs at which cluster sizes double; empty: at each refresh")
    beta: Count = key(3, "positives sampled per query")
    positives: Literal["uniform", "tail"] = key("uniform", "sampled uniformly, or by inverse propensity")
    eta: CountOrZero = key(6, "hard negatives sampled per query")
    shortlist: CountOrZero = key(
        0, "clusters per query and level of model.levels whose labels are its hard negatives; 0: the nearest labels"
    )
    mining: Mining = key("exact", "search for hard negatives; faiss: approximate, for millions of labels without a GPU")
    size: CountOrZero = key(3000, "maximum number of labels in a pool; 0: no limit")
    fill: bool = key(False, "fill the pool up to its size with further positives of the batch's queries; size 0: all")
    de_labels: Literal["pool", "all"] = key("pool", "labels in the dual encoder's loss; all: DEXML")
    clf_labels: Literal["pool", "all"] | Count = key(
        "pool", "the same for the classifier; N: a pool filled up to N with random labels, all if there are at most 2 N"
    )
    gandalf: bool = key(False, "also train on label texts as queries, with soft targets of the label graph (Gandalf)")
    simcse: bool = key(False, "each text, of a query or a label, is its own only positive (SimCSE)")
    refresh: Count = key(5, "T: epochs between refreshes of clusters and hard negatives")

    def conflicts(self) -> Iterator[Conflict]:
        if 0 < self.size < self.batch_size:
            what = "the pool is smaller than the batch: queries without a positive in it drop out of the loss"
            fix = "pool.size at least pool.batch_size (the papers: 2 to 5 times), or 0 for no limit"
            yield Conflict("pool.size pool.batch_size", what, fix)


class Loss(Section):
    """Losses on pool logits, reductions and weights."""

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = key("psl", "which positives count in the loss")
    de: LossName = key("ds", "dual encoder's loss")
    clf: LossName = key("ds", "classifier's loss")
    clf_bce: NonNegative = key(1.0, "weight of the auxiliary BCE on the classifier")
    bce_normalise: Literal["rows", "entries"] = key("entries", "mean over entries, or sum over a query's pool")
    balance: Share = key(0.5, "lambda: weight of the dual encoder's loss; the classifier's has the rest")
    de_forward: Share = key(0.5, "lambda_D: weight of the query-to-label loss; label-to-query has the rest")
    clf_forward: Share = key(0.5, "lambda_C: the same for the classifier")
    margin: NonNegative = key(0.3, "gamma of the triplet loss (cosine units), and of the squared hinge")
    triplet_negatives: Literal["all", "hardest", "softmax"] = key(
        "all", "negatives of the triplet loss; softmax: the hardest, weighted by a softmax (NGAME)"
    )
    triplet_top: Count = key(1, "number of hardest negatives")
    topk: Count = key(5, "k of the soft top-k loss")
    weights: Literal["none", "propensity"] = key("none", "weights of positives: 1, or their inverse propensity")
    mixup: Literal["none", "queries", "labels"] = key("none", "mix queries with others, or with a label's text (MixUp)")
    mixup_alpha: Positive = key(0.4, "alpha of the mixing weights' Beta distribution; small: nearly unmixed")


class Optim(Section):
    """Optimisers and schedule."""

    epochs: Count = key(20, "passes over the training queries")
    lr_encoder: Positive = key(1e-4, "learning rate of the transformer")
    lr_bag: Positive = key(1e-3, "learning rate of the bag of tokens")
    lr_heads: Positive = key(2e-4, "learning rate of both heads")
    lr_clf: NonNegative = key(1e-3, "learning rate of the classifier table; 0: rows are not trained")
    clf_state: Literal["adam", "adagrad", "sgd", "momentum", "adamw"] = key(
        "adam", "the classifier's optimiser; adamw updates all rows in each step, the others the pool's rows"
    )
    clf_decay: NonNegative = key(0.0, "weight decay of the classifier's rows, with adamw and momentum")
    warmup_epochs: NonNegative = key(1.0, "epochs of linear warm-up before the cosine schedule")
    patience: CountOrZero = key(
        0, "early stopping: rounds without a better validation nDCG@5 before one last round; 0: all epochs"
    )
    budget_minutes: NonNegative = key(
        0.0, "with patience: limit of training and refreshes in processor minutes (GPU: wall-clock); 0: no limit"
    )
    weight_decay: NonNegative = key(0.05, "weight decay of the transformer's and heads' matrices")
    clip_norm: NonNegative = key(1.0, "gradient norm limit; 0: none")
    encode_chunk: CountOrZero = key(0, "texts whose activations are in memory at once, gradients cached; 0: all")
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

    kind: IndexKind = key("flat", "kind of faiss index; `unidec index tune` measures them")
    space: Literal["both", "de", "clf"] = key("both", "which head's vectors are searched")
    hnsw_links: Count = key(32, "M of HNSW")
    hnsw_build: Count = key(200, "efConstruction of HNSW")
    hnsw_search: Count = key(200, "efSearch of HNSW")
    ivf_lists: CountOrZero = key(0, "lists of ivf; 0: 16 x sqrt(labels), of at least 64 labels each")
    ivf_probes: CountOrZero = key(0, "lists probed per search; 0: a 12th of them")
    pq_dims: Count = key(4, "dimensions per 4-bit code in pq and ivf-pq")
    rescore: Count = key(8, "candidates per result that a compressed index rescores exactly")
    clf_weight: Positive | Literal["auto"] = key(1.0, "weight of the classifier's score; auto: tuned on validation")
    clf_normalize: bool = key(True, "true: the classifier's cosine (the paper); false: its raw score")
    knn_weight: NonNegative | Literal["auto"] = key(0.0, "weight of the votes of similar training queries; 0: none")
    knn_neighbours: Count = key(100, "training queries that vote")
    knn_by: Literal["model", "words"] = key("model", "similar by the model's vectors, or by TF-IDF")
    knn_head: CountOrZero = key(
        0, "first tokens of a text (a title) whose words are also compared alone, for the fusion; 0: none"
    )
    fusion: bool = key(False, "rank by a small network trained on the validation split, where it gains; for both heads")
    objective: Literal["nDCG@5", "P@1", "PSP@5", "R@100"] = key("nDCG@5", "metric that selects weights and fusion")

    def conflicts(self) -> Iterator[Conflict]:
        if self.fuses and self.knn_by != "words":
            what = "fusion reads words that queries share"
            yield Conflict("index.fusion index.knn_by", what, "index.knn_by: words, or index.fusion: false")
        if self.knn_head and not self.fuses:
            yield Conflict("index.knn_head index.fusion", "only a fusion reads first words", "index.knn_head: 0")

    @property
    def fuses(self) -> bool:
        """Whether a fusion ranks; it requires both heads."""
        return self.fusion and self.space == "both"


class Run(Section):
    """Where training runs and how often it saves; nothing here affects the model."""

    devices: Count = key(1, "training processes, one GPU each (more than 1: torchrun)")
    restarts: CountOrZero = key(0, "restarts from the newest checkpoint after a process died")
    table_place: Literal["device", "host", "disk"] = key("device", "where classifier rows and optimiser state are kept")
    checkpoint_minutes: NonNegative = key(5.0, "minutes between checkpoints within a round; 0: only at its end")
    checkpoint_steps: CountOrZero = key(0, "the same in steps; 0: by time only")
    recompute: bool = key(False, "recompute activations in the backward pass: less memory, a third more work")
    compile: bool = key(False, "torch.compile of the transformer: a minute or two at the start, faster steps on a GPU")
    check_memory: bool = key(True, "refuse to start a training that does not fit by `unidec plan`")


class Source(Section):
    """Where a retraining fetches new raw data from, into `data.path`; secrets are named here, never stored."""

    kind: Literal["none", "folder", "files", "dvc"] = key("none", "where new raw data comes from")
    path: str = key("", "folder: its path; dvc: the target, data/raw/mine or data/raw/mine.dvc")
    queries: str = key("", "files: table of queries (csv, tsv, parquet, jsonl)")
    labels: str = key("", "files: table of labels")
    pairs: str = key("", "files: table of pairs")
    revision: str = key("", "dvc: git revision of an import; empty: as in the import")
    secrets: dict[str, str] = key({}, "name of a Prefect Secret block by environment variable")

    def conflicts(self) -> Iterator[Conflict]:
        if self.kind in ("folder", "dvc") and not self.path:
            fix = "source.path: the folder, or DVC's target; or source.kind: none"
            yield Conflict("source.path source.kind", "there is nowhere to fetch from", fix)
        if self.kind == "files" and not (self.queries and self.labels and self.pairs):
            keys = "source.queries source.labels source.pairs source.kind"
            yield Conflict(keys, "three tables make a data set", "all three tables, or source.kind: none")


class Warm(Section):
    """Training that starts from an earlier model, which data/start.json names."""

    epochs: Count = key(4, "passes over the training queries")
    lr_scale: Positive = key(0.7, "factor of every learning rate")
    warmup_epochs: NonNegative = key(0.25, "epochs of linear warm-up")
    keep: Share = key(0.25, "share of a classifier row that is kept; the rest starts from the label's text")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            what, fix = "the warm-up is longer than the training", "warm.warmup_epochs well below warm.epochs"
            yield Conflict("warm.warmup_epochs warm.epochs", what, fix)


class Retrain(Section):
    """Where a retraining starts, and what follows it."""

    start: Literal["auto", "warm", "cold"] = key("auto", "warm: the champion; cold: from scratch; auto: see cold_every")
    cold_every: CountOrZero = key(10, "auto: cold after so many warm starts in a row; 0: only the first is cold")
    promote: bool = key(True, "promote a challenger that passes the gate")
    push: bool = key(False, "run `dvc push` at the end")
    commit: Literal["none", "commit", "tag"] = key("none", "commit dvc.lock and metrics to git; tag: also tag them")


class Gate(Section):
    """Requirements for a challenger to become champion; points are percentage points on the test split."""

    metric: Metric = key("nDCG@5", "the metric that decides")
    margin: float = key(0.0, "required lead over the champion in points")
    confidence: BelowOne = key(0.9, "required confidence of that lead, by a paired bootstrap; 0: not required")
    tolerance: NonNegative = key(0.5, "points that a guarded metric may lose")
    guarded: list[Metric] = key(["P@1", "PSP@5", "tail/R@10", "coverage@5"], "metrics that may lose no more than that")
    max_latency_ms: NonNegative = key(
        0.0, "95th percentile latency of a single query in a fresh process, wall-clock; 0: no limit"
    )
    max_latency_ratio: NonNegative = key(2.0, "the same in processor time, relative to the champion's; 0: no limit")
    max_megabytes: NonNegative = key(0.0, "size of the bundle; 0: no limit")
    max_size_ratio: NonNegative = key(1.5, "the same, relative to the champion's; 0: no limit")
    max_load_seconds: NonNegative = key(0.0, "time until a fresh process answers, wall-clock; 0: no limit")
    max_load_ratio: NonNegative = key(2.0, "the same in processor time, relative to the champion's; 0: no limit")
    probes: Count = key(64, "queries that a fresh process must answer")
    allow_dirty: bool = key(False, "also promote versions made with uncommitted changes")

    def conflicts(self) -> Iterator[Conflict]:
        if self.confidence > 0 and "coverage@" in self.metric:
            what = "coverage belongs to all queries together: there is no bootstrap over them"
            fix = "gate.confidence: 0, or another gate.metric with coverage among gate.guarded"
            yield Conflict("gate.confidence gate.metric", what, fix)


class Drift(Section):
    """How far data may drift from the version that the champion was trained on; shares from 0 to 1."""

    warn_change: NonNegative = key(0.1, "relative change of a count, a length or a share that warns")
    stop_change: NonNegative = key(0.5, "relative change that stops a retraining")
    warn_distance: Share = key(0.1, "distance of two distributions (Jensen-Shannon) that warns")
    stop_distance: Share = key(0.5, "distance that stops a retraining")
    warn_shift: NonNegative = key(
        0.2, "shift of a window's mean embedding that warns, in standard deviations of single queries"
    )
    warn_low_score: Share = key(0.2, "share of a window's queries with a low top score that warns")
    low_score_quantile: Annotated[float, Field(gt=0, lt=1)] = key(
        0.05, "top scores below this quantile of the validation queries' count as low"
    )
    min_window: Count = key(200, "queries that a window needs to be judged")


class Serve(Section):
    """Address, limits and behaviour of `unidec serve`."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all, then set an API key")
    port: Annotated[int, Field(ge=0, le=65535)] = key(8080, "port to listen on; 0: any free one")
    hosts: list[str] = key(
        [],
        "accepted names in the Host header, besides IP addresses and localhost; empty: no others on "
        "127.0.0.1 without an API key, else any",
    )
    max_body_bytes: Count = key(1_000_000, "maximum size of a request body")
    max_queries: Count = key(256, "maximum queries per request")
    max_query_chars: Count = key(8000, "maximum characters per query")
    max_k: Count = key(100, "maximum labels per query")
    max_filter_labels: Count = key(10_000, "maximum length of a request's list of allowed or denied labels")
    max_connections: Count = key(1024, "maximum open connections; further ones get 503")
    queue_queries: Count = key(1024, "maximum queries in the queue; further ones get 503 with Retry-After")
    timeout_seconds: Positive = key(5.0, "a request that waits longer gets 503")
    batch_queries: Count = key(32, "maximum queries per batch")
    batch_wait_ms: NonNegative = key(
        0.0,
        "how long an idle model waits for more queries after a batch of several; a lone query never waits. 0: "
        "queries gather while the model works, which is as good on a CPU; on a GPU 1 or 2 may pay off",
    )
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = key(
        "auto", "runtime of the query encoder; auto: the fastest that keeps quality (docs/serving.md)"
    )
    threads: CountOrZero = key(0, "threads of encoder and search; 0: all that the machine has")
    cache_queries: CountOrZero = key(10_000, "answers cached for repeated queries; 0: none")
    follow_seconds: NonNegative = key(10.0, "seconds between polls of the alias in the registry; 0: no polling")
    keep_previous: bool = key(True, "keep the previous model in memory, to swap back at once")
    api_key_env: str = key(
        "UNIDEC_API_KEY", "environment variable with the API key; if it is not set, no key is required"
    )
    feedback: Annotated[str, Field(pattern=r"(^|\.jsonl)$")] = key(
        "", "file (.jsonl) that the page's buttons `relevant` and `not relevant` append to; empty: no buttons"
    )
    feedback_bytes: Count = key(10_000_000, "maximum size of that file; when it is full, feedback is rejected")


class Tracking(Section):
    """Names under which MLflow keeps runs and models; MLFLOW_TRACKING_URI sets the tracking server."""

    experiment: str = key("unidec", "MLflow experiment")
    model_name: str = key("unidec", "registered model")
