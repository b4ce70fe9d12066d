"""Stage `evaluate`: measure the bundle on the test split; write metrics, plots, predictions and the
report.

Legend: n queries of the split, K places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unidec.bundle.bundle import Bundle
from unidec.config import Params, flatten
from unidec.data.dataset import XMCDataset
from unidec.data.propensity import training_counts
from unidec.data.storage import read_json_lines, write_bytes_atomic, write_json
from unidec.evaluation import baselines
from unidec.evaluation.metrics import by_query, frequency_bins, ideal_ranking, pair_keys
from unidec.evaluation.page import write_page
from unidec.evaluation.report import ReportInput, plots_csv, render, validation_records
from unidec.metric_names import BASELINES, GROUPS
from unidec.model.search import exact_search
from unidec.pipeline import paths
from unidec.pipeline.ranking import QUERIES_AT_ONCE, K, Ranking, headline
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.seen import leak_in_words, of_bundle
from unidec.pipeline.start import read_start
from unidec.progress import progress
from unidec.ranking.candidates import Ranked
from unidec.ranking.fusion import CANDIDATES
from unidec.ranking.index import recall
from unidec.ranking.ranker import SINGLE_HEADS
from unidec.tracking.fetch import measured_before
from unidec.tracking.provenance import COMMIT_TAG, code_tags, dvc_hash
from unidec.training.precision import choose_device
from unidec.version import __version__

PARTS = ("de", "clf", "heads", "knn")  # each head, their blend, the votes
_PART_METRICS = ("P@1", "nDCG@5", "PSP@5", "R@100")
_GROUP_METRICS = ("R@10", "nDCG@5", "PSP@5")
# of the run's description in MLflow
_DESCRIPTION_METRICS = ("P@1", "PSP@5", "R@100", "training/minutes")
ORACLE_QUERIES = 2000  # queries on which the index is compared with exact search
EXAMPLES = 6  # queries that gain most over a baseline, and as many that lose most
SHOWN = 5  # labels shown for each example
CALIBRATED = 5  # predictions per query in the calibration plot
WITH_VOTES = {"both": "both heads", "de": "dual encoder", "clf": "classifier"}


@dataclass(frozen=True)
class Evaluation:
    """Headline metrics of the test split in percent, those of each baseline, a sentence that
    compares them, sentences about figures to doubt, and the report's path.
    """

    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    against_baselines: str
    warnings: list[str]
    report: str


def evaluate(params: Params) -> Evaluation:
    """Measure the bundle on the test split; its labels are ranked by exact search instead of its
    index.

    Also measures each head alone, the loss by the index, TF-IDF baselines built from the same
    training split, and if training queries vote, both heads without votes and the votes alone. Runs
    on the device `params.device`. Writes outputs/metrics.json, outputs/plots/,
    outputs/predictions.parquet and outputs/report.html, and logs them to MLflow."""
    dataset = paths.open_dataset()
    bundle = Bundle.load(paths.BUNDLE, device=str(choose_device(params.device)))
    ranking = Ranking.of_model(
        bundle.model, dataset, "test", params.optim.precision, bundle.vectors
    )
    ranking = ranking.with_words(bundle.words)
    found = ranking.ranker(bundle.ranker.heads).search(
        ranking.encoded, CANDIDATES, ranking.excluded
    )
    scores, labels = _ranked(bundle, ranking, found)
    result = _measured(bundle, ranking, labels, found.rows[:, :K])
    text = params.tokens.text
    weights = (ranking.propensity.inverse_L, ranking.propensity.group_L)
    tfidf = baselines.measure_baselines(dataset, text, *weights)
    compared = baselines.compare_with_baselines(labels, ranking.truth, tfidf, *weights)
    warnings = baselines.warnings(headline(result["test"]), dataset, text)
    counted, num_leaked = leak_in_words(of_bundle(paths.BUNDLE, dataset), dataset)
    if num_leaked:
        warnings.append(
            f"The model that the training started from was trained on {counted}: the metrics "
            "reward memorising them. Train from scratch: retrain.start: cold."
        )
    result |= {
        "baselines": {
            name: {key: own[key] for key in baselines.COMPARED}
            for name, own in tfidf.metrics.items()
        },
        # lists, because `dvc metrics` omits lists from its tables
        "against_baselines": [asdict(one) for one in compared],
        "warnings": warnings,
    }
    write_json(
        paths.METRICS, result | {name: headline(result[name]) for name in PARTS if name in result}
    )
    _write_predictions(ranking, scores, labels)
    history, rounds = (
        read_json_lines(paths.MODEL / f"{name}.jsonl") for name in ("history", "rounds")
    )
    plots_csv(history, rounds, result["test"], paths.PLOTS)
    tracker = tracker_of_model()
    tags = code_tags(made_with=bundle.info.params)
    run = f", run {tracker.run_name}" if tracker.run_name else ""
    commit = f", commit {tags[COMMIT_TAG][:8]}" if tags.get(COMMIT_TAG) else ""
    report = ReportInput(
        title=(
            f"{dataset.name}: "
            f"{'UniDEC' if bundle.model.heads == 'both' else bundle.model.heads}{run}{commit}"
        ),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        index={"kind": bundle.info.index_kind, "space": bundle.info.space, **result["index"]},
        fusion={"objective": params.index.objective, **bundle.info.card.get("fusion", {})},
        card=data_card(params),
        params=flatten(params),
        lineage=_lineage(bundle, dataset, tracker.run_id, tags),
        history=history,
        rounds=rounds,
        bins=result["frequency_bins"],
        metrics=_metrics(result, bundle.model.heads),
        at_best=at_best(ranking),
        baselines={BASELINES[name]: headline(dict(own)) for name, own in tfidf.metrics.items()},
        baseline_note=tfidf.about,
        comparison=compared,
        verdict=baselines.verdict(compared),
        earlier=measured_before(tracker, params.tracking.model_name, dataset.sha256),
        warnings=result["warnings"],
        **_predictions_shown(bundle, ranking, scores, labels, tfidf),
    )
    write_page(paths.REPORT, render(report))
    start = read_start()
    timed = validation_records(rounds)
    origin = f"version {start.version} of {start.model}" if start else "from nothing"
    minutes = {"training/minutes": timed[-1]["minutes"]} if timed else {}
    description = (
        f"{markdown_table(result['test'] | minutes)}\n\n{report.verdict}\n\n"
        f"{dataset.name}, {dataset.num_labels:,} labels; recipe {params.recipe or '-'}; "
        f"start: {origin}. "
        "`report.html`: by frequency, curves, examples."
    )
    tracker.log_final(split_figures(result) | minutes)
    tracker.set_tags({"mlflow.note.content": description})
    tracker.log_files([paths.REPORT, paths.METRICS])
    tracker.log_files([paths.PLOTS], "plots")
    tracker.log_files([paths.VALIDATION, paths.CHANGE], "data")  # pages, results and Data Docs
    metrics = headline(result["test"])
    return Evaluation(
        metrics, result["baselines"], report.verdict, result["warnings"], str(paths.REPORT)
    )


def markdown_table(figures: Mapping[str, float]) -> str:
    """The most important figures as a Markdown table, for the run's description."""
    cells = {
        name.removeprefix("training/"): f"{figures[name]:.1f}"
        for name in _DESCRIPTION_METRICS
        if name in figures
    }
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (cells, ["---"] * len(cells), cells.values())
    )


