"""TF-IDF baselines built from the training split, measured in seconds, and the model's gain over
them.

Nothing is trained: the nearest training queries vote, label texts are matched, or both. Scores stay
sparse and are
computed for a block of queries at a time. Large data is sampled (`MAX_TRAIN`, `MAX_TEST`,
`MAX_SCORES`), which `Baselines.about` reports; the model is then compared on the same sample of
test queries.

Shape legend: N test queries, n of them that are ranked, B queries of one block, M training queries,
L labels, F words,
K labels per query.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.data.dataset import Text, XMCDataset
from unidec.data.profile import spaced, tested_in_training, text_facts
from unidec.data.propensity import training_counts
from unidec.errors import DataError
from unidec.evaluation.metrics import GROUPS, by_query, evaluate, filtered_truth, remove_filtered
from unidec.evaluation.significance import Comparison, best_systems, compare_systems
from unidec.metric_names import BASELINES, parse
from unidec.progress import progress

COMPARED = ("P@1", "P@5", "nDCG@5", "PSP@5", "R@100")
OF_GROUPS = tuple(f"{group}/R@10" for group in GROUPS)
MODEL = "model"
K = 100
MAX_TRAIN = 100_000
MAX_TEST = 10_000
MIN_TEST = 1_000
# pairs of a test query and a training query or label; above this, test queries are sampled
MAX_SCORES = 500_000_000
NUM_SAMPLES = 2_000  # resamples of the paired tests: p-values down to 0.001
PERFECT = 99.95  # percent: from here on shown as 100.0
NEIGHBOURS = 100  # training queries that vote
MATCH_WEIGHT = 0.5  # of label match in the mix
BLOCK = 512  # most queries of a block
BLOCK_SCORES = 2**24  # most scores of a block: some 200 MB while it is ranked


@dataclass(frozen=True)
class Baselines:
    """Predictions and metrics of the baselines; both mappings are empty if no baseline could be
    built.

    Attributes:
        labels: int64 [n, K] by name of `BASELINES`, filtered pairs removed. metrics: of these
        queries, in percent.
        places: int64 [n], positions of these queries in the test split, ascending.
        about: how they were built and measured, in a sentence or two.
    """

    labels: Mapping[str, NDArray[np.int64]]
    metrics: Mapping[str, Mapping[str, float]]
    places: NDArray[np.int64]
    about: str


def measure_baselines(dataset: XMCDataset, text: Text, inverse_L: Any, group_L: Any) -> Baselines:
    """Measure kNN over the training queries, alone and with label match, on the test split.

    Args:
        text: which texts are compared. inverse_L, group_L: inverse propensity and frequency group
        of each label.
    """
    # validation queries vote too, as they do for the model
    train = np.sort(np.concatenate([dataset.rows("train"), dataset.rows("validation")]))
    test = dataset.rows("test")
    rows = spaced(train, MAX_TRAIN)
    affordable = max(MIN_TEST, MAX_SCORES // max(len(rows) + dataset.num_labels, 1))
    places = spaced(np.arange(len(test)), min(MAX_TEST, affordable))
    try:
        if not len(train) or not len(test):
            raise DataError("a split without queries", expected="training and test queries")
        vectorizer, train_MF = fit_words(dataset.query_texts(rows, text), str(dataset.path))
    except DataError as error:
        return Baselines({}, {}, places, f"No TF-IDF baselines: {error.what}.")
    filters = dataset.filter_pairs[test[places]]
    width = min(K + int(np.diff(filters.indptr).max(initial=0)), dataset.num_labels)
    label_LF = vectorizer.transform(
        itertools.chain.from_iterable(dataset.text_batches("labels", text))
    )
    relevance_ML = filtered_truth(dataset.relevance[rows], dataset.filter_pairs[rows]).astype(
        np.float32
    )
    query_nF = vectorizer.transform(dataset.query_texts(test[places], text))
    texts = "TF-IDF baselines"
    ranked = rank(
        csr_matrix(train_MF.T),
        relevance_ML,
        csr_matrix(label_LF.T),
        query_nF,
        list(BASELINES),
        width,
        texts,
    )
    truth = filtered_truth(dataset.relevance[test[places]], filters)
    labels = {name: remove_filtered(found, filters, K) for name, found in ranked.items()}
    metrics = {name: evaluate(found, truth, inverse_L, group_L) for name, found in labels.items()}
    about = (
        f"TF-IDF baselines: made from {len(rows):,} of {len(train):,} queries of the train and "
        f"validation splits, measured on {len(places):,} of {len(test):,} test queries."
    )
    return Baselines(labels, metrics, places, about)


def compare_with_baselines(
    model_NK: NDArray[np.integer],
    truth: csr_matrix,
    baselines: Baselines,
    inverse_L: Any,
    group_L: Any,
) -> list[Comparison]:
    """Compare the model with the better baseline of each metric, by paired tests with Holm's
    correction.

    Args:
        model_NK: the model's predictions for the whole test split, best first, -1 = none.
        truth: CSR [N, L] after filters. inverse_L, group_L: as for `measure_baselines`.

    Returns:
        One comparison for each of `COMPARED`, then for each of `OF_GROUPS` whose group has test
        queries. R@k is left out if the data set has at most k labels: it is then 100 for any model
        that ranks all labels.
    """
    if not baselines.labels:
        return []
    names = [name for name in (*COMPARED, *OF_GROUPS) if not _is_trivial(name, truth.shape[1])]
    rankings = {MODEL: model_NK[baselines.places], **baselines.labels}
    truth = csr_matrix(truth[baselines.places])
    runs = {
        system: [by_query(labels, truth, names, inverse_L, group_L)]
        for system, labels in rankings.items()
    }
    names = [name for name in names if runs[MODEL][0][name][1].any()]
    best = best_systems(runs, list(baselines.labels), names)
    better = [{name: runs[best[name]][0][name] for name in names}]
    comparisons = compare_systems(
        {MODEL: runs[MODEL], "best": better}, "best", names, num_samples=NUM_SAMPLES
    )
    return [dataclasses.replace(one, against=best[one.metric]) for one in comparisons]


def verdict(compared: Sequence[Comparison]) -> str:
    """One sentence about the model's gains and losses against the baselines and their significance;
    "" for no comparisons.
    """
    if not compared:
        return ""

    def listed(better: bool, worse: bool) -> str:
        parts = []
        for one in compared:
            group, _, name = one.metric.rpartition("/")
            if (one.better, one.worse) == (better, worse):
                parts.append(
                    f"{name}{f' of {group} labels' if group else ''} {one.difference:+.1f}"
                )
        return ", ".join(parts)

    sentence = (
        "Against the better TF-IDF baseline of each metric, "
        f"on {compared[0].num_queries:,} test queries, "
        f"the model gains {listed(True, False) or 'nothing significant'}; "
        f"loses {listed(False, True) or 'nothing significant'}"
    )
    undecided = listed(False, False)
    if undecided:
        sentence += f"; no significant difference: {undecided}"
    meant = "percentage points; significant: p < 0.05 in a paired test with Holm's correction"
    return f"{sentence} ({meant})."


def warnings(metrics: Mapping[str, float], dataset: XMCDataset, text: Text) -> list[str]:
    """Sentences about reasons why the metrics of the test split may be misleading; [] if there are
    none.

    Args:
        metrics: of the test split, in percent.
    """
    reasons = []
    trained = int((training_counts(dataset) > 0).sum())
    if trained <= 1:
        reasons.append(
            f"{'Only one label has' if trained else 'No label has'} training queries: the "
            "model has no choice between "
            "labels, and the metrics say nothing about it."
        )
    tested_N, leaked_N = tested_in_training(dataset, *text_facts(dataset, "queries", text))
    num_tested = int(tested_N.sum())
    if repeated := int(leaked_N.sum()):
        reasons.append(
            f"{repeated:,} of {num_tested:,} test queries ({repeated / num_tested:.1%}) have the "
            "same text as a training query: the metrics reward memorising them. Remove them "
            "from the test split, or from training."
        )
    perfect = [
        name
        for name, value in metrics.items()
        if "/" not in name and "@" in name and value >= PERFECT
    ]
    if trivial := [name for name in perfect if _is_trivial(name, dataset.num_labels)]:
        reasons.append(
            f"{', '.join(trivial)}: 100.0 because the data set has only "
            f"{dataset.num_labels:,} labels."
        )
    if surprising := [name for name in perfect if name not in trivial]:
        reasons.append(
            f"{', '.join(surprising)}: 100.0. Real data is hardly ever that easy: look for test "
            "queries among the training queries, for labels named in the texts, and at the "
            "number of test queries."
        )
    return reasons


def _is_trivial(metric: str, num_labels: int) -> bool:
    """Whether predicting all labels gives 100 percent: recall and coverage with k at least the
    number of labels.
    """
    name = parse(metric)
    return name.kind in ("R", "coverage") and name.k >= num_labels


def fit_words(texts: Iterable[str], where: str) -> tuple[Any, csr_matrix]:
    """Fit scikit-learn's `TfidfVectorizer` (sublinear, without English stop words); returns it and
    the texts' unit vectors.

    Raises:
        DataError: no text has a word.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)
    try:
        return vectorizer, vectorizer.fit_transform(texts)
    except ValueError as error:  # scikit-learn's "empty vocabulary"
        expected = "a word of two or more characters in at least one text"
        raise DataError(
            "no text has a word to count", where=where, got=str(error)[:200], expected=expected
        ) from error


