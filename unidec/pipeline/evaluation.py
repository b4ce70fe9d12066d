"""Stage `evaluate`: measure the bundle on the test split; metrics, plots, predictions, report.

Legend: n queries of the split, K predictions per query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from unidec.bundle.bundle import Bundle
from unidec.config import Params, flatten
from unidec.data.chunks import blocks, offsets_of
from unidec.data.dataset import Text, XMCDataset
from unidec.data.json_file import read_json_lines
from unidec.data.propensity import training_counts
from unidec.data.storage import write_file, write_json
from unidec.evaluation import baselines
from unidec.evaluation.metrics import by_query
from unidec.evaluation.page import write_page
from unidec.evaluation.plot_tables import plots_csv, validation_records
from unidec.evaluation.report import ReportInput, render
from unidec.evaluation.significance import Comparison
from unidec.metric_names import BASELINES, GROUPS, headline, of_all_labels, shown
from unidec.model.search import recall
from unidec.pipeline import paths
from unidec.pipeline.ranking import QUERIES_AT_ONCE, K, Ranking
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.seen import leak_in_words, of_model
from unidec.pipeline.start import read_start
from unidec.progress import progress
from unidec.ranking.fusion import CANDIDATES
from unidec.ranking.heads import Ranked
from unidec.ranking.ranker import SINGLE_HEADS
from unidec.text_page import markdown_table
from unidec.tracking.provenance import COMMIT_TAG, code_tags, dvc_hash
from unidec.tracking.run import Tracker
from unidec.training.precision import choose_device
from unidec.version import __version__

PARTS = ("de", "clf", "heads", "knn")  # each head, their blend, the votes
ORACLE_QUERIES = 2000  # queries for which the index is compared with exact search
# pairs of a test query and a label that are scored on a CPU: a minute or two for each search; above
# this, the index is searched
MOST_PAIRS = 1 << 34
EXAMPLES = 6  # queries with the largest gain over a baseline, and as many with the largest loss
SHOWN = 5  # labels shown for each example
CALIBRATED = 5  # predictions per query in the calibration plot
SYSTEMS = {  # rows of the report, by their names in metrics.json
    "test": "as served",
    "heads": "without votes",
    "de": "dual encoder alone",
    "clf": "classifier alone",
    "knn": "votes alone",
}
BY_INDEX = (
    "The test queries and labels are too many for exact search on a CPU: labels were ranked by the "
    "index, and each head alone was not measured. On a GPU (device: cuda) the search is exact."
)
Figures = dict[str, Any]


@dataclass(frozen=True)
class Evaluation:
    """Results on the test split.

    Attributes:
        metrics, baselines: headline metrics in percent, of the bundle and of each baseline.
        against_baselines: a sentence that compares the bundle with the baselines.
        warnings: sentences about doubtful figures.
        report: path of the report.
    """

    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    against_baselines: str
    warnings: list[str]
    report: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements on the test split.

    Attributes:
        scores, labels: [n, K], the bundle's ranking.
        result: the content of metrics.json.
        tfidf: the baselines.
        compared: comparisons of the model with the baselines.
    """

    bundle: Bundle
    ranking: Ranking
    scores: np.ndarray
    labels: np.ndarray
    result: Figures
    tfidf: baselines.Baselines
    compared: list[Comparison]


def evaluate(params: Params) -> Evaluation:
    """Measure the bundle on the test split; its labels are ranked by exact search instead of its
    index, unless that would take too long (`MOST_PAIRS`).

    Also measures each head alone (by exact search only), the loss due to the index, TF-IDF
    baselines built from the same training split, and if training queries vote, both heads without
    votes and the votes alone. Runs on the device `params.device`. Writes outputs/metrics.json,
    outputs/plots/, outputs/predictions.parquet and outputs/report.html, and logs them to MLflow.
    """
    measured = _measure(params)
    result = measured.result
    headlines = {name: headline(result[name]) for name in PARTS if name in result}
    write_json(paths.METRICS, result | headlines)
    _write_predictions(measured.ranking, measured.scores, measured.labels)
    history = read_json_lines(paths.MODEL / "history.jsonl")
    rounds = read_json_lines(paths.MODEL / "rounds.jsonl")
    plots_csv(history, rounds, result["test"], paths.PLOTS)
    tracker = tracker_of_model()
    report = _report(params, measured, tracker, history, rounds)
    write_page(paths.REPORT, render(report))
    minutes = {}
    if timed := validation_records(rounds):
        minutes["training/minutes"] = timed[-1]["minutes"]
    about = _description(params, measured, minutes, report.verdict)
    tracker.log_final(split_figures(result) | minutes)
    tracker.set_tags({"mlflow.note.content": about})
    tracker.log_files([paths.REPORT, paths.METRICS])
    tracker.log_files([paths.PLOTS], "plots")
    tracker.log_files([paths.VALIDATION, paths.CHANGE], "data")  # pages, results, Data Docs
    return Evaluation(
        metrics=headline(result["test"]),
        baselines=result["baselines"],
        against_baselines=report.verdict,
        warnings=result["warnings"],
        report=str(paths.REPORT),
    )