def _measured(
    bundle: Bundle, ranking: Ranking, labels: np.ndarray, by_heads: np.ndarray
) -> dict[str, Any]:
    """The content of metrics.json without the baselines: metrics of the bundle and of its parts,
    the index, weights, validation metrics and frequency bins.

    Args:
        labels, by_heads: int [n, K], found by exact search; ranked as the bundle does, and by the
        heads' score alone.
    """
    info = bundle.info
    propensity = ranking.propensity
    ranker = bundle.ranker
    result: dict[str, Any] = {"test": ranking.metrics_of(labels)}
    for space in SINGLE_HEADS if bundle.model.heads == "both" else ():
        result[space] = ranking.metrics(ranker.heads.alone(space))
    if ranker.voting is not None:
        result["heads"] = ranking.metrics_of(by_heads)
        result["knn"] = ranking.metrics_of_votes(ranker.voting)
    weights = {"clf_weight": info.clf_weight, "knn_weight": info.knn.weight if info.knn else 0.0}
    result["index"] = _against_exact(bundle, ranking, labels) | weights
    result["validation"] = info.metrics.get("validation", {})
    result["frequency_bins"] = frequency_bins(
        labels, ranking.truth, propensity.counts_L, propensity.inverse_L
    )
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
    starts = range(0, max(len(ranking.rows), 1), QUERIES_AT_ONCE)
    for start in progress(starts, desc="rank labels", unit="block"):
        block = slice(start, start + QUERIES_AT_ONCE)
        found_in_block = None if found is None else Ranked(found.rows[block], found.scores[block])
        exclude = pair_keys(ranking.filter_pairs[block])
        parts.append(
            bundle.ranker.rank(ranking.encoded.take(block), K, exclude, found=found_in_block)
        )
    return np.concatenate([part.scores for part in parts]), np.concatenate(
        [part.rows for part in parts]
    )


