"""The sections of params.yaml: every parameter, its type, bounds, default and what it does.

`unidec.config` reads a file into them; everything else takes one section or plain arguments.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from unidec.conflicts import find_conflicts
from unidec.metric_names import metric_names

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Severity = Literal["error", "warn", "off"]
LossName = Literal["ds", "supcon", "infonce", "triplet", "bce", "hinge", "softtopk"]


def _known_metric(name: str) -> str:
    known = metric_names()
    if name not in known:
        expected = " or ".join(f"'{one}'" for one in known)
        text = "a metric of outputs/metrics.json: nDCG@5, PSP@3, coverage@10, tail/R@100, ..."
        raise PydanticCustomError("metric", "{text}", {"text": text, "expected": expected})
    return name


Metric = Annotated[str, AfterValidator(_known_metric)]


class Section(BaseModel):
    """A frozen group of parameters that refuses keys it does not know."""

    # strict: "3" is no number and true is no count; a mistyped value must not pass as another
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


class Data(Section):
    """Where the raw data lies and how queries are split."""

    path: str = Field("data/raw/lf-debian", description="folder of raw files")
    format: Literal["auto", "xmc-json", "xmc-text", "pecos", "beir", "tables"] = Field("auto", description="its layout")
    validation_share: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.05, description="share of the training queries held out to select models on"
    )
    test_share: Annotated[float, Field(ge=0, lt=0.9)] = Field(
        0.2, description="share of the queries cut off for testing when the data names no test split"
    )
    split_seed: Seed = Field(0, description="seed of both splits")
    propensity_a: Positive = Field(0.55, description="A of the inverse propensities: a property of the data set")
    propensity_b: Annotated[float, Field(ge=0)] = Field(1.5, description="B of the inverse propensities")


class RawBounds(Section):
    """What raw files may hold; ingest refuses more."""

    max_row_bytes: Annotated[int, Field(ge=1000, le=2**30)] = Field(
        16 << 20, description="bytes of a line, or of a CSV row with line breaks in quotes"
    )
    max_text_chars: Count = Field(1_000_000, description="characters of a title or a content")
    max_unpack_ratio: Count = Field(
        50, description="times its own size that a compressed file may unpack to; 64 MB always"
    )


class Validation(Section):
    """What `unidec data validate` allows: for each check the largest share of rows, and what
    happens beyond it: error stops before training, warn is reported, off: not checked."""

    empty_texts: Share = Field(0.01, description="share of the queries, and of the labels, whose text is empty")
    empty_texts_severity: Severity = Field("error", description="of a larger share")
    test_texts_in_train: Share = Field(
        0.01, description="share of the test queries whose text is also a training query's"
    )
    test_texts_in_train_severity: Severity = Field("error", description="of a larger share")
    queries_without_positives: Share = Field(0.5, description="share of the queries")
    queries_without_positives_severity: Severity = Field("error", description="of a larger share")
    labels_without_training_points: Share = Field(0.5, description="share of the labels")
    labels_without_training_points_severity: Severity = Field("error", description="of a larger share")
    label_texts_given_twice: Share = Field(0.2, description="share of the labels whose text another label has")
    label_texts_given_twice_severity: Severity = Field("error", description="of a larger share")
    filtered_positives: Share = Field(0.01, description="share of the positives that are also filter pairs")
    filtered_positives_severity: Severity = Field("warn", description="of a larger share")


class Tokens(Section):
    """How texts become token ids."""

    text: Literal["title", "title+content"] = Field("title", description="short-text or long-text task")
    max_length: Annotated[int, Field(ge=3, le=512)] = Field(32, description="tokens a text, special tokens included")


class LabelGraph(Section):
    """The label graph: soft targets of label texts as queries (Gandalf)."""

    kind: Literal["cooccurrence", "random-walk", "glas", "self"] = Field(
        "cooccurrence",
        description="share of a label's queries that have the other; the same by random walks; symmetric (GLaS); "
        "each label for itself alone",
    )
    threshold: Share = Field(0.1, description="delta: weaker soft targets become 0")
    share: Annotated[float, Field(gt=0, le=1)] = Field(1.0, description="share of the labels whose text is a query")
    tail_first: bool = Field(False, description="with a share below 1: the rarest labels, else a random draw")


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens, or both side by side."""

    name: str = Field("all-MiniLM-L6-v2", description="transformer: an alias, a local folder or a hub name")
    kind: Literal["transformer", "bag", "both"] = Field("both", description="which encoders, concatenated")
    pooling: Literal["mean", "cls"] = Field("mean", description="how the transformer's token vectors become one")
    trainable_layers: Annotated[int, Field(ge=-1)] = Field(
        0, description="top transformer layers that train; 0: frozen, its vectors cached once; -1: all and embeddings"
    )
    bag_dropout: Share = Field(0.0, description="share of a text's tokens dropped from the bag in training")
    bag_words: Annotated[int, Field(ge=0, le=2**24)] = Field(
        0, description="rows of the bag that words of several pieces share by a hash; 0: pieces alone"
    )
    bag_head: Annotated[int, Field(ge=0)] = Field(
        0, description="tokens at a text's start with a bag of their own beside the whole text's: a title; 0: none"
    )
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="dropout of the encoder's output")
    residual: bool = Field(False, description="a residual network over a bag or a frozen transformer")
    start: str = Field("", description="exported model folder whose encoder and heads are the start; empty: none")
    frozen: bool = Field(False, description="nothing of the encoder trains: every text's vector is computed once")

    @property
    def unit_vectors(self) -> bool:
        """Whether the transformer's vectors are brought to unit length where a model does not say: those of one that
        trains alone are not; beside a bag both are, so that neither drowns the other."""
        return self.trainable_layers == 0 or self.kind != "transformer"


