"""Stage `evaluate`: the bundle on the test split -> metrics, plots, predictions, report.

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

from unidec.config import Params, flatten
from unidec.data.dataset import XMCDataset
from unidec.data.storage import read_json_lines, write_bytes_atomic, write_json
from unidec.evaluation import baselines
from unidec.evaluation.metrics import by_query, frequency_bins, pair_keys
from unidec.evaluation.page import write_page
from unidec.evaluation.report import ReportInput, plots_csv, render, validation_records
from unidec.metric_names import BASELINES, GROUPS
from unidec.model.search import exact_search
from unidec.pipeline import paths
from unidec.pipeline.ranking import QUERIES_AT_ONCE, K, Ranking, headline
from unidec.pipeline.runs import tracker_of_model
from unidec.pipeline.start import read_start
from unidec.progress import progress
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.fusion import CANDIDATES
from unidec.retrieval.index import recall
from unidec.retrieval.neighbours import Ranked
from unidec.retrieval.query_encoder import Encoded
from unidec.retrieval.scoring_space import Space
from unidec.tracking.fetch import measured_before
from unidec.tracking.provenance import COMMIT_TAG, code_tags, dvc_hash
from unidec.tracking.run import Tracker
from unidec.training.precision import choose_device
from unidec.version import __version__

SINGLE_HEADS: tuple[Space, ...] = ("de", "clf")
PARTS = ("de", "clf", "heads", "knn")  # each head, their blend, the votes
_OF_PART, _OF_GROUP = ("P@1", "nDCG@5", "PSP@5", "R@100"), ("R@10", "nDCG@5", "PSP@5")
_FIRST = ("P@1", "PSP@5", "R@100", "training/minutes")
_PAGES = "`report.html`: by frequency, curves, examples."
ORACLE_QUERIES = 2000  # queries on which the index is compared with exact search
EXAMPLES = 6  # queries that gain most over a baseline, and as many that lose most
SHOWN = 5  # labels shown for each
CALIBRATED = 5  # predictions a query that the calibration plot counts
WITH_VOTES = {"both": "both heads", "de": "dual encoder", "clf": "classifier"}


@dataclass(frozen=True)
class Evaluation:
    """Headline metrics of the test split in percent, those of each baseline, and how they compare in a sentence."""

    metrics: dict[str, float]
    baselines: dict[str, dict[str, float]]
    against_baselines: str
    warnings: list[str]
    report: str


def evaluate(params: Params) -> Evaluation:
    """Rank labels for every test query as the bundle does, by exact search in its index's place, and measure; also each
    head alone, where training queries vote also both heads without them and the votes alone, what the index loses,
    and TF-IDF baselines made from the same training split. Models and searches run on the device of the training.

    Writes outputs/metrics.json, outputs/plots/, outputs/predictions.parquet and outputs/report.html."""
    dataset = paths.open_dataset()
    bundle = Bundle.load(paths.BUNDLE, device=str(choose_device(params.device)))
    ranking = Ranking.of_model(bundle.model, dataset, "test", params.optim.precision, bundle.vectors)
    best_scores, best = ranking.top(bundle.info.space, bundle.info.clf_weight, bundle.info.clf_normalize, CANDIDATES)
    scores, labels = _ranked(bundle, ranking, Ranked(best, best_scores))
    result = _measured(bundle, ranking, labels, best[:, :K])
    text, weights = params.tokens.text, (ranking.propensity.inverse_L, ranking.propensity.group_L)
    tfidf = baselines.measure_baselines(dataset, text, *weights)
    compared = baselines.compare_with_baselines(labels, ranking.truth, tfidf, *weights)
    result |= {
        "baselines": {name: {key: own[key] for key in baselines.COMPARED} for name, own in tfidf.metrics.items()},
        # lists, which `dvc metrics` leaves out of its tables
        "against_baselines": [asdict(one) for one in compared],
        "warnings": baselines.warnings(headline(result["test"]), dataset, text, ranking.propensity.counts_L),
    }  # fmt: skip
    shown = {name: headline(result[name]) for name in PARTS if name in result}
    write_json(paths.METRICS, result | shown)
    _write_predictions(ranking, scores, labels)
    history, rounds = (read_json_lines(paths.MODEL / f"{name}.jsonl") for name in ("history", "rounds"))
    plots_csv(history, rounds, result["test"], paths.PLOTS)
    tracker = tracker_of_model()
    report = ReportInput(
        title=f"{dataset.name}: {_run_words(bundle, tracker)}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        dataset=f"{dataset.name}, {text}",
        model=f"{params.encoder.kind} encoder ({params.encoder.name})",
        index={"kind": bundle.info.index_kind, "space": bundle.info.space, **result["index"]},
        fusion={"objective": params.index.objective, **bundle.info.card.get("fusion", {})},
        card=data_card(params), params=flatten(params), lineage=_lineage(bundle, dataset, tracker.run_id),
        history=history, rounds=rounds, bins=result["frequency_bins"], metrics=_metrics(result, bundle.model.heads),
        baselines={BASELINES[name]: headline(dict(own)) for name, own in tfidf.metrics.items()},
        baseline_note=tfidf.about, comparison=compared, verdict=baselines.verdict(compared),
        earlier=measured_before(tracker, params.tracking.model_name, dataset.sha256),
        warnings=result["warnings"], **_answered(bundle, ranking, scores, labels, tfidf),
    )  # fmt: skip
    write_page(paths.REPORT, render(report))
    start = read_start()
    origin = f"version {start.version} of {start.model}" if start else "from nothing"
    about = f"{dataset.name}, {dataset.num_labels:,} labels; recipe {params.recipe or '-'}; start: {origin}. {_PAGES}"
    minutes = {"training/minutes": timed[-1]["minutes"]} if (timed := validation_records(rounds)) else {}
    about = f"{described(result['test'] | minutes)}\n\n{report.verdict}\n\n{about}"
    tracker.log_final(split_figures(result) | minutes)
    tracker.set_tags({"mlflow.note.content": about})
    tracker.log_files([paths.REPORT, paths.METRICS])
    tracker.log_files([paths.PLOTS], "plots")
    tracker.log_files([paths.VALIDATION, paths.CHANGE], "data")  # pages, results and Data Docs
    metrics, verdict = headline(result["test"]), baselines.verdict(compared)
    return Evaluation(metrics, result["baselines"], verdict, result["warnings"], str(paths.REPORT))


def described(figures: Mapping[str, float]) -> str:
    """The figures that people read first, as a table in Markdown: a run's description begins with it."""
    shown = {name.removeprefix("training/"): f"{figures[name]:.1f}" for name in _FIRST if name in figures}
    return "\n".join(f"| {' | '.join(row)} |" for row in (shown, ["---"] * len(shown), shown.values()))