def _against_exact(bundle: Bundle, ranking: Ranking, labels: np.ndarray) -> dict[str, float]:
    """The index compared with exact search, on the first queries.

    Args:
        labels: int [n, K], by exact search.

    Returns:
        "recall@10" and "recall@100" of the index in percent; "lost/P@1", ...: points by which the
        metrics of the served labels are below those of `labels`.
    """
    first = ranking.part(slice(ORACLE_QUERIES))
    query = bundle.ranker.queries(first.encoded)
    k = min(K, bundle.num_labels)
    exact = exact_search(query, bundle.ranker.heads.take(slice(None)), k, device=ranking.device)[1]
    approximate = bundle.index.search(query, k)[1]
    recalls = {
        f"recall@{n}": 100 * recall(approximate[:, :n], exact[:, :n]) for n in (10, K) if n <= k
    }
    best = first.metrics_of(labels[:ORACLE_QUERIES])
    served = first.metrics_of(_ranked(bundle, first)[1])
    return recalls | {f"lost/{name}": best[name] - served[name] for name in _PART_METRICS}


def _write_predictions(ranking: Ranking, scores: np.ndarray, labels: np.ndarray) -> None:
    """Write a row per query: its uid and row, its label rows (best first) and their scores."""
    keep = labels >= 0
    offsets = pa.array(np.concatenate([[0], np.cumsum(keep.sum(1))]).astype(np.int32))
    table = pa.table(
        {
            "query": pa.array(ranking.dataset.query_uids(ranking.rows)),
            "query_row": pa.array(ranking.rows),
            "labels": pa.ListArray.from_arrays(offsets, pa.array(labels[keep].astype(np.int32))),
            "scores": pa.ListArray.from_arrays(offsets, pa.array(scores[keep].astype(np.float32))),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_bytes_atomic(paths.PREDICTIONS, sink.getvalue().to_pybytes())


def split_figures(result: dict[str, Any]) -> dict[str, float]:
    """The figures of outputs/metrics.json that are logged to MLflow: headline metrics, some of each
    frequency group, of each part and of the index.
    """
    test = result["test"]
    of_groups = {f"{group}/{name}" for group in GROUPS for name in _GROUP_METRICS} & test.keys()
    selected = headline(test) | {name: test[name] for name in sorted(of_groups)}
    figures = {f"test/{name}": value for name, value in selected.items()}
    for part in PARTS:
        figures |= {
            f"{part}/{name}": value
            for name, value in result.get(part, {}).items()
            if name in _PART_METRICS
        }
    return figures | {f"index/{name}": value for name, value in result["index"].items()}


def _metrics(result: dict[str, Any], heads: str) -> dict[str, dict[str, float]]:
    """Metrics by system, for the report: the served ranking, the heads without votes, each head
    alone, the votes.
    """
    shown = {f"{WITH_VOTES[heads]} and votes" if "knn" in result else heads: result["test"]}
    if "heads" in result:
        shown[heads] = result["heads"]
    return shown | {name: result[name] for name in ("de", "clf", "knn") if name in result}


def data_card(params: Params) -> dict[str, str | int]:
    """Facts about the data set, for the report."""
    dataset = paths.open_dataset()
    propensity = paths.open_propensity()
    meta = dataset.manifest["meta"]
    groups = np.bincount(propensity.group_L, minlength=len(GROUPS))
    return {
        "name": dataset.name,
        "text": params.tokens.text,
        "tokens a text, at most": params.tokens.max_length,
        **{f"{split} queries": count for split, count in meta["splits"].items()},
        "labels": dataset.num_labels,
        "pairs": meta["num_pairs"],
        "filter pairs": meta["num_filter_pairs"],
        **{f"{group} labels": int(count) for group, count in zip(GROUPS, groups, strict=True)},
        "labels without training queries": int((training_counts(dataset) == 0).sum()),
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}",
    }


def at_best(ranking: Ranking) -> dict[str, float]:
    """The highest values that any ranking of the split can have, without coverage: for example P@5
    is at most 40 with two labels a query.
    """
    ideal = ranking.metrics_of(ideal_ranking(ranking.truth, ranking.propensity.inverse_L, K))
    return {
        name: value
        for name, value in ideal.items()
        if "coverage" not in name and "num_queries" not in name
    }


def _lineage(
    bundle: Bundle, dataset: XMCDataset, run_id: str | None, tags: Mapping[str, str]
) -> dict[str, Any]:
    lineage = {
        "git commit": tags.get("mlflow.source.git.commit"),
        "edited since": tags.get("git.dirty"),
        "unidec": __version__,
        "data set": dataset.sha256,
        "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"),
        "bundle": bundle.sha256,
        "MLflow run": run_id,
    }
    return {key: value for key, value in lineage.items() if value}