class Model(Section):
    """Heads and classifier table."""

    heads: Literal["both", "de", "clf"] = Field("both", description="dual encoder, classifier, or both (UniDEC)")
    dim: Count = Field(384, description="width of each head")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout of both heads")
    clf_init: Literal["xavier", "normal", "label_embedding"] = Field("label_embedding", description="start of Psi")
    clf_residual: bool = Field(
        False, description="a label's classifier row is its text's embedding plus a free vector (SiameseXML)"
    )
    clf_bias: bool = Field(False, description="a bias for each label in the classifier's scores")
    clf_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="number format of the classifier's rows; bf16 is written with stochastic rounding"
    )
    temperature: Positive = Field(1 / 18, description="tau of both heads")
    learn_temperature: bool = Field(False, description="train tau, one for each head")


class Pool(Section):
    """Batches, and the labels on which each batch's loss is computed."""

    batches: Literal["clustered", "random"] = Field("clustered", description="batches of similar queries, or random")
    batch_size: Count = Field(512, description="queries a batch (clusters have N / 2^depth <= this many)")
    cluster_start: Annotated[int, Field(ge=0)] = Field(
        0,
        description="queries a cluster at first, doubled at each refresh, whole clusters shuffled into a batch "
        "(NGAME; 1: random batches at first); 0: a cluster is a batch from the start",
    )
    beta: Count = Field(3, description="positives sampled for each query")
    positives: Literal["uniform", "tail"] = Field(
        "uniform", description="how they are drawn: all alike, or in proportion to their inverse propensity"
    )
    eta: Annotated[int, Field(ge=0)] = Field(6, description="hard negatives sampled for each query")
    size: Annotated[int, Field(ge=0)] = Field(3000, description="at most so many labels in a pool; 0: no limit")
    de_labels: Literal["pool", "all"] = Field(
        "pool", description="the dual encoder's loss runs over the pool, or over all labels' texts (DEXML)"
    )
    clf_labels: Literal["pool", "all"] = Field(
        "pool", description="the classifier's loss runs over the pool (UniDEC) or over all labels (for up to some 10^5)"
    )
    gandalf: bool = Field(
        False, description="label texts train as queries too, with the label graph's rows as soft targets (Gandalf)"
    )
    refresh: Count = Field(5, description="T: epochs between two refreshes of clusters and hard negatives")