def _measured(bundle: Bundle, ranking: Ranking, labels: np.ndarray, by_heads: np.ndarray) -> dict[str, Any]:
    """Every metric: of the bundle, of its parts; the index, the weights, the validation split, the frequency bins.

    Args:
        labels, by_heads: by exact search, int [n, K], as the bundle ranks and by the heads' score alone.
    """
    info, propensity = bundle.info, ranking.propensity
    result: dict[str, Any] = {"test": ranking.metrics_of(labels)}
    for space in SINGLE_HEADS if bundle.model.heads == "both" else ():
        result[space] = ranking.metrics(space, 1.0, info.clf_normalize)
    if bundle.neighbours is not None and info.knn is not None:
        result["heads"] = ranking.metrics_of(by_heads)
        result["knn"] = ranking.metrics_of_votes(bundle.neighbours, info.knn.neighbours)
    weights = {"clf_weight": info.clf_weight, "knn_weight": info.knn.weight if info.knn else 0.0}
    result["index"] = _against_exact(bundle, ranking, labels) | weights
    result["validation"] = info.metrics.get("validation", {})
    result["frequency_bins"] = frequency_bins(labels, ranking.truth, propensity.counts_L, propensity.inverse_L)
    return result


def _ranked(bundle: Bundle, ranking: Ranking, found: Ranked | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The bundle's answer for each query of the split, filtered pairs removed: (scores [n, K], labels [n, K]).

    Args:
        found: the best labels by the heads' score; None: the bundle's index is searched.
    """
    asked, parts = Encoded(ranking.query_de, ranking.query_clf, ranking.words(bundle.neighbours)), []
    starts = range(0, max(len(ranking.rows), 1), QUERIES_AT_ONCE)
    for start in progress(starts, desc="rank labels", unit="block"):
        some = slice(start, start + QUERIES_AT_ONCE)
        own = None if found is None else Ranked(found.rows[some], found.scores[some])
        parts.append(bundle.rank(asked.take(some), K, pair_keys(ranking.filter_pairs[some]), found=own))
    return np.concatenate([part.scores for part in parts]), np.concatenate([part.rows for part in parts])


def _against_exact(bundle: Bundle, ranking: Ranking, labels: np.ndarray) -> dict[str, float]:
    """What the index loses, on the first queries: recall of its first 10 and 100 labels against exact search, in
    percent, and "lost/P@1", ...: points by which what is served is below the exact `labels`, int [n, K]."""
    info, some = bundle.info, ranking.part(slice(ORACLE_QUERIES))
    query = some.queries(info.space, info.clf_weight, info.clf_normalize)
    k = min(K, bundle.num_labels)
    exact = exact_search(query, some.labels(info.space, info.clf_normalize), k, device=ranking.device)[1]
    found = bundle.index.search(query, k)[1]
    own, served = (some.metrics_of(each) for each in (labels[:ORACLE_QUERIES], _ranked(bundle, some)[1]))
    recalls = {f"recall@{n}": 100 * recall(found[:, :n], exact[:, :n]) for n in (10, K) if n <= k}
    return recalls | {f"lost/{name}": own[name] - served[name] for name in _OF_PART}


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


def _metrics(result: dict[str, Any], heads: str) -> dict[str, dict[str, float]]:
    """Metrics by what was searched: what is served, then without the votes, each head alone, the votes alone."""
    shown = {f"{WITH_VOTES[heads]} and votes" if "knn" in result else heads: result["test"]}
    if "heads" in result:
        shown[heads] = result["heads"]
    return shown | {name: result[name] for name in ("de", "clf", "knn") if name in result}


def data_card(params: Params) -> dict[str, str | int]:
    """Facts about the data set, for people."""
    dataset, propensity = paths.open_dataset(), paths.open_propensity()
    meta = dataset.manifest["meta"]
    groups = np.bincount(propensity.group_L, minlength=len(GROUPS))
    return {
        "name": dataset.name, "text": params.tokens.text, "tokens a text, at most": params.tokens.max_length,
        **{f"{split} queries": count for split, count in meta["splits"].items()}, "labels": dataset.num_labels,
        "pairs": meta["num_pairs"], "filter pairs": meta["num_filter_pairs"],
        **{f"{group} labels": int(count) for group, count in zip(GROUPS, groups, strict=True)},
        "labels without a training query": int((propensity.counts_L == 0).sum()),
        "propensity A, B": f"{params.data.propensity_a}, {params.data.propensity_b}",
    }  # fmt: skip


def _lineage(bundle: Bundle, dataset: XMCDataset, run_id: str | None) -> dict[str, Any]:
    tags = code_tags()
    lineage = {
        "git commit": tags.get("mlflow.source.git.commit"), "edited since": tags.get("git.dirty"),
        "unidec": __version__, "data set": dataset.sha256, "data set in DVC": dvc_hash(str(paths.DATASET)),
        "dvc.lock": tags.get("dvc.lock.sha256"), "bundle": bundle.sha256, "MLflow run": run_id,
    }  # fmt: skip
    return {key: value for key, value in lineage.items() if value}


def _run_words(bundle: Bundle, tracker: Tracker) -> str:
    """The system, its run and its commit, for the report's title."""
    commit = code_tags().get(COMMIT_TAG, "")[:8]
    parts = ["UniDEC" if bundle.model.heads == "both" else bundle.model.heads]
    parts += [f"run {tracker.run_name}"] if tracker.run_name else []
    return ", ".join(parts + ([f"commit {commit}"] if commit else []))


def _answered(
    bundle: Bundle, ranking: Ranking, scores: np.ndarray, labels: np.ndarray, tfidf: baselines.Baselines
) -> dict[str, Any]:
    """What the page shows of the answers, [n, K] each: calibration, and examples by what they gain over the baseline,
    the largest gains and the largest losses first; of equals some drawn by lot."""
    correct, places = ranking.relevant(labels), tfidf.places
    over = list(tfidf.labels)[-1] if tfidf.labels else ""
    truth, weight_L = ranking.truth[places], ranking.propensity.inverse_L
    found = [labels[places], *([tfidf.labels[over]] if over else [])]
    reached = [100 * by_query(each, truth, ["nDCG@5"], weight_L)["nDCG@5"][0] for each in found]
    gain = reached[0] - reached[1] if over else reached[0]
    lot = np.random.default_rng(0).permutation(np.flatnonzero(np.diff(truth.indptr) > 0))

    def examples(sign: int) -> list[dict[str, Any]]:
        order = lot[np.argsort(-sign * gain[lot], kind="stable")][:EXAMPLES]
        return [
            {"gain": float(gain[j]), **_example(ranking, i, labels[i, :SHOWN], scores[i], correct[i])}
            for j, i in zip(order, places[order], strict=True)
            if not over or sign * gain[j] > 0
        ]

    calibration = {"score": scores[:, :CALIBRATED], "correct": correct[:, :CALIBRATED]}
    if (probabilities := bundle.probabilities(calibration["score"])) is not None:
        calibration["probability"] = np.where(labels[:, :CALIBRATED] >= 0, probabilities, np.nan)
    name = BASELINES.get(over, "")
    return {"calibration": calibration, "gains": examples(1), "losses": examples(-1), "gain_over": name}


def _example(
    ranking: Ranking, i: int, answered: np.ndarray, scores: np.ndarray, correct: np.ndarray
) -> dict[str, Any]:  # fmt: skip
    dataset, true, answered = ranking.dataset, ranking.truth[i].indices, answered[answered >= 0]
    missed = np.setdiff1d(true, answered)
    shown = zip(dataset.label_uids(answered), dataset.label_texts(answered), scores, correct)
    return {
        "query": dataset.query_texts(ranking.rows[[i]])[0], "truth": dataset.label_texts(true),
        "missed": dataset.label_texts(missed) if len(missed) else [],
        "predictions": [
            {"label": uid, "title": title, "score": float(score), "correct": bool(right)}
            for uid, title, score, right in shown
        ],
    }  # fmt: skip