def _predictions_shown(
    bundle: Bundle,
    ranking: Ranking,
    scores: np.ndarray,
    labels: np.ndarray,
    tfidf: baselines.Baselines,
) -> dict[str, Any]:
    """The fields of `ReportInput` about single predictions: calibration, and the queries whose
    nDCG@5 gains most, and loses most, against the baseline; of equal ones a random choice.

    Args:
        scores, labels: [n, K], as the bundle ranks.
    """
    correct = ranking.relevant(labels)
    places = tfidf.places
    baseline = list(tfidf.labels)[-1] if tfidf.labels else ""
    truth = ranking.truth[places]
    weight_L = ranking.propensity.inverse_L

    def ndcg(labels_NK: np.ndarray) -> np.ndarray:
        return 100 * by_query(labels_NK, truth, ["nDCG@5"], weight_L)["nDCG@5"][0]

    gain = ndcg(labels[places]) - (ndcg(tfidf.labels[baseline]) if baseline else 0.0)
    shuffled = np.random.default_rng(0).permutation(np.flatnonzero(np.diff(truth.indptr) > 0))

    def examples(sign: int) -> list[dict[str, Any]]:
        order = shuffled[np.argsort(-sign * gain[shuffled], kind="stable")][:EXAMPLES]
        return [
            {
                "gain": float(gain[j]),
                **_example(ranking, i, labels[i, :SHOWN], scores[i], correct[i]),
            }
            for j, i in zip(order, places[order], strict=True)
            if not baseline or sign * gain[j] > 0
        ]

    calibration = {"score": scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]}
    if (probabilities := bundle.probabilities(calibration["score"])) is not None:
        calibration["probability"] = np.where(labels[:, :CALIBRATED] >= 0, probabilities, np.nan)
    gain_over = BASELINES.get(baseline, "")
    return {
        "calibration": calibration,
        "gains": examples(1),
        "losses": examples(-1),
        "gain_over": gain_over,
    }


def _example(
    ranking: Ranking, i: int, labels: np.ndarray, scores: np.ndarray, correct: np.ndarray
) -> dict[str, Any]:
    """Query number i of the ranking with its relevant, missed and predicted labels, as
    `ReportInput.gains` has it.
    """
    dataset = ranking.dataset
    relevant = ranking.truth[i].indices
    labels = labels[labels >= 0]
    missed = np.setdiff1d(relevant, labels)
    predictions = zip(
        dataset.label_uids(labels), dataset.label_texts(labels), scores.tolist(), correct.tolist()
    )
    return {
        "query": dataset.query_texts(ranking.rows[[i]])[0],
        "truth": dataset.label_texts(relevant),
        "missed": dataset.label_texts(missed) if len(missed) else [],
        "predictions": [
            dict(zip(("label", "title", "score", "correct"), one, strict=True))
            for one in predictions
        ],
    }
