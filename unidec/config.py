"""params.yaml as frozen, typed sections: unknown keys refused, all errors at once, recipes, fingerprint.

`load_params` is called by the command line and the flows only; everything else takes one section or plain arguments.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from unidec.conflicts import find_conflicts
from unidec.errors import ConfigError
from unidec.problems import ParamsError, nearest, problem, short, valid_values
from unidec.strict_yaml import KeyPath, parse_scalar, read_yaml

Seed = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
LossName = Literal["ds", "supcon", "infonce", "triplet", "bce", "hinge", "softtopk"]


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

    kind: Literal["flat", "hnsw"] = Field("flat", description="exact, or a graph for many labels")
    space: Literal["both", "de", "clf"] = Field("both", description="which head's vectors are searched")
    hnsw_links: Count = Field(32, description="M of HNSW")
    hnsw_build: Count = Field(200, description="efConstruction of HNSW")
    hnsw_search: Count = Field(200, description="efSearch of HNSW")
    clf_weight: Positive | Literal["auto"] = Field(
        1.0, description="weight of the classifier's score beside the dual encoder's; auto: tuned on validation"
    )
    clf_normalize: bool = Field(True, description="cosine of the classifier (the paper), or its raw score")
    knn_weight: Annotated[float, Field(ge=0)] | Literal["auto"] = Field(
        0.0, description="weight of the votes of similar training queries; 0: none, auto: tuned on validation"
    )
    knn_neighbours: Count = Field(100, description="training queries that vote")


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
    tokens: Tokens = Tokens()
    label_graph: LabelGraph = LabelGraph()
    encoder: Encoder = Encoder()
    model: Model = Model()
    pool: Pool = Pool()
    loss: Loss = Loss()
    optim: Optim = Optim()
    index: Index = Index()
    run: Run = Run()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _no_conflicts(self) -> Self:
        found = find_conflicts(self)
        if found:
            raise PydanticCustomError("conflict", "{text}", {"text": "; ".join(conflict.what for conflict in found)})
        return self


def leaves(params: Section) -> Iterator[tuple[str, Any]]:
    """Each parameter as (`section.key`, value), in the order of the file."""
    for name in type(params).model_fields:
        value = getattr(params, name)
        if isinstance(value, Section):
            yield from ((f"{name}.{key}", leaf) for key, leaf in leaves(value))
        else:
            yield name, value


def known_keys() -> list[str]:
    """Every key path that a parameter file may hold."""
    return [key for key, _ in leaves(Params())]


def recipe_names() -> list[str]:
    """Names of the shipped recipes."""
    folder = resources.files("unidec") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_params(path: str | Path = "params.yaml", overrides: Mapping[str, Any] | None = None) -> Params:
    """Read a parameter file: its recipe's values, then its own, then `overrides`.

    Args:
        path: YAML file with the sections of `Params`; a missing key has its recipe's value, else the default.
        overrides: `{"pool.beta": 2}`: values by key path.

    Raises:
        ConfigError: everything that is wrong, at once, with key path, value, what was expected and the nearest name.
    """
    path = Path(path)
    raw, lines = read_yaml(path)
    origin = {".".join(key): f"line {line}" for key, line in lines.items()}
    values = _no_empty_sections(raw)
    for key, value in (overrides or {}).items():
        _put(values, tuple(key.split(".")), value)
        origin[key] = "--set"
    return build_params(values, origin, str(path))


def build_params(values: dict[str, Any], origin: dict[str, str], where: str) -> Params:
    """Nested values over those of their recipe; `origin` says where a key path was given. Errors: `load_params`."""
    recipe = values.get("recipe")
    problems: list[str] = []
    if isinstance(recipe, str):
        if recipe in recipe_names():
            values = _merge(_read_recipe(recipe), values)
        else:
            names = recipe_names()
            expected, near = f"one of {', '.join(names)}", nearest(recipe, names)
            problems.append(problem("recipe", "no such recipe", short(recipe), expected, origin, near))
    params, found = _validate(values, origin)
    if found or problems or params is None:
        raise ParamsError(problems + found, where)
    return params


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """`["pool.beta=2"]` -> `{"pool.beta": 2}`; values are read as YAML would read them.

    Raises:
        ConfigError: an assignment without `=`, or a key given twice.
    """
    overrides: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key.strip():
            raise ConfigError("not an assignment", where="--set", got=assignment, expected="section.key=value")
        if key.strip() in overrides:
            raise ConfigError(f"{key.strip()} is set twice", where="--set", got=assignment, fix="keep one of the two")
        overrides[key.strip()] = parse_scalar(text)
    return overrides


def flatten(params: Params) -> dict[str, str | int | float]:
    """Every parameter by its key path, as a tracking server takes it: true/false in words, none as an empty word."""
    words = {True: "true", False: "false", None: ""}
    return {key: words[value] if value is None or isinstance(value, bool) else value for key, value in leaves(params)}


def fingerprint(params: Params, *sections: str) -> str:
    """sha256 (hex) over the canonical JSON of the named sections or key paths; when none is named, of all.

    The recipe's name is never part of all: the values that it stands for are.
    """
    wanted = {
        key: value
        for key, value in leaves(params)
        if (not sections and key != "recipe") or any(key == name or key.startswith(f"{name}.") for name in sections)
    }
    missing = [name for name in sections if not any(key == name or key.startswith(f"{name}.") for key in wanted)]
    if missing:
        raise KeyError(f"no such parameters: {', '.join(missing)}")
    text = json.dumps(wanted, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _read_recipe(name: str) -> dict[str, Any]:
    """A shipped recipe's values. It says how to train, not on what or where: it has no data, seed or device."""
    with resources.as_file(resources.files("unidec") / "recipes" / f"{name}.yaml") as path:
        values = _no_empty_sections(read_yaml(path)[0])
    unfit = sorted({"recipe", "data", "seed", "device", "run", "tracking"} & values.keys())
    if unfit:
        raise ConfigError(f"a recipe cannot set {', '.join(unfit)}", where=f"recipe {name}")
    return values