def _measure(params: Params) -> Measured:
    """Rank the test split, and measure the bundle, its parts and the baselines."""
    dataset = paths.open_dataset()
    bundle = Bundle.load(paths.BUNDLE, device=str(choose_device(params.device)))
    precision = params.optim.precision
    ranking = Ranking.of_model(bundle.model, dataset, "test", precision, bundle.vectors)
    ranking = ranking.with_words(bundle.words)
    num_pairs = len(ranking.rows) * bundle.num_labels
    is_exact = num_pairs <= MOST_PAIRS or bundle.model.device.type != "cpu"
    ranker = ranking.ranker(bundle.ranker.heads) if is_exact else bundle.ranker
    found = ranker.search(ranking.encoded, CANDIDATES, ranking.excluded)
    scores, labels = _ranked(bundle, ranking, found)
    result = _figures(bundle, ranking, labels, found, is_exact)
    text = params.tokens.text
    weights = (ranking.propensity.inverse_L, ranking.propensity.group_L)
    tfidf = baselines.measure_baselines(dataset, text, *weights)
    compared = baselines.compare_with_baselines(labels, ranking.truth, tfidf, *weights)
    names = of_all_labels()
    result["baselines"] = {
        baseline: {name: own[name] for name in names} for baseline, own in tfidf.metrics.items()
    }
    # as a list, because `dvc metrics` omits lists from its tables
    result["against_baselines"] = [asdict(one) for one in compared]
    result["warnings"] = _warnings(headline(result["test"]), dataset, text)
    if not is_exact:
        result["warnings"].append(BY_INDEX)
    return Measured(
        bundle=bundle,
        ranking=ranking,
        scores=scores,
        labels=labels,
        result=result,
        tfidf=tfidf,
        compared=compared,
    )


def _warnings(metrics: dict[str, float], dataset: XMCDataset, text: Text) -> list[str]:
    warnings = baselines.warnings(metrics, dataset, text)
    counted, num_leaked = leak_in_words(of_model(paths.BUNDLE / "model"), dataset)
    if num_leaked:
        warnings.append(
            f"The model that the training started from was trained on {counted}: the metrics "
            "reward memorising them. Train from scratch: retrain.start: cold."
        )
    return warnings


def _description(
    params: Params, measured: Measured, minutes: Mapping[str, float], verdict: str
) -> str:
    """Markdown that MLflow shows on the run's page."""
    start = read_start()
    origin = f"version {start.version} of {start.model}" if start else "from nothing"
    dataset = measured.ranking.dataset
    recipe = params.recipe or "-"
    table = figures_table(measured.result["test"] | minutes)
    return (
        f"{table}\n\n{verdict}\n\n"
        f"{dataset.name}, {dataset.num_labels:,} labels; recipe {recipe}; start: {origin}. "
        "`report.html`: by frequency, curves, examples."
    )


def figures_table(figures: Mapping[str, float]) -> str:
    """The most important figures as a Markdown table, for the run's description."""
    names = [name for name in (*shown("drawn"), "training/minutes") if name in figures]
    heads = [name.removeprefix("training/") for name in names]
    cells = [f"{figures[name]:.1f}" for name in names]
    return markdown_table(heads, [cells])


def _report(
    params: Params,
    measured: Measured,
    tracker: Tracker,
    history: list[Figures],
    rounds: list[Figures],
) -> ReportInput:
    """The content of the report."""
    bundle = measured.bundle
    info = bundle.info
    result = measured.result
    dataset = measured.ranking.dataset
    tags = code_tags(made_with=info.params)
    title = f"{dataset.name}: recipe {params.recipe or '-'}"
    if tracker.run_name:
        title += f", run {tracker.run_name}"
    of_baselines = measured.tfidf.metrics.items()
    return ReportInput(
        title=title,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {params.tokens.text}",
        model=params.encoder.name,
        index={"kind": info.index_kind, "space": info.space} | result["index"],
        widths=info.card.get("widths", ()),
        fusion={"objective": params.index.objective} | info.card.get("fusion", {}),
        card=data_card(params),
        params=flatten(params),
        lineage=_lineage(bundle, dataset, tracker.run_id, tags),
        history=history,
        rounds=rounds,
        metrics={title: result[name] for name, title in SYSTEMS.items() if name in result},
        baselines={BASELINES[name]: headline(metrics) for name, metrics in of_baselines},
        baseline_note=measured.tfidf.about,
        comparison=measured.compared,
        verdict=baselines.verdict(measured.compared),
        warnings=result["warnings"],
        calibration=_calibration(measured),
        **_examples(measured),
    )


