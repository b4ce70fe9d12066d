"""The sections of params.yaml: each parameter with its type, bounds, default, description, the results that it decides,
and conflicts of values.

`unidec.config` reads a parameter file into these classes; all other code takes one section or plain arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

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
Result = Literal["data", "checks", "tokens", "training", "index", "evaluation", "operation"]
"""What a parameter decides, in the order of the pipeline: the data set, whether its checks pass, the token caches, the
trained model, the bundle, the metrics; or only where and how something runs ("operation")."""


def _known_metric(name: str) -> str:
    known = metric_names()
    if name not in known:
        expected = " or ".join(f"'{one}'" for one in known)
        text = "a metric of outputs/metrics.json, such as nDCG@5, PSP@3, coverage@10 or tail/R@100"
        raise PydanticCustomError("metric", "{text}", {"text": text, "expected": expected})
    return name


Metric = Annotated[str, AfterValidator(_known_metric)]


def _not_removed(kind: object) -> object:
    """Raises an error that names the replacement of a removed index kind."""
    replacement = {"sq8": "pq", "hnsw-sq8": "pq or hnsw", "ivf-sq8": "ivf-pq"}.get(str(kind))
    if replacement:
        raise PydanticCustomError("index_kind", "{text}", {"text": f"{replacement}, which replaces it"})
    return kind


IndexKind = Annotated[Literal["flat", "pq", "hnsw", "ivf-pq"], BeforeValidator(_not_removed)]


def key(default: Any, description: str, *decides: Result) -> Any:
    """A parameter's default, its description and the results that it decides, if not those of its section."""
    return Field(default, description=description, json_schema_extra={"decides": list(decides)} if decides else None)


class Conflict(NamedTuple):
    """Values that are each valid but conflict with each other.

    Attributes:
        keys: their key paths, separated by spaces; the error is reported at the first one.
        what, fix: what is wrong, and what to set instead.
    """

    keys: str
    what: str
    fix: str


class Section(BaseModel):
    """A frozen group of parameters that rejects unknown keys.

    Attributes:
        decides: the first results that these parameters decide, unless a key says otherwise; what is made from them
            follows.
    """

    decides: ClassVar[tuple[Result, ...]] = ("operation",)

    # strict: "3" is not accepted as a number, nor true as a count, so that a typing error is reported
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def conflicts(self) -> Iterator[Conflict]:
        """All conflicts between the values of this section."""
        yield from ()


class Data(Section):
    """Location of the raw data, and how queries are split."""

    decides: ClassVar[tuple[Result, ...]] = ("data",)

    path: str = key("data/raw/lf-debian", "folder with the raw files", "operation")  # the files decide, not their place
    format: Literal["auto", "xmc-json", "xmc-text", "pecos", "beir", "tables"] = key(
        "auto", "layout of the raw files (docs/data.md); auto: recognised by the file names"
    )
    validation_share: Annotated[float, Field(ge=0, lt=0.5)] = key(
        0.05, "share of the training queries held out for validation, if the data has no validation split"
    )
    validation_sample: CountOrZero = key(
        0, "training queries to compute metrics on if there is no validation split", "evaluation"
    )
    test_share: Annotated[float, Field(ge=0, lt=0.9)] = key(0.2, "share of queries to test on, if no split is given")
    split_seed: Seed = key(0, "random seed of the validation and test splits")
    propensity_a: Positive = key(0.55, "constant A of the inverse propensities (Jain et al. 2016), set per data set")
    propensity_b: NonNegative = key(1.5, "constant B of the inverse propensities, set per data set")


class RawBounds(Section):
    """Limits of raw files and other tables, and how quotes in them are read."""

    quotes: Literal["auto", "yes", "no"] = key(
        "auto", "quotes enclose fields of .csv and .tsv files (docs/data.md)", "data"
    )
    max_row_bytes: Annotated[int, Field(ge=1000, le=2**30)] = key(16 << 20, "maximum bytes per line or CSV row")
    max_text_chars: Count = key(1_000_000, "maximum characters per title or content")
    max_unpack_ratio: Count = key(50, "maximum unpacked size as a multiple of the file's size; 64 MB always allowed")