class Loss(Section):
    """Losses on pool logits, reductions and weights."""

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = Field("psl", description="which positives take part")
    de: LossName = Field("ds", description="dual encoder's loss")
    clf: LossName = Field("ds", description="classifier's loss")
    clf_bce: Annotated[float, Field(ge=0)] = Field(1.0, description="weight of the auxiliary BCE on the classifier")
    bce_normalise: Literal["rows", "entries"] = Field(
        "entries", description="BCE as a mean over all entries, or its sum over a query's pool (thousands at the start)"
    )
    balance: Share = Field(0.5, description="lambda: weight of the dual encoder's loss; the classifier has the rest")
    de_forward: Share = Field(0.5, description="lambda_D: weight of query to label; label to query has the rest")
    clf_forward: Share = Field(0.5, description="lambda_C: the same for the classifier")
    margin: Annotated[float, Field(ge=0)] = Field(
        0.3, description="gamma of the triplet loss (cosine units), and of the squared hinge"
    )
    triplet_negatives: Literal["all", "hardest"] = Field(
        "all", description="the triplet loss sums over a pool's negatives, or takes the hardest"
    )
    topk: Count = Field(5, description="k of the soft top-k loss")
    weights: Literal["none", "propensity"] = Field(
        "none", description="propensity: each positive's loss counts its inverse propensity (unbiased for the tail)"
    )


class Optim(Section):
    """Optimisers and schedule."""

    epochs: Count = Field(20, description="passes over the training queries")
    lr_encoder: Positive = Field(1e-4, description="learning rate of the transformer")
    lr_bag: Positive = Field(1e-3, description="learning rate of the bag of tokens")
    lr_heads: Positive = Field(2e-4, description="learning rate of both heads")
    lr_clf: Positive = Field(1e-3, description="learning rate of the classifier table")
    clf_state: Literal["adam", "adagrad", "sgd"] = Field(
        "adam", description="what the classifier's optimiser keeps: two moments a value, one value a row, or nothing"
    )
    warmup_epochs: Annotated[float, Field(ge=0)] = Field(1.0, description="epochs of linear warm-up before the cosine")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.05, description="of the transformer's and heads' matrices")
    clip_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="gradient norm limit; 0: none")
    encode_chunk: Annotated[int, Field(ge=0)] = Field(
        0,
        description="texts whose activations are held at once: gradients are cached and dropout replayed, for pools "
        "that do not fit otherwise; 0: all",
    )
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where it is faster")


class Index(Section):
    """The label index and how both heads' scores are blended."""

    kind: Literal["flat", "sq8", "pq", "hnsw", "hnsw-sq8", "ivf-sq8", "ivf-pq"] = Field(
        "flat",
        description="flat: exact; sq8, pq: compressed, what they find is scored exactly; hnsw: a graph; ivf: lists; "
        "`unidec index tune` measures them all",
    )
    space: Literal["both", "de", "clf"] = Field("both", description="which head's vectors are searched")
    hnsw_links: Count = Field(32, description="M of HNSW")
    hnsw_build: Count = Field(200, description="efConstruction of HNSW")
    hnsw_search: Count = Field(200, description="efSearch of HNSW")
    ivf_lists: Annotated[int, Field(ge=0)] = Field(
        0, description="lists of ivf; 0: 16 x the square root of the number of labels, of at least 64 labels each"
    )
    ivf_probes: Annotated[int, Field(ge=0)] = Field(0, description="lists a search looks into; 0: a 12th of them")
    pq_dims: Count = Field(4, description="dimensions that share a code of 4 bits in pq and ivf-pq")
    rescore: Count = Field(8, description="candidates for each result that a compressed kind scores exactly")
    clf_weight: Positive | Literal["auto"] = Field(
        1.0, description="weight of the classifier's score beside the dual encoder's; auto: tuned on validation"
    )
    clf_normalize: bool = Field(True, description="cosine of the classifier (the paper), or its raw score")
    knn_weight: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0, description="weight of the votes of similar training queries; 0: none, auto: tuned on validation"
    )
    knn_neighbours: Count = Field(100, description="training queries that vote")
    knn_by: Literal["model", "words"] = Field(
        "model", description="queries are similar by the model's vectors, or by their words and pairs of words (TF-IDF)"
    )