def rank(
    train_FM: csr_matrix,
    relevance_ML: csr_matrix,
    label_FL: csr_matrix,
    query_nF: csr_matrix,
    methods: Sequence[str],
    width: int,
    desc: str,
) -> dict[str, NDArray[np.int64]]:
    """The best labels of each query.

    "knn": the nearest training queries, with all ties for the last place, vote for their labels
    with the square of their cosine. "label-match": the cosine of query and label text. "mix": votes
    + `MATCH_WEIGHT` x match, each scaled to a row maximum of 1.

    Args:
        train_FM, label_FL: float32 CSR, unit vectors as columns. query_nF: float32 CSR, unit
        vectors as rows.
        relevance_ML: float32 CSR of 0 and 1.
        methods: some of the three above. width: number of labels per query. desc: of the progress
        bar.

    Returns:
        method -> labels, int64 [n, width], see `top_rows`.
    """
    from sklearn.preprocessing import normalize

    block = max(1, min(BLOCK, BLOCK_SCORES // max(train_FM.shape[1], label_FL.shape[1], 1)))
    parts: dict[str, list[NDArray[np.int64]]] = {method: [] for method in methods}
    with progress(total=query_nF.shape[0], desc=desc, unit="query") as bar:
        for start in range(0, query_nF.shape[0], block):
            x_BF = query_nF[start : start + block]
            scores = {}
            if {"knn", "mix"} & set(methods):
                scores["knn"] = (
                    largest(csr_matrix(x_BF @ train_FM), NEIGHBOURS).power(2) @ relevance_ML
                )
            if {"label-match", "mix"} & set(methods):
                scores["label-match"] = x_BF @ label_FL
            if "mix" in methods:
                votes, match = (
                    normalize(scores[name], norm="max") for name in ("knn", "label-match")
                )
                scores["mix"] = votes + MATCH_WEIGHT * match
            for method in methods:
                parts[method].append(top_rows(largest(csr_matrix(scores[method]), width), width))
            bar.update(x_BF.shape[0])
    return {method: np.concatenate(blocks) for method, blocks in parts.items()}


def largest(score: csr_matrix, count: int) -> csr_matrix:
    """Only the `count` largest entries of each row, with all ties for the last of them."""
    keep = np.ones(score.nnz, dtype=bool)
    for start, end in zip(score.indptr[:-1], score.indptr[1:], strict=True):
        if end - start > count:
            row = score.data[start:end]
            keep[start:end] = row >= np.partition(row, end - start - count)[end - start - count]
    num_kept = np.concatenate([[0], np.cumsum(keep)])
    return csr_matrix(
        (score.data[keep], score.indices[keep], num_kept[score.indptr]), shape=score.shape
    )


def top_rows(score: csr_matrix, width: int) -> NDArray[np.int64]:
    """Labels by falling score, int64 [n, width], padded with -1.

    Args:
        score: CSR [n, L]; every stored entry is a prediction. Equal scores are ordered by label
        number.
    """
    score.sum_duplicates()
    length = np.diff(score.indptr)
    row = np.repeat(np.arange(len(length)), length)
    order = np.lexsort((score.indices, -score.data, row))
    place = np.arange(len(row)) - np.repeat(score.indptr[:-1], length)
    labels = np.full((len(length), width), -1, dtype=np.int64)
    keep = place < width
    labels[row[keep], place[keep]] = score.indices[order][keep]
    return labels