def _figures(
    bundle: Bundle, ranking: Ranking, labels: np.ndarray, found: Ranked, is_exact: bool
) -> Figures:
    """The content of metrics.json without the baselines: metrics of the bundle and of its parts,
    the index, weights and validation metrics.

    Args:
        labels: int [n, K], ranked by the bundle.
        found: the best labels by the heads' score, at least K of them or all.
        is_exact: whether they were found by exact search.
    """
    info = bundle.info
    ranker = bundle.ranker
    result: Figures = {"test": ranking.metrics_of(labels)}
    if bundle.model.heads == "both" and is_exact:
        for space in SINGLE_HEADS:
            result[space] = ranking.metrics(ranker.heads.alone(space))
    if ranker.voting is not None:
        result["heads"] = ranking.metrics_of(found.rows[:, :K])
        result["knn"] = ranking.metrics_of_votes(ranker.voting)
    result["index"] = {
        **_against_exact(bundle, ranking, labels, found if is_exact else None),
        "clf_weight": info.clf_weight,
        "knn_weight": info.knn.weight if info.knn else 0.0,
    }
    result["validation"] = info.metrics.get("validation", {})
    return result


def _ranked(
    bundle: Bundle, ranking: Ranking, found: Ranked | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The bundle's predictions for each query of the split, without filtered pairs: (scores [n, K],
    labels [n, K]).

    Args:
        found: the best labels by the heads' score; None: the bundle's index is searched.
    """
    parts = []
    every = list(blocks(max(len(ranking.rows), 1), QUERIES_AT_ONCE))
    for block in progress(every, desc="rank labels", unit="block"):
        in_block = found and Ranked(found.rows[block], found.scores[block])
        part = ranking.part(block)
        parts.append(bundle.ranker.rank(part.encoded, K, part.excluded, found=in_block))
    scores = np.concatenate([best.scores for best in parts])
    return scores, np.concatenate([best.rows for best in parts])


def _against_exact(
    bundle: Bundle, ranking: Ranking, labels: np.ndarray, found: Ranked | None
) -> Figures:
    """Compare the index with exact search, on the first `ORACLE_QUERIES` queries.

    Args:
        labels, found: as for `_figures`, by exact search; found None: both are searched here.

    Returns:
        "recall@10" and "recall@100" of the index in percent; "lost/P@1", ...: percentage points by
        which the metrics of the served labels are below those of `labels`.
    """
    first = ranking.part(slice(ORACLE_QUERIES))
    if found is None:
        ranker = ranking.ranker(bundle.ranker.heads)
        found = ranker.search(first.encoded, CANDIDATES, first.excluded)
        _, labels = _ranked(bundle, first, found)
    exact = found.rows[:ORACLE_QUERIES]
    approximate = bundle.ranker.search(first.encoded, K, first.excluded).rows
    figures = {}
    for num in (10, K):
        share = recall(approximate[:, :num], exact[:, :num])
        figures[f"recall@{num}"] = 100 * share
    best = first.metrics_of(labels[:ORACLE_QUERIES])
    _, served = _ranked(bundle, first)
    of_served = first.metrics_of(served)
    return figures | {f"lost/{name}": best[name] - of_served[name] for name in shown("part")}


def _write_predictions(ranking: Ranking, scores: np.ndarray, labels: np.ndarray) -> None:
    """Write a row per query: its uid and row, its label rows (best first) and their scores."""
    keep = labels >= 0
    ends = offsets_of(keep.sum(axis=1))
    columns = {
        "query": pa.array(ranking.dataset.query_uids(ranking.rows), pa.string()),
        "query_row": ranking.rows,
        "labels": pa.ListArray.from_arrays(ends, labels[keep].astype(np.int32)),
        "scores": pa.ListArray.from_arrays(ends, scores[keep].astype(np.float32)),
    }
    with write_file(paths.PREDICTIONS) as file:
        pq.write_table(pa.table(columns), file, compression="zstd")


def split_figures(result: Figures) -> dict[str, float]:
    """The figures of outputs/metrics.json that are logged to MLflow: headline metrics, and some
    metrics of each frequency group, of each part and of the index.
    """
    in_groups = [f"{group}/{name}" for group in GROUPS for name in shown("mlflow-group")]
    selected = {
        "test": [*shown("headline"), *in_groups],
        **dict.fromkeys(PARTS, shown("part")),
        "index": list(result["index"]),
    }
    return {
        f"{part}/{name}": result[part][name]
        for part, names in selected.items()
        for name in names
        if name in result.get(part, ())
    }


def data_card(params: Params) -> dict[str, str | int]:
    """Facts about the data set, for the report."""
    dataset = paths.open_dataset()
    propensity = paths.open_propensity()
    meta = dataset.manifest["meta"]
    without = training_counts(dataset) == 0
    return {
        "name": dataset.name,
        "sha256": dataset.sha256,
        "text": params.tokens.text,
        "tokens a text, at most": params.tokens.max_length,
        **{f"{split} queries": count for split, count in meta["splits"].items()},
        "labels": dataset.num_labels,
        "pairs": meta["num_pairs"],
        "filter pairs": meta["num_filter_pairs"],
        **{f"{group} labels": num for group, num in propensity.group_sizes.items()},
        "labels without training queries": int(without.sum()),
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}",
    }


def _lineage(
    bundle: Bundle, dataset: XMCDataset, run_id: str | None, tags: Mapping[str, str]
) -> Figures:
    lineage = {
        "git commit": tags.get(COMMIT_TAG),
        "edited since": tags.get("git.dirty"),
        "unidec": __version__,
        "data set": dataset.sha256,
        "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"),
        "bundle": bundle.sha256,
        "MLflow run": run_id,
    }
    return {key: value for key, value in lineage.items() if value}


def _calibration(measured: Measured) -> Figures:
    """`ReportInput.calibration`, from the first labels of each query; {} without probabilities."""
    labels = measured.labels[:, :CALIBRATED]
    probabilities = measured.bundle.probabilities(measured.scores[:, :CALIBRATED])
    if probabilities is None:
        return {}
    return {
        "probability": np.where(labels >= 0, probabilities, np.nan),
        "correct": measured.ranking.relevant(labels),
    }


def _examples(measured: Measured) -> Figures:
    """The fields of `ReportInput` with example queries: those with the largest gains and losses in
    nDCG@5 against the baseline; ties are broken at random.
    """
    ranking = measured.ranking
    tfidf = measured.tfidf
    places = tfidf.places
    truth = ranking.truth[places]
    *_, baseline = ("", *tfidf.labels)

    def ndcg(labels_NK: np.ndarray) -> np.ndarray:
        parts = by_query(labels_NK, truth, ["nDCG@5"], ranking.propensity.inverse_L)
        return 100 * parts["nDCG@5"][0]

    gain = ndcg(measured.labels[places])
    if baseline:
        gain = gain - ndcg(tfidf.labels[baseline])
    asked = np.flatnonzero(np.diff(truth.indptr) > 0)
    shuffled = np.random.default_rng(0).permutation(asked)

    def examples(sign: int) -> list[Figures]:
        order = np.argsort(-sign * gain[shuffled], kind="stable")
        first = shuffled[order][:EXAMPLES]
        if baseline:
            first = first[sign * gain[first] > 0]
        return [_example(measured, places[j], float(gain[j])) for j in first]

    return {
        "gains": examples(1),
        "losses": examples(-1),
        "gain_over": BASELINES.get(baseline, ""),
    }


def _example(measured: Measured, i: int, gain: float) -> Figures:
    """Query number i of the ranking with its relevant, missed and predicted labels, in the format
    of `ReportInput.gains`.
    """
    ranking = measured.ranking
    dataset = ranking.dataset
    relevant = ranking.truth[i].indices
    labels = measured.labels[i, :SHOWN]
    labels = labels[labels >= 0]
    predictions = {
        "label": dataset.label_uids(labels),
        "title": dataset.label_texts(labels),
        "score": measured.scores[i, : len(labels)],
        "correct": np.isin(labels, relevant),
    }
    return {
        "gain": gain,
        "query": dataset.query_texts(ranking.rows[[i]])[0],
        "truth": dataset.label_texts(relevant),
        "missed": dataset.label_texts(np.setdiff1d(relevant, labels)),
        "predictions": pd.DataFrame(predictions).to_dict("records"),
    }