class Run(Section):
    """Where training runs and how often it saves: nothing here changes what is learnt."""

    devices: Count = Field(1, description="processes that train together, a GPU each (more than 1: torchrun)")
    restarts: Annotated[int, Field(ge=0)] = Field(
        0, description="how often they start anew, from the newest checkpoint, after one of them died"
    )
    table_place: Literal["device", "host", "disk"] = Field(
        "device", description="where the classifier's rows and their optimiser's state live"
    )
    checkpoint_minutes: Annotated[float, Field(ge=0)] = Field(
        5.0, description="minutes between two checkpoints within a round; 0: only at its end"
    )
    checkpoint_steps: Annotated[int, Field(ge=0)] = Field(
        0, description="the same in steps, each waited for until it is durable; 0: by the clock only"
    )
    recompute: bool = Field(
        False, description="compute the transformer's activations again in backward: less memory, a third more work"
    )
    check_memory: bool = Field(True, description="refuse to start what `unidec plan` says does not fit")


class Source(Section):
    """Where a retraining fetches new raw data from, into `data.path`; secrets never stand here."""

    kind: Literal["none", "folder", "files", "dvc"] = Field(
        "none", description="none: data.path as it is; a folder; three table files; what DVC imports or pulls"
    )
    path: str = Field("", description="the folder, or DVC's target: data/raw/mine or data/raw/mine.dvc")
    queries: str = Field("", description="files: table of queries (csv, tsv, parquet, jsonl)")
    labels: str = Field("", description="files: table of labels")
    pairs: str = Field("", description="files: table of pairs")
    revision: str = Field("", description="dvc: git revision of an import; empty: as the import says")
    secrets: dict[str, str] = Field(
        {}, description="environment variable: name of the Prefect secret block that has its value"
    )


class Warm(Section):
    """A training that starts from an earlier model (data/start.json says which)."""

    epochs: Count = Field(4, description="passes over the training queries")
    lr_scale: Positive = Field(0.7, description="times every learning rate")
    warmup_epochs: Annotated[float, Field(ge=0)] = Field(0.25, description="epochs of linear warm-up")
    keep: Share = Field(
        0.25, description="share of a classifier row that is taken over; the rest begins as the label's text"
    )


class Retrain(Section):
    """What a retraining does around training."""

    start: Literal["auto", "warm", "cold"] = Field(
        "auto", description="from the champion, or from nothing; auto: from the champion, from nothing every so often"
    )
    cold_every: Annotated[int, Field(ge=0)] = Field(
        10, description="auto: a start from nothing after so many from a champion in a row; 0: only the first"
    )
    promote: bool = Field(True, description="a challenger that passes the gate becomes champion")
    push: bool = Field(False, description="`dvc push` what was made")
    commit: Literal["none", "commit", "tag"] = Field(
        "none", description="commit dvc.lock and metrics in git, or commit and tag them with the model's version"
    )
    notify: list[str] = Field([], description='Prefect notification blocks that are told, e.g. "slack-webhook/team"')


class Gate(Section):
    """What a challenger must show before it becomes champion; points are percent points on the test split."""

    metric: Metric = Field("nDCG@5", description="the metric that decides")
    margin: float = Field(0.0, description="points that the challenger must be ahead of the champion")
    confidence: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="of the paired bootstrap that it is ahead by at least the margin; 0: not asked for"
    )
    tolerance: Annotated[float, Field(ge=0)] = Field(0.5, description="points that a guarded metric may lose")
    guarded: list[Metric] = Field(
        ["P@1", "PSP@5", "tail/R@10", "coverage@5"], description="metrics that may not lose more than that"
    )
    max_latency_ms: Annotated[float, Field(ge=0)] = Field(
        0.0, description="95th percentile of one query's answer in a fresh process, by the wall clock; 0: no limit"
    )
    max_latency_ratio: Annotated[float, Field(ge=0)] = Field(
        2.0, description="the same in processor time, times the champion's; 0: none"
    )
    max_megabytes: Annotated[float, Field(ge=0)] = Field(0.0, description="size of the bundle; 0: no limit")
    max_size_ratio: Annotated[float, Field(ge=0)] = Field(1.5, description="the same, times the champion's; 0: none")
    max_load_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="until a fresh process answers, by the wall clock; 0: no limit"
    )
    max_load_ratio: Annotated[float, Field(ge=0)] = Field(
        2.0, description="the same in processor time, times the champion's; 0: none"
    )
    probes: Count = Field(64, description="queries that a fresh process must answer")
    allow_dirty: bool = Field(False, description="promote also what was made with uncommitted changes")