class Validation(Section):
    """Checks of the data: the allowed share of such rows; a larger one is an error (no training), a warning, or off."""

    decides: ClassVar[tuple[Result, ...]] = ("checks",)

    empty_texts: Share = key(0.01, "allowed share of queries, and of labels, with an empty text")
    empty_texts_severity: Severity = key("error", "severity of a larger share")
    test_texts_in_train: Share = key(0.01, "allowed share of test queries whose text is also a training query's")
    test_texts_in_train_severity: Severity = key("error", "severity of a larger share")
    queries_without_positives: Share = key(0.5, "allowed share of queries without positives")
    queries_without_positives_severity: Severity = key("error", "severity of a larger share")
    labels_without_training_points: Share = key(0.5, "allowed share of labels without training queries")
    labels_without_training_points_severity: Severity = key("error", "severity of a larger share")
    label_texts_given_twice: Share = key(0.2, "allowed share of labels with the text, or the tokens, of another label")
    label_texts_given_twice_severity: Severity = key("error", "severity of a larger share")
    unknown_tokens: Share = key(0.1, "allowed share of a text's tokens that the tokenizer does not know, on average")
    unknown_tokens_severity: Severity = key("error", "severity of a larger share")
    filtered_positives: Share = key(0.01, "allowed share of positives that are also filter pairs")
    filtered_positives_severity: Severity = key("warn", "severity of a larger share")


class Tokens(Section):
    """How texts become token ids."""

    decides: ClassVar[tuple[Result, ...]] = ("checks", "tokens")

    text: Literal["title", "title+content"] = key("title", "fields of each query and label that the model reads")
    max_length: Annotated[int, Field(ge=3, le=512)] = key(32, "maximum tokens per text, including special tokens")