def _no_empty_sections(raw: dict[str, Any]) -> dict[str, Any]:
    """A section whose keys are all commented out reads as null: that is an empty section."""
    sections = {key for key, field in Params.model_fields.items() if isinstance(field.default, Section)}
    return {key: {} if value is None and key in sections else value for key, value in raw.items()}


def _put(values: dict[str, Any], key: KeyPath, value: Any) -> None:
    for name in key[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[key[-1]] = value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _validate(values: dict[str, Any], origin: dict[str, str]) -> tuple[Params | None, list[str]]:
    """Validated parameters, or every problem: the wrong keys, and the conflicts among those that are right."""
    try:
        return Params.model_validate(values), []
    except ValidationError as error:
        details = [detail for detail in error.errors(include_url=False) if detail["type"] != "conflict"]
    by_key: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        by_key.setdefault(_key_path(detail), []).append(detail)
    problems = [_field_problem(key, group, origin) for key, group in by_key.items()]
    # with the wrong keys at their defaults the rest can be checked for conflicts
    rest = Params.model_construct(**_sections_without(values, set(by_key)))
    for conflict in find_conflicts(rest):
        paths = [tuple(key.split(".")) for key in conflict.keys]
        if not any(bad == path[: len(bad)] for bad in by_key for path in paths):
            got = ", ".join(f"{key} = {_value(rest, key)!r}" for key in conflict.keys)
            problems.append(problem(conflict.keys[0], conflict.what, got, None, origin, None, conflict.fix))
    return None, problems


def _sections_without(values: dict[str, Any], bad: set[KeyPath]) -> dict[str, Any]:
    """The sections and plain keys of `values`, validated, those in `bad` at their defaults."""
    kept: dict[str, Any] = {}
    for name, value in values.items():
        field = Params.model_fields.get(name)
        if field is None or (name,) in bad:
            continue
        if isinstance(field.default, Section):
            value = type(field.default)(**{key: leaf for key, leaf in value.items() if (name, key) not in bad})
        kept[name] = value
    return kept


def _value(params: Params, key: str) -> Any:
    return dict(leaves(params))[key]


def _key_path(detail: ErrorDetails) -> KeyPath:
    """The key path of an error, without what pydantic adds behind it (the member of a union)."""
    names = tuple(str(part) for part in detail["loc"])
    field = Params.model_fields.get(names[0]) if names else None
    depth = 2 if field is not None and isinstance(field.default, Section) else 1
    return names[:depth]


def _field_problem(key: KeyPath, group: list[ErrorDetails], origin: dict[str, str]) -> str:
    """One problem from all that pydantic says about one key."""
    name, got = ".".join(key), short(group[0]["input"])
    kinds = {detail["type"] for detail in group}
    if "extra_forbidden" in kinds:
        section = Params.model_fields[key[0]].default if len(key) > 1 else Params()
        known = f"one of {', '.join(type(section).model_fields)}"
        return problem(name, "unknown key", got, known, origin, _nearest_key(key))
    if kinds & {"model_type", "model_attributes_type"}:
        section = Params.model_fields[key[0]].default
        return problem(name, "not a section", got, f"keys under it: {', '.join(type(section).model_fields)}", origin)
    expected = " or ".join(dict.fromkeys(valid_values(detail) for detail in group))
    near = None
    options = [str(option) for detail in group for option in detail.get("ctx", {}).get("expected", "").split("'")[1::2]]
    if isinstance(group[0]["input"], str):
        near = nearest(group[0]["input"], options)
    return problem(name, "wrong value", got, expected, origin, near)


def _nearest_key(key: KeyPath) -> str | None:
    """The valid key that was probably meant: of the same name, else like it in the same section, else like it."""
    by_name = {name.rpartition(".")[2]: name for name in known_keys()}
    if key[-1] in by_name:
        return by_name[key[-1]]
    if len(key) > 1:
        siblings = list(type(Params.model_fields[key[0]].default).model_fields)
        near = nearest(key[-1], siblings)
        if near:
            return f"{key[0]}.{near}"
    near = nearest(key[-1], [*Params.model_fields, *by_name])
    return by_name.get(near, near) if near else None


def to_yaml(params: Params) -> str:
    """Every parameter as a file that loads to the same values."""
    return yaml.safe_dump(params.model_dump(exclude={"recipe"}), sort_keys=False, allow_unicode=True)


def describe() -> Iterator[tuple[str, str, str, str]]:
    """Each parameter as (key path, default, what it takes, what it does)."""
    schema = Params.model_json_schema()
    for key, default in leaves(Params()):
        section, _, name = key.rpartition(".")
        group = schema["$defs"][schema["properties"][section]["$ref"].rpartition("/")[2]] if section else schema
        entry = group["properties"][name or key]
        yield key, json.dumps(default), _takes(entry), entry.get("description", "")


def _takes(entry: dict[str, Any]) -> str:
    """A JSON schema of one value, in words."""
    if "anyOf" in entry:
        return " or ".join(_takes(option) for option in entry["anyOf"])
    if "enum" in entry or "const" in entry:
        return ", ".join(str(value) for value in entry.get("enum", [entry.get("const")]))
    kinds = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "null": "none",
    }
    words = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    bounds = [f"{sign} {entry[name]:g}" for name, sign in words.items() if name in entry]
    return " ".join([kinds.get(entry.get("type", ""), "value"), *bounds])