class Drift(Section):
    """How far data may move from the version that the champion was trained on; shares from 0 to 1."""

    warn_change: Annotated[float, Field(ge=0)] = Field(
        0.1, description="relative change of a count, a length or a share that warns"
    )
    stop_change: Annotated[float, Field(ge=0)] = Field(0.5, description="... that stops a retraining")
    warn_distance: Share = Field(0.1, description="distance of two distributions (Jensen-Shannon) that warns")
    stop_distance: Share = Field(0.5, description="... that stops a retraining")
    warn_shift: Annotated[float, Field(ge=0)] = Field(
        0.2, description="shift of a window's mean embedding that warns, in standard deviations of single queries"
    )
    warn_low_score: Share = Field(0.2, description="share of a window's queries with a low top score that warns")
    low_score_quantile: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.05, description="top scores below this quantile of the validation queries' count as low"
    )
    min_window: Count = Field(200, description="queries that a window needs to be judged")


class Serve(Section):
    """`unidec serve`: where it listens, and what it bounds."""

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0: all, then set an API key")
    port: Annotated[int, Field(ge=0, le=65535)] = Field(8080, description="0: any free one")
    hosts: list[str] = Field(
        [],
        description="names by which it may be asked (header Host), beside addresses and localhost; empty: no others on "
        "127.0.0.1 without an API key, else any",
    )
    max_body_bytes: Count = Field(1_000_000, description="of a request")
    max_queries: Count = Field(256, description="of a request")
    max_query_chars: Count = Field(8000, description="of a query")
    max_k: Count = Field(100, description="labels for each query")
    max_filter_labels: Count = Field(10_000, description="in a request's lists of allowed and denied labels")
    max_connections: Count = Field(1024, description="at once; beyond them 503")
    queue_queries: Count = Field(1024, description="queries that may wait; beyond them 503 with Retry-After")
    timeout_seconds: Positive = Field(5.0, description="a request that waits longer gets 503")
    batch_queries: Count = Field(32, description="queries answered together at most")
    batch_wait_ms: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="an idle model waits so long for as many queries as came together before, one alone never. 0: "
        "queries gather while it works, which is as good on a CPU; on a GPU 1 or 2 may pay",
    )
    runtime: Literal["auto", "torch", "onnx", "onnx-int8"] = Field(
        "auto", description="what encodes queries; auto: the fastest that keeps quality (docs/serving.md)"
    )
    threads: Annotated[int, Field(ge=0)] = Field(0, description="of encoder and search; 0: what the machine has")
    cache_queries: Annotated[int, Field(ge=0)] = Field(10_000, description="answers kept for repeated queries; 0: none")
    follow_seconds: Annotated[float, Field(ge=0)] = Field(
        10.0, description="between two looks at the alias in the registry; 0: never"
    )
    keep_previous: bool = Field(True, description="keep the model before in memory, to swap back at once")
    api_key_env: str = Field(
        "UNIDEC_API_KEY", description="environment variable with the API key; none is asked for where it is not set"
    )


class Tracking(Section):
    """Names under which MLflow keeps runs and models; the tracking server is the usual environment variable."""

    experiment: str = Field("unidec", description="MLflow experiment")
    model_name: str = Field("unidec", description="registered model")


class Params(Section):
    """All of params.yaml."""

    recipe: str | None = Field(None, description="a shipped way to train, in unidec/recipes; the keys here override it")
    seed: Seed = Field(0, description="seed of everything random in training")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    data: Data = Data()
    raw: RawBounds = RawBounds()
    validation: Validation = Validation()
    tokens: Tokens = Tokens()
    label_graph: LabelGraph = LabelGraph()
    encoder: Encoder = Encoder()
    model: Model = Model()
    pool: Pool = Pool()
    loss: Loss = Loss()
    optim: Optim = Optim()
    index: Index = Index()
    run: Run = Run()
    source: Source = Source()
    warm: Warm = Warm()
    retrain: Retrain = Retrain()
    gate: Gate = Gate()
    drift: Drift = Drift()
    serve: Serve = Serve()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        found = find_conflicts(self)
        if found:
            raise PydanticCustomError("conflict", "{text}", {"text": "; ".join(conflict.what for conflict in found)})
        return self
