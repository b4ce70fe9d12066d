"""Stage `evaluate`: the bundle on the test split -> metrics, plots, predictions, report."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unidec.config import Params
from unidec.data.storage import read_json_lines, write_bytes_atomic, write_json
from unidec.evaluation.baselines import COMPARED, compare_with_baselines, measure_baselines, verdict, warnings
from unidec.evaluation.metrics import frequency_bins, pair_keys
from unidec.evaluation.page import write_page
from unidec.evaluation.report import plots_csv, render
from unidec.metric_names import GROUPS
from unidec.model.search import exact_search
from unidec.pipeline import paths
from unidec.pipeline.ranking import QUERIES_AT_ONCE, K, Ranking, headline
from unidec.pipeline.report import Evaluated, report_input
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.start import read_start
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.index import recall
from unidec.retrieval.scoring_space import Space

SINGLE_HEADS: tuple[Space, ...] = ("de", "clf")
PARTS = ("de", "clf", "heads", "knn")  # each head, their blend, the votes
_OF_PART, _OF_GROUP = ("P@1", "nDCG@5", "PSP@5", "R@100"), ("R@10", "nDCG@5", "PSP@5")
_PAGES = "`report.html`: by frequency, curves, examples; `gate/gate.html`: against the champion."
ORACLE_QUERIES = 2000  # queries on which the index is compared with exact search


def evaluate(params: Params) -> dict[str, Any]:
    """Rank labels for every test query as the bundle serves them, and measure; also each head alone, where training
    queries vote also both heads without them and the votes alone, the index against exact search, and TF-IDF
    baselines made from the same training split.

    Writes outputs/metrics.json, outputs/plots/, outputs/predictions.parquet and outputs/report.html.
    """
    dataset = paths.open_dataset()
    bundle = Bundle.load(paths.BUNDLE)
    ranking = Ranking.of_model(bundle.model, dataset, "test", params.optim.precision, bundle.vectors)
    truth, propensity = ranking.truth, ranking.propensity
    info = bundle.info
    scores, labels = _search(bundle, ranking)
    result: dict[str, Any] = {"test": ranking.metrics_of(labels)}
    for space in SINGLE_HEADS if bundle.model.heads == "both" else ():
        result[space] = ranking.metrics(space, 1.0, info.clf_normalize)
    if bundle.neighbours is not None and info.knn is not None:
        result["heads"] = ranking.metrics(info.space, info.clf_weight, info.clf_normalize)
        result["knn"] = ranking.metrics_of_votes(bundle.neighbours, info.knn.neighbours)
    weights = {"clf_weight": info.clf_weight, "knn_weight": info.knn.weight if info.knn else 0.0}
    result["index"] = _against_exact(bundle, ranking) | weights
    result["validation"] = info.metrics.get("validation", {})
    result["frequency_bins"] = frequency_bins(labels, truth, propensity.counts_L, propensity.inverse_L)
    baselines = measure_baselines(dataset, params.tokens.text, propensity.inverse_L, propensity.group_L)
    compared = compare_with_baselines(labels, truth, baselines, propensity.inverse_L, propensity.group_L)
    warned = warnings(headline(result["test"]), dataset, params.tokens.text, propensity.counts_L)
    result |= {
        "baselines": {name: {key: own[key] for key in COMPARED} for name, own in baselines.metrics.items()},
        # lists, which `dvc metrics` leaves out of its tables
        "against_baselines": [asdict(one) for one in compared], "warnings": warned,
    }  # fmt: skip
    shown = {name: headline(result[name]) for name in PARTS if name in result}
    write_json(paths.METRICS, result | shown)
    _write_predictions(ranking, scores, labels)
    history, rounds = (read_json_lines(paths.MODEL / f"{name}.jsonl") for name in ("history", "rounds"))
    plots_csv(history, rounds, result["test"], paths.PLOTS)
    tracker = tracker_of_model()
    found = Evaluated(bundle, ranking, scores, labels, result, baselines, compared, tracker)
    write_page(paths.REPORT, render(report_input(params, found, history, rounds)))
    start = read_start()
    origin = f"version {start.version} of {start.model}" if start else "from nothing"
    about = f"{dataset.name}, {dataset.num_labels:,} labels; recipe {params.recipe or '-'}; start: {origin}. {_PAGES}"
    tracker.log_final(split_figures(result))
    tracker.set_tags({"mlflow.note.content": about})
    tracker.log_files([paths.REPORT, paths.METRICS])
    tracker.log_files([paths.PLOTS], "plots")
    tracker.log_files([paths.VALIDATION, paths.CHANGE], "data")  # pages, results and Data Docs
    return {
        "metrics": headline(result["test"]), "baselines": result["baselines"],
        "against_baselines": verdict(compared), "warnings": warned,
        "report": str(paths.REPORT),
    }  # fmt: skip


def _search(bundle: Bundle, ranking: Ranking) -> tuple[np.ndarray, np.ndarray]:
    """The bundle's answer for each query of the split, filtered pairs removed: (scores [n, K], labels [n, K])."""
    sides, parts = (ranking.query_de, ranking.query_clf, ranking.words(bundle.neighbours)), []
    for start in range(0, max(len(ranking.rows), 1), QUERIES_AT_ONCE):
        some = slice(start, start + QUERIES_AT_ONCE)
        de, clf, words = (None if side is None else side[some] for side in sides)
        parts.append(bundle.rank(de, clf, K, pair_keys(ranking.filter_pairs[some]), words))
    return np.concatenate([part.scores for part in parts]), np.concatenate([part.rows for part in parts])


def _against_exact(bundle: Bundle, ranking: Ranking) -> dict[str, float]:
    """Recall of the index's first 10 and 100 labels against exact search, in percent."""
    info = bundle.info
    query = ranking.queries(info.space, info.clf_weight, info.clf_normalize)[:ORACLE_QUERIES]
    k = min(K, bundle.num_labels)
    exact = exact_search(query, ranking.labels(info.space, info.clf_normalize), k)[1]
    found = bundle.index.search(query, k)[1]
    return {f"recall@{n}": 100 * recall(found[:, :n], exact[:, :n]) for n in (10, K) if n <= k}


def _write_predictions(ranking: Ranking, scores: np.ndarray, labels: np.ndarray) -> None:
    """One row a query: uid, label rows best first, scores."""
    keep = labels >= 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(keep.sum(1))]).astype(np.int32))
    table = pa.table({
        "query": pa.array(ranking.dataset.query_uids(ranking.rows)),
        "query_row": pa.array(ranking.rows),
        "labels": pa.ListArray.from_arrays(offsets, pa.array(labels[keep].astype(np.int32))),
        "scores": pa.ListArray.from_arrays(offsets, pa.array(scores[keep].astype(np.float32))),
    })  # fmt: skip
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes_atomic(paths.PREDICTIONS, sink.getvalue().to_pybytes())


def split_figures(result: dict[str, Any]) -> dict[str, float]:
    """Of outputs/metrics.json what people compare: the headline, groups of labels, parts of the result."""
    test = result["test"]
    of_groups = {f"{group}/{name}" for group in GROUPS for name in _OF_GROUP} & test.keys()
    named = headline(test) | {name: test[name] for name in sorted(of_groups)}
    figures = {f"test/{name}": value for name, value in named.items()}
    for part in PARTS:
        figures |= {f"{part}/{name}": value for name, value in result.get(part, {}).items() if name in _OF_PART}
    return figures | {f"index/{name}": value for name, value in result["index"].items()}