class LabelGraph(Section):
    """The label graph: soft targets for label texts that serve as training queries (Gandalf)."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    kind: Literal["cooccurrence", "random-walk", "glas", "self"] = key(
        "cooccurrence", "soft targets by shared queries, by random walks, symmetric (GLaS), or the label itself only"
    )
    threshold: Share = key(0.1, "delta: soft targets below this value are set to 0")
    share: Annotated[float, Field(gt=0, le=1)] = key(1.0, "share of the labels whose text is used as a query")
    tail_first: bool = key(False, "if label_graph.share is below 1: use the rarest labels instead of random ones")


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens (a weighted sum of their embeddings), both concatenated, or
    convolutions over token embeddings (InceptionXML)."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    name: str = key(
        "all-MiniLM-L6-v2",
        "transformer: an alias, a local folder or a name on the Hugging Face hub",
        "checks",
        "tokens",
        "training",
    )
    kind: Literal["transformer", "bag", "both", "inception"] = key(
        "both",
        "encoder: a transformer, a bag of tokens, both concatenated, or InceptionXML's convolutions",
        "checks",
        "training",
    )
    pooling: Literal["mean", "cls"] = key("mean", "pooling of the transformer's token vectors")
    trainable_layers: Annotated[int, Field(ge=-1)] = key(0, "top transformer layers to train; 0: none; -1: everything")
    bag_dropout: Share = key(0.0, "share of a text's tokens dropped from the bag during training")
    bag_words: Annotated[int, Field(ge=0, le=2**24)] = key(0, "embedding rows for hashed multi-token words; 0: none")
    bag_head: CountOrZero = key(0, "first tokens of a text (its title) that are also summed separately; 0: none")
    transformer_tokens: CountOrZero = key(
        0, "number of first tokens of a text that the transformer reads; 0: all", "checks", "training"
    )
    inception_tokens: Annotated[int, Field(ge=1, le=512)] = key(16, "first tokens of a text that inception reads")
    dropout: BelowOne = key(0.0, "dropout of the encoder's output")
    residual: bool = key(False, "add a trained residual network on top of a bag or a frozen transformer")
    start: str = key("", "folder of an exported model whose encoder and heads are loaded first; empty: none")
    frozen: bool = key(False, "do not train the encoder; each text is then encoded only once")

    @property
    def has_transformer(self) -> bool:
        """Whether one of the encoders is a transformer."""
        return self.kind in ("transformer", "both")

    @property
    def unit_vectors(self) -> bool:
        """Whether the transformer's vectors are normalised to unit length: not if it is trained and there is no bag.
        Beside a bag both parts have unit length, so that neither dominates."""
        return self.trainable_layers == 0 or self.kind != "transformer"

    def conflicts(self) -> Iterator[Conflict]:
        if not self.has_transformer and (self.trainable_layers != 0 or self.pooling == "cls"):
            what, keys = "there is no transformer", "encoder.trainable_layers encoder.pooling encoder.kind"
            fix = "encoder.kind: both, or encoder.trainable_layers: 0 and encoder.pooling: mean"
            yield Conflict(keys, f"{what}: trainable layers and pooling have no effect", fix)
        if self.kind != "both" and self.transformer_tokens:
            what = "a limit for the transformer alone requires encoder.kind: both"
            fix = "tokens.max_length, which limits every encoder, or encoder.kind: both"
            yield Conflict("encoder.transformer_tokens encoder.kind", what, fix)
        if self.kind == "inception" and (self.bag_words or self.bag_head):
            what, fix = "inception reads tokens only", "encoder.bag_words: 0 and encoder.bag_head: 0"
            yield Conflict("encoder.bag_words encoder.bag_head encoder.kind", what, f"{fix}, or encoder.kind: bag")
        if self.frozen and self.trainable_layers != 0:
            fix = "encoder.trainable_layers: 0, or encoder.frozen: false"
            yield Conflict("encoder.frozen encoder.trainable_layers", "a frozen encoder has no layers to train", fix)


class Model(Section):
    """The heads (dual encoder, classifier) and the table of classifier rows, one row per label."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    heads: Literal["both", "de", "clf"] = key("both", "heads to train: dual encoder, classifier, or both (UniDEC)")
    projection: bool = key(True, "each head is a trained layer over the encoder's vector; false: that vector itself")
    normalize: bool = key(True, "normalise the dual encoder's vectors to unit length")
    dim: Count = key(384, "dimension of each head's vectors; without projection it must be the encoder's dimension")
    dropout: BelowOne = key(0.1, "dropout of both heads")
    auxiliary: CountOrZero = key(0, "labels per cluster that share an added learnt vector (DEXA); 0: no such vector")
    surrogate: CountOrZero = key(0, "labels per cluster that share a classifier row (Astec); 0: one row per label")
    levels: list[Count] = key(
        [], "labels per cluster at each level of a label tree, coarse to fine (CascadeXML); empty: no label tree"
    )
    clf_init: Literal["xavier", "normal", "label_embedding"] = key(
        "label_embedding", "initial values of the classifier's rows: random, or the embeddings of the label texts"
    )
    clf_residual: bool = key(False, "a classifier row is its label text's embedding plus a learnt vector (SiameseXML)")
    clf_gates: bool = key(False, "with clf_residual: learnt gates scale text embedding and learnt vector (DECAF)")
    clf_graph: bool = key(False, "with clf_residual: add texts of related labels, from the label graph (ECLARE)")
    clf_queries: CountOrZero = key(0, "with clf_residual: training queries whose mean joins a row (GraphSAGE); 0: none")
    clf_bias: bool = key(False, "add a learnt bias per label to the classifier's scores")
    clf_dropout: BelowOne = key(0.0, "dropout of the classifier's rows during training")
    clf_dtype: Literal["fp32", "bf16"] = key("fp32", "type of the classifier's rows; bf16: with stochastic rounding")
    temperature: Positive = key(1 / 18, "tau: the scores of both heads are divided by it in the loss")
    learn_temperature: bool = key(False, "train the temperature, one per head")

    @property
    def labels_a_cluster(self) -> int:
        """Number of labels per cluster (with a label tree, at the finest level); 0: labels are not clustered."""
        return self.auxiliary or self.surrogate or min(self.levels, default=0)

    def conflicts(self) -> Iterator[Conflict]:
        if sorted(set(self.levels), reverse=True) != self.levels:
            fix = "fewer labels per cluster at each next level, as in [32, 4]"
            yield Conflict("model.levels", "the levels of a label tree must go from coarse to fine", fix)


