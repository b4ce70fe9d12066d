"""Sections of params.yaml: where data comes from, how it is read, checked and split, and what texts
become.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, cast

from pydantic import Field

from unidec.config.section import (
    Count,
    CountOrZero,
    Decides,
    NonNegative,
    Positive,
    Section,
    Seed,
    Share,
    matching,
)

Severity = Literal["error", "warn", "off"]


class Data(Section):
    """Location of the raw data, and how queries are split."""

    decides = ("data",)

    # the files decide, not their place
    path: Annotated[str, Decides("operation")] = "data/raw/lf-debian"
    """folder with the raw files"""
    format: Literal["auto", "xmc-json", "xmc-text", "pecos", "beir", "tables"] = "auto"
    """layout of the raw files (docs/data.md); auto: recognised by the file names"""
    validation_share: Annotated[float, Field(ge=0, lt=0.5)] = 0.05
    """share of the training queries held out for validation, if the data has no validation split"""
    validation_sample: Annotated[CountOrZero, Decides("evaluation")] = 0
    """training queries to compute metrics on if there is no validation split"""
    test_share: Annotated[float, Field(ge=0, lt=0.9)] = 0.2
    """share of queries to test on, if no split is given"""
    split_seed: Seed = 0
    """random seed of the validation and test splits"""
    propensity_a: Annotated[Positive, Decides("propensity")] = 0.55
    """constant A of the inverse propensities (Jain et al. 2016), set per data set"""
    propensity_b: Annotated[NonNegative, Decides("propensity")] = 1.5
    """constant B of the inverse propensities, set per data set"""


class RawBounds(Section):
    """Limits of raw files and other tables, and how quotes in them are read."""

    quotes: Annotated[Literal["auto", "yes", "no"], Decides("data")] = "auto"
    """quotes enclose fields of .csv and .tsv files (docs/data.md)"""
    max_row_bytes: Annotated[int, Field(ge=1000, le=2**30)] = 16 << 20
    """maximum bytes per line or CSV row"""
    max_text_chars: Count = 1_000_000
    """maximum characters per title or content"""
    max_unpack_ratio: Count = 50
    """maximum unpacked size as a multiple of the file's size; 64 MB always allowed"""


class Limit(NamedTuple):
    """An allowed share of rows, and what a larger share is."""

    share: float
    severity: Severity


LimitText = Annotated[
    str,
    matching(
        r"((0(\.\d+)?|1(\.0+)?) )?(error|warn|off)",
        "limit",
        'a share and a severity, as in "0.01 error"; or error, warn or off alone',
    ),
]


class Validation(Section):
    """Checks of the data: the allowed share of such rows, and whether a larger one is an error (no
    training), a warning, or not checked: "0.01 error"; a severity alone keeps the default share.
    """

    decides = ("checks",)

    empty_texts: LimitText = "0.01 error"
    """allowed share of queries, and of labels, with an empty text"""
    test_texts_in_train: LimitText = "0.01 error"
    """allowed share of test queries whose text is also a training query's"""
    queries_without_positives: LimitText = "0.5 error"
    """allowed share of queries without positives"""
    labels_without_training_points: LimitText = "0.5 error"
    """allowed share of labels without training queries"""
    label_texts_given_twice: LimitText = "0.2 error"
    """allowed share of labels with the text, or the tokens, of another label"""
    unknown_tokens: LimitText = "0.1 error"
    """allowed share of a text's tokens that the tokenizer does not know, on average"""
    filtered_positives: LimitText = "0.01 warn"
    """allowed share of positives that are also filter pairs"""

    def limit(self, name: str) -> Limit:
        """The limit of one of these keys."""
        share, _, severity = getattr(self, name).rpartition(" ")
        if not share:
            share = type(self).model_fields[name].default.partition(" ")[0]
        return Limit(float(share), cast(Severity, severity))


class Tokens(Section):
    """How texts become token ids."""

    decides = ("checks", "tokens")

    text: Literal["title", "title+content"] = "title"
    """text fields that the model reads"""
    max_length: Annotated[int, Field(ge=3, le=8192)] = 32
    """maximum tokens per text, special ones included; at most the encoder's limit"""


class LabelGraph(Section):
    """The label graph: soft targets for label texts that serve as training queries (Gandalf)."""

    decides = ("label_graph",)

    kind: Literal["cooccurrence", "random-walk", "glas", "self"] = "cooccurrence"
    """soft targets by shared queries, by random walks, symmetric (GLaS), or the label itself only
    """
    threshold: Share = 0.1
    """delta: soft targets up to this value are set to 0"""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """share of the labels whose text is used as a query"""
    tail_first: bool = False
    """if label_graph.share is below 1: use the rarest labels instead of random ones"""


class Source(Section):
    """The source of new raw data, which a retraining copies to `data.path`. Secrets are named here,
    never stored.
    """

    kind: Literal["none", "folder", "files", "dvc"] = "none"
    """origin of new raw data; none: keep what is there"""
    path: str = ""
    """kind folder: its path; kind dvc: the DVC target, such as data/raw/mine or data/raw/mine.dvc
    """
    queries: str = ""
    """kind files: path of the table of queries (csv, tsv, parquet, jsonl)"""
    labels: str = ""
    """kind files: path of the table of labels"""
    pairs: str = ""
    """kind files: path of the table of pairs"""
    revision: str = ""
    """kind dvc: git revision of an imported target; empty: the one that the import names"""
    secrets: dict[str, str] = {}
    """Prefect Secret block for each environment variable of DVC's processes"""
