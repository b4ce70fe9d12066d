"""Stages from raw files to what training reads."""

from __future__ import annotations

from typing import Any, Literal

from unidec.config import Params
from unidec.data.dataset import write_dataset
from unidec.data.formats import find_rows, read_section
from unidec.data.label_graph import build_label_graph, load_label_graph
from unidec.data.propensity import build_propensity, load_propensity
from unidec.data.tokens import TokenCache, build_token_cache
from unidec.errors import DataError
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.pipeline.lock import replaces_inputs

TEXTS_A_BATCH = 4096


@replaces_inputs()
def ingest(params: Params) -> dict[str, Any]:
    """Raw files of any known layout -> data/dataset; the validation split is cut here."""
    data = params.data
    dataset = write_dataset(
        paths.DATASET,
        read_section(data, params.raw),
        validation_share=data.validation_share,
        split_seed=data.split_seed,
    )
    facts = {key: dataset.manifest["meta"][key] for key in ("name", "format", "num_labels", "num_pairs")}
    return {**facts, **dataset.manifest["meta"]["splits"], "sha256": dataset.sha256}


def validate(params: Params) -> dict[str, Any]:
    """Great Expectations over the data set -> data/validation; the gate before training.

    Raises:
        DataError: an expectation of severity critical failed.
    """
    from unidec.validation.suite import validate_dataset

    def find(queries: list[str], labels: list[str]) -> tuple[dict[str, str], dict[str, str]]:
        files = paths.open_dataset().manifest["meta"]["raw_files"]
        return find_rows(params.data, params.raw, files, queries, labels)

    result = validate_dataset(paths.DATASET, paths.VALIDATION, limits=params.validation, find=find)
    page = str(paths.VALIDATION / "index.html")
    if not result["success"]:
        raise DataError(
            "the data is not fit to train on",
            where=page,
            got="\n    ".join(["", *result["failed"]]),
            fix="correct the rows; or raise the bound that is named, or set its ..._severity to warn, in section "
            "validation of the parameters. Nothing was trained",
        )
    return {
        "success": True,
        "expectations": len(result["expectations"]),
        "warnings": dict(enumerate(result["warnings"], 1)),
        "page": page,
    }


@replaces_inputs()
def tokens(params: Params) -> dict[str, Any]:
    """Texts -> data/tokens/{queries,labels}."""
    dataset = paths.open_dataset()
    folder = resolve_encoder(params.encoder.name)
    summary: dict[str, Any] = {}
    sizes: dict[Literal["queries", "labels"], int] = {"queries": dataset.num_queries, "labels": dataset.num_labels}
    for which, num_texts in sizes.items():
        path = paths.TOKENS / which
        batches = dataset.text_batches(which, params.tokens.text, TEXTS_A_BATCH)
        build_token_cache(batches, folder, params.tokens.max_length, path, num_texts, {"text": params.tokens.text})
        summary[f"{which}_texts"] = num_texts
        summary[f"{which}_tokens"] = int(TokenCache.open(path, verify=False).offsets[-1])
    return summary


@replaces_inputs()
def propensity(params: Params) -> dict[str, Any]:
    """Inverse propensities and frequency groups -> data/propensity."""
    build_propensity(paths.open_dataset(), params.data.propensity_a, params.data.propensity_b, paths.PROPENSITY)
    made = load_propensity(paths.PROPENSITY, verify=False)
    names = ("tail", "torso", "head")
    groups = {f"{name}_labels": int((made.group_L == number).sum()) for number, name in enumerate(names)}
    return {"a": made.a, "b": made.b, **groups}


@replaces_inputs()
def label_graph(params: Params) -> dict[str, Any]:
    """Soft targets of label texts -> data/label_graph."""
    build_label_graph(paths.open_dataset(), params.label_graph, paths.LABEL_GRAPH)
    graph = load_label_graph(paths.LABEL_GRAPH)
    texts = int((graph.indptr[1:] > graph.indptr[:-1]).sum())
    return {"labels": graph.shape[0], "texts": texts, "edges": int(graph.nnz)}