class Pool(Section):
    """Batches of queries, and the pool: the labels on which the loss of a batch is computed."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    batches: Literal["clustered", "random"] = key("clustered", "batches of similar queries, or of random ones")
    batch_size: Count = key(512, "queries per batch; clustered batches have N / 2^depth of the N training queries")
    batch_fit: Literal["most", "least"] = key("most", "pool.batch_size is an upper or (published code) a lower limit")
    cluster_start: CountOrZero = key(0, "queries per cluster at first, later doubled (NGAME); 0: the batch size")
    cluster_doublings: list[CountOrZero] = key([], "epochs at which the cluster size doubles; empty: at each refresh")
    beta: Count = key(3, "positives sampled per query for the pool")
    positives: Literal["uniform", "tail"] = key("uniform", "how they are sampled: uniformly, or by inverse propensity")
    eta: CountOrZero = key(6, "hard negatives sampled per query for the pool")
    shortlist: CountOrZero = key(
        0, "with model.levels: best clusters per level whose labels are a query's hard negatives; 0: the nearest labels"
    )
    mining: Mining = key("exact", "search for hard negatives; faiss: approximate, for millions of labels without a GPU")
    size: CountOrZero = key(3000, "maximum number of labels in a pool; 0: no limit")
    fill: bool = key(False, "fill the pool up to pool.size (0: with all) with further positives of its queries")
    de_labels: Literal["pool", "all"] = key("pool", "labels in the dual encoder's loss; all: as in DEXML")
    clf_labels: Literal["pool", "all"] | Count = key(
        "pool",
        "labels in the classifier's loss; N: the pool filled up to N with random labels (all if at most 2 N)",
    )
    gandalf: bool = key(False, "also train on label texts as queries, with soft targets of the label graph (Gandalf)")
    simcse: bool = key(False, "a text's only positive is itself, under another dropout mask (SimCSE)")
    refresh: Count = key(5, "T: epochs between refreshes (clustering the queries and mining hard negatives)")

    def conflicts(self) -> Iterator[Conflict]:
        if 0 < self.size < self.batch_size:
            what = "the pool is smaller than the batch: queries without a positive in the pool are left out of the loss"
            fix = "pool.size at least pool.batch_size (the papers: 2 to 5 times), or 0 for no limit"
            yield Conflict("pool.size pool.batch_size", what, fix)


class Loss(Section):
    """Losses of both heads on the pool, and how they are combined and weighted."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = key(
        "psl",
        "how the losses of a query's positives combine: mean over those in the pool, their sum, sum divided by the "
        "number of all its positives, or one positive only",
    )
    de: LossName = key("ds", "the dual encoder's loss (docs/training.md)")
    clf: LossName = key("ds", "the classifier's loss (docs/training.md)")
    clf_bce: NonNegative = key(1.0, "weight of an additional BCE loss on the classifier; 0: none")
    bce_normalise: Literal["rows", "entries"] = key(
        "entries", "BCE and hinge: sum over the labels of a query's pool, or mean over all query-label entries"
    )
    balance: Share = key(0.5, "lambda: weight of the dual encoder's loss; the classifier's loss has 1 - lambda")
    de_forward: Share = key(0.5, "lambda_D: the dual encoder's query-to-label weight; label-to-query has the rest")
    clf_forward: Share = key(0.5, "lambda_C: the classifier's query-to-label weight; label-to-query has the rest")
    margin: NonNegative = key(0.3, "gamma: margin of the triplet loss (in cosine units) and of the squared hinge")
    triplet_negatives: Literal["all", "hardest", "softmax"] = key(
        "all", "negatives of the triplet loss: all, the hardest, or the hardest weighted by a softmax (NGAME)"
    )
    triplet_top: Count = key(1, "number of hardest negatives that the triplet loss uses")
    topk: Count = key(5, "k of the soft top-k loss")
    weights: Literal["none", "propensity"] = key("none", "weights of positives: 1, or their inverse propensity")
    mixup: Literal["none", "queries", "labels"] = key("none", "mix queries with others, or with a label's text (MixUp)")
    mixup_alpha: Positive = key(0.4, "alpha of the Beta distribution of mixing weights; small values mix little")


