"""params.yaml as frozen, typed sections: unknown keys refused, all errors at once, presets, fingerprint.

`load_params` is called by the command line and the flows only; everything else takes one section or plain arguments.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from unidec.errors import ConfigError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A frozen group of parameters that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


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
    split_seed: int = Field(0, description="seed of both splits")
    propensity_a: Positive = Field(0.55, description="A of the inverse propensities: a property of the data set")
    propensity_b: Annotated[float, Field(ge=0)] = Field(1.5, description="B of the inverse propensities")


class Tokens(Section):
    """How texts become token ids."""

    text: Literal["title", "title+content"] = Field("title", description="short-text or long-text task")
    max_length: Annotated[int, Field(ge=3, le=512)] = Field(32, description="tokens a text, special tokens included")


class LabelGraph(Section):
    """The label co-occurrence graph (Gandalf)."""

    threshold: Share = Field(0.1, description="delta: weaker soft targets become 0")


class Encoder(Section):
    """Text -> vector: a transformer, a bag of tokens, or both side by side."""

    name: str = Field("all-MiniLM-L6-v2", description="transformer: an alias, a local folder or a hub name")
    kind: Literal["transformer", "bag", "both"] = Field("both", description="which encoders, concatenated")
    pooling: Literal["mean", "cls"] = Field("mean", description="how the transformer's token vectors become one")
    trainable_layers: Annotated[int, Field(ge=-1)] = Field(
        0, description="top transformer layers that train; 0: frozen, its vectors cached once; -1: all and embeddings"
    )
    bag_dropout: Share = Field(0.0, description="share of a text's tokens dropped from the bag in training")


class Model(Section):
    """Heads and classifier table."""

    heads: Literal["both", "de", "clf"] = Field("both", description="dual encoder, classifier, or both (UniDEC)")
    dim: Count = Field(384, description="width of each head")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.1, description="dropout of both heads")
    clf_init: Literal["xavier", "normal", "label_embedding"] = Field("label_embedding", description="start of Psi")
    clf_bias: bool = Field(False, description="a bias for each label in the classifier's scores")
    temperature: Positive = Field(1 / 18, description="tau of both heads")
    learn_temperature: bool = Field(False, description="train tau, one for each head")


class Pool(Section):
    """Batches, and the labels on which each batch's loss is computed."""

    batches: Literal["clustered", "random"] = Field("clustered", description="batches of similar queries, or random")
    batch_size: Count = Field(512, description="queries a batch (clusters have N / 2^depth <= this many)")
    beta: Count = Field(3, description="positives sampled for each query")
    eta: Annotated[int, Field(ge=0)] = Field(6, description="hard negatives sampled for each query")
    size: Annotated[int, Field(ge=0)] = Field(3000, description="at most so many labels in a pool; 0: no limit")
    refresh: Count = Field(5, description="T: epochs between two refreshes of clusters and hard negatives")


class Loss(Section):
    """Losses on pool logits, reductions and weights."""

    reduction: Literal["psl", "psl-sum", "pal-n", "pol"] = Field("psl", description="which positives take part")
    de: Literal["ds", "supcon", "infonce", "triplet", "bce"] = Field("ds", description="dual encoder's loss")
    clf: Literal["ds", "supcon", "infonce", "triplet", "bce"] = Field("ds", description="classifier's loss")
    clf_bce: Annotated[float, Field(ge=0)] = Field(1.0, description="weight of the auxiliary BCE on the classifier")
    balance: Share = Field(0.5, description="lambda: weight of the dual encoder's loss; the classifier has the rest")
    de_forward: Share = Field(0.5, description="lambda_D: weight of query to label; label to query has the rest")
    clf_forward: Share = Field(0.5, description="lambda_C: the same for the classifier")
    margin: Annotated[float, Field(ge=0)] = Field(0.3, description="gamma of the triplet loss (cosine units)")


class Optim(Section):
    """Optimisers and schedule."""

    epochs: Count = Field(20, description="passes over the training queries")
    lr_encoder: Positive = Field(1e-4, description="learning rate of the transformer")
    lr_bag: Positive = Field(1e-3, description="learning rate of the bag of tokens")
    lr_heads: Positive = Field(2e-4, description="learning rate of both heads")
    lr_clf: Positive = Field(1e-3, description="learning rate of the classifier table")
    warmup_epochs: Annotated[float, Field(ge=0)] = Field(1.0, description="epochs of linear warm-up before the cosine")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.05, description="not on biases, norms, embeddings and Psi")
    clip_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="gradient norm limit; 0: none")
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 where it is faster")


class Index(Section):
    """The label index and how both heads' scores are blended."""

    kind: Literal["flat", "hnsw"] = Field("flat", description="exact, or a graph for many labels")
    space: Literal["both", "de", "clf"] = Field("both", description="which head's vectors are searched")
    hnsw_links: Count = Field(32, description="M of HNSW")
    hnsw_build: Count = Field(200, description="efConstruction of HNSW")
    hnsw_search: Count = Field(200, description="efSearch of HNSW")
    clf_weight: float | Literal["auto"] = Field(
        1.0, description="weight of the classifier's score beside the dual encoder's; auto: tuned on validation"
    )
    clf_normalize: bool = Field(True, description="cosine of the classifier (the paper), or its raw score")


class Tracking(Section):
    """Names under which MLflow keeps runs and models; the tracking server is the usual environment variable."""

    experiment: str = Field("unidec", description="MLflow experiment")
    model_name: str = Field("unidec", description="registered model")


class Params(Section):
    """All of params.yaml."""

    preset: str | None = Field(None, description="a shipped set of values that the file's own keys override")
    seed: int = Field(0, description="seed of everything random in training")
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
    tracking: Tracking = Tracking()