class Optim(Section):
    """Optimisers, learning rates and stopping."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    epochs: Count = key(20, "passes over the training queries")
    lr_encoder: Positive = key(1e-4, "learning rate of the transformer")
    lr_bag: Positive = key(1e-3, "learning rate of the bag of tokens")
    lr_heads: Positive = key(2e-4, "learning rate of both heads")
    lr_clf: NonNegative = key(1e-3, "learning rate of the classifier's rows; 0: they are not trained")
    clf_state: Literal["adam", "adagrad", "sgd", "momentum", "adamw"] = key(
        "adam", "optimiser of the classifier's rows; adamw updates all rows in each step, the others only the pool's"
    )
    clf_decay: NonNegative = key(0.0, "weight decay of the classifier's rows; with adamw and momentum only")
    warmup_epochs: NonNegative = key(1.0, "epochs of linear warm-up of the learning rates, before their cosine decay")
    patience: CountOrZero = key(
        0, "early stopping: rounds without a better validation nDCG@5 before one last round; 0: train all epochs"
    )
    budget_minutes: NonNegative = key(0.0, "with patience: time limit in processor minutes (GPU: wall-clock); 0: none")
    weight_decay: NonNegative = key(0.05, "weight decay of the weight matrices of the transformer and the heads")
    clip_norm: NonNegative = key(1.0, "maximum gradient norm; larger gradients are scaled down to it; 0: no limit")
    encode_chunk: CountOrZero = key(0, "texts encoded at once, with cached gradients to save memory; 0: all texts")
    precision: Literal["auto", "fp32", "bf16"] = key("auto", "number type of training; auto: bf16 where it is faster")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            what, fix = "the warm-up is longer than the training", "optim.warmup_epochs well below optim.epochs"
            yield Conflict("optim.warmup_epochs optim.epochs", what, fix)
        if self.budget_minutes > 0 and self.patience == 0:
            what, fix = "a time limit requires patience", "optim.patience: 2, or optim.budget_minutes: 0"
            yield Conflict("optim.budget_minutes optim.patience", what, fix)
        if self.clf_decay > 0 and self.clf_state not in ("adamw", "momentum"):
            what = "this optimiser has no weight decay"
            fix = "optim.clf_state: adamw or momentum, or optim.clf_decay: 0"
            yield Conflict("optim.clf_decay optim.clf_state", what, fix)


class Index(Section):
    """The label index, and how the scores of both heads are combined."""

    decides: ClassVar[tuple[Result, ...]] = ("index",)

    kind: IndexKind = key("flat", "kind of faiss index (flat: exact); `unidec index tune` measures recall and speed")
    space: Literal["both", "de", "clf"] = key("both", "which head's vectors are searched")
    hnsw_links: Count = key(32, "hnsw: links per label (M)")
    hnsw_build: Count = key(200, "hnsw: candidates when the index is built (efConstruction)")
    hnsw_search: Count = key(200, "hnsw: candidates per search (efSearch)")
    ivf_lists: CountOrZero = key(0, "ivf-pq: number of lists; 0: 16 x sqrt(labels), of at least 64 labels each")
    ivf_probes: CountOrZero = key(0, "ivf-pq: lists probed per search; 0: a 12th of them")
    pq_dims: Count = key(4, "pq, ivf-pq: dimensions per 4-bit code")
    rescore: Count = key(8, "pq, ivf-pq: candidates per requested label that are rescored exactly")
    clf_weight: Positive | Literal["auto"] = key(1.0, "weight of the classifier's score; auto: tuned on validation")
    clf_normalize: bool = key(True, "true: the classifier's cosine (the paper); false: its raw score")
    knn_weight: NonNegative | Literal["auto"] = key(0.0, "weight of votes of similar training queries; 0: no votes")
    knn_neighbours: Count = key(100, "number of most similar training queries that vote")
    knn_by: Literal["model", "words"] = key("model", "similarity of queries: model vectors, or TF-IDF of words")
    knn_head: CountOrZero = key(0, "with fusion: first tokens of a text (title) also compared separately; 0: none")
    fusion: bool = key(
        False,
        "rank by a small network, trained on the validation split and used if better; requires both heads",
    )
    objective: Literal["nDCG@5", "P@1", "PSP@5", "R@100"] = key("nDCG@5", "validation metric that tuning maximises")

    def conflicts(self) -> Iterator[Conflict]:
        if self.fuses and self.knn_by != "words":
            what = "the fusion requires the votes by words"
            yield Conflict("index.fusion index.knn_by", what, "index.knn_by: words, or index.fusion: false")
        if self.knn_head and not self.fuses:
            yield Conflict("index.knn_head index.fusion", "only the fusion uses it", "index.knn_head: 0")

    @property
    def fuses(self) -> bool:
        """Whether labels are ranked by the fusion, which requires both heads."""
        return self.fusion and self.space == "both"


class Run(Section):
    """Where training runs and how often it writes checkpoints; nothing here affects the model."""

    devices: Count = key(1, "number of training processes, one per GPU (more than 1: started by torchrun)")
    restarts: CountOrZero = key(0, "how often training restarts from the newest checkpoint after a process died")
    table_place: Literal["device", "host", "disk"] = key("device", "where classifier rows and optimiser state are kept")
    checkpoint_minutes: NonNegative = key(5.0, "minutes between checkpoints in a round; 0: only at its end")
    checkpoint_steps: CountOrZero = key(0, "steps between checkpoints within a round; 0: by time only")
    recompute: bool = key(False, "recompute activations in the backward pass: less memory, a third more computation")
    compile: bool = key(False, "torch.compile of the transformer: a minute or two at the start, faster steps on a GPU")
    check_memory: bool = key(True, "refuse to start a training that needs too much memory (`unidec plan`)")


class Source(Section):
    """The source of new raw data, which a retraining copies to `data.path`. Secrets are named here, never stored."""

    kind: Literal["none", "folder", "files", "dvc"] = key("none", "origin of new raw data; none: keep what is there")
    path: str = key("", "kind folder: its path; kind dvc: the DVC target, such as data/raw/mine or data/raw/mine.dvc")
    queries: str = key("", "kind files: path of the table of queries (csv, tsv, parquet, jsonl)")
    labels: str = key("", "kind files: path of the table of labels")
    pairs: str = key("", "kind files: path of the table of pairs")
    revision: str = key("", "kind dvc: git revision of an imported target; empty: the one that the import names")
    secrets: dict[str, str] = key({}, "Prefect Secret block for each environment variable of DVC's processes")

    def conflicts(self) -> Iterator[Conflict]:
        if self.kind in ("folder", "dvc") and not self.path:
            fix = "source.path: the folder, or DVC's target; or source.kind: none"
            yield Conflict("source.path source.kind", "the source has no path", fix)
        if self.kind == "files" and not (self.queries and self.labels and self.pairs):
            keys = "source.queries source.labels source.pairs source.kind"
            yield Conflict(keys, "a data set consists of three tables", "all three tables, or source.kind: none")


class Warm(Section):
    """A training that starts from an earlier model, named in data/start.json."""

    decides: ClassVar[tuple[Result, ...]] = ("training",)

    epochs: Count = key(4, "passes over the training queries, instead of optim.epochs")
    lr_scale: Positive = key(0.7, "factor for every learning rate")
    warmup_epochs: NonNegative = key(0.25, "epochs of linear warm-up, instead of optim.warmup_epochs")
    keep: Share = key(0.25, "weight of the earlier model's classifier row; the label text's embedding has the rest")

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            what, fix = "the warm-up is longer than the training", "warm.warmup_epochs well below warm.epochs"
            yield Conflict("warm.warmup_epochs warm.epochs", what, fix)


class Retrain(Section):
    """Which model a retraining starts from, and what it does after training."""

    start: Literal["auto", "warm", "cold"] = key("auto", "warm: the champion; cold: from scratch; auto: see cold_every")
    cold_every: CountOrZero = key(10, "start auto: warm starts in a row before a cold one; 0: only the first is cold")
    promote: bool = key(True, "promote a challenger that passes the gate")
    push: bool = key(False, "run `dvc push` at the end")
    commit: Literal["none", "commit", "tag"] = key("none", "commit dvc.lock and metrics to git; tag: also tag them")


class Gate(Section):
    """Requirements that a challenger must meet to become champion, on the test split."""

    metric: Metric = key("nDCG@5", "metric in which the challenger must lead")
    margin: float = key(0.0, "required lead over the champion, in percentage points")
    confidence: BelowOne = key(0.9, "required confidence of that lead, by a paired bootstrap; 0: not required")
    tolerance: NonNegative = key(0.5, "maximum loss in each metric of gate.guarded, in percentage points")
    guarded: list[Metric] = key(["P@1", "PSP@5", "tail/R@10", "coverage@5"], "metrics to which gate.tolerance applies")
    max_latency_ms: NonNegative = key(0.0, "maximum p95 latency of single queries, in a fresh process; 0: no limit")
    max_latency_ratio: NonNegative = key(2.0, "maximum p95 processor time, relative to the champion's; 0: no limit")
    max_megabytes: NonNegative = key(0.0, "maximum size of the bundle; 0: no limit")
    max_size_ratio: NonNegative = key(1.5, "maximum size of the bundle, as a multiple of the champion's; 0: no limit")
    max_load_seconds: NonNegative = key(0.0, "maximum time until a fresh process answers; 0: no limit")
    max_load_ratio: NonNegative = key(2.0, "maximum processor time to load, relative to the champion's; 0: no limit")
    probes: Count = key(64, "number of queries that a fresh process must answer")
    allow_dirty: bool = key(False, "also promote versions of which git does not say that all changes were committed")

    def conflicts(self) -> Iterator[Conflict]:
        if self.confidence > 0 and "coverage@" in self.metric:
            what = "coverage has no value per query, so its confidence cannot be bootstrapped"
            fix = "gate.confidence: 0, or another gate.metric with coverage among gate.guarded"
            yield Conflict("gate.confidence gate.metric", what, fix)


class Drift(Section):
    """How far data, or a window of served queries, may drift from the data that the champion was trained on."""

    warn_change: NonNegative = key(0.1, "relative change of a count, a length or a share that triggers a warning")
    stop_change: NonNegative = key(0.5, "relative change that stops a retraining")
    warn_distance: Share = key(0.1, "Jensen-Shannon distance between two distributions that triggers a warning")
    stop_distance: Share = key(0.5, "Jensen-Shannon distance that stops a retraining")
    warn_shift: NonNegative = key(0.2, "shift of a window's mean embedding that warns, in deviations of single queries")
    warn_low_score: Share = key(0.2, "share of a window's queries with a low top score that triggers a warning")
    low_score_quantile: Annotated[float, Field(gt=0, lt=1)] = key(
        0.05, "a top score is low if it is below this quantile of the validation queries' top scores"
    )
    min_window: Count = key(200, "minimum number of queries in a window; smaller windows are not checked")


class Serve(Section):
    """Address, limits and behaviour of `unidec serve`."""

    host: str = key("127.0.0.1", "address to listen on; 0.0.0.0: all, then set an API key")
    port: Annotated[int, Field(ge=0, le=65535)] = key(8080, "port to listen on; 0: any free one")
    hosts: list[str] = key(
        [],
        "accepted names in the Host header, besides IP addresses and localhost; empty: no further names when "
        "listening on 127.0.0.1 without an API key, otherwise any",
    )
    max_body_bytes: Count = key(1_000_000, "maximum size of a request body, in bytes")
    max_queries: Count = key(256, "maximum queries per request")
    max_query_chars: Count = key(8000, "maximum characters per query")
    max_k: Count = key(100, "maximum labels per query")
    max_filter_labels: Count = key(10_000, "maximum length of a request's list of allowed or denied labels")
    max_connections: Count = key(1024, "maximum open connections; beyond it the longest idle one is closed")
    queue_queries: Count = key(1024, "maximum queries in the queue; further ones are answered with 503 and Retry-After")
    timeout_seconds: Positive = key(5.0, "maximum time that a request waits; then it is answered with 503")
    batch_queries: Count = key(32, "maximum queries that the model answers in one batch")
    batch_wait_ms: NonNegative = key(
        0.0,
        "how long an idle model waits for more queries after a batch of several; a single query never waits. With 0, "
        "queries gather only while the model is busy, which is as fast on a CPU; on a GPU 1 or 2 may be faster",
    )
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = key(
        "auto", "runtime of the query encoder; auto: the fastest without loss of quality (docs/serving.md)"
    )
    threads: CountOrZero = key(0, "threads of encoder and search; 0: all of the machine")
    cache_queries: CountOrZero = key(10_000, "number of answers cached for repeated queries; 0: none")
    follow_seconds: NonNegative = key(10.0, "seconds between polls of the model alias in the registry; 0: no polling")
    keep_previous: bool = key(True, "keep the previous model in memory, so that a rollback takes effect at once")
    api_key_env: str = key("UNIDEC_API_KEY", "environment variable that holds the API key; unset: no key required")
    feedback: Annotated[str, Field(pattern=r"(^|\.jsonl)$")] = key(
        "", "file (.jsonl) to which the page's buttons `relevant` and `not relevant` append; empty: no buttons"
    )
    feedback_bytes: Count = key(10_000_000, "maximum size of that file in bytes; beyond it, feedback is rejected")


class Tracking(Section):
    """Names of runs and models in MLflow; the environment variable MLFLOW_TRACKING_URI sets the tracking server."""

    experiment: Annotated[str, Field(pattern=r"^\S(.*\S)?$")] = key("unidec", "name of the MLflow experiment")
    model_name: Annotated[str, Field(pattern=r"^\w([\w. -]*\w)?$")] = key("unidec", "name of the registered model")
