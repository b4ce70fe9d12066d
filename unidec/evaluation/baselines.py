"""TF-IDF baselines built from the training split in seconds, and the model's gain over them.

Nothing is trained: the nearest training queries vote, label texts are matched, or both. Scores stay
sparse and are computed for a block of queries at a time. Large data is sampled (`MAX_TRAIN`,
`MAX_TEST`, `MAX_SCORES`), which `Baselines.about` reports; the model is then compared on the same
sample of test queries.

Shape legend: N test queries, n of them that are ranked, B queries of one block, M training queries,
L labels, F words, K labels per query.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from unidec.data.chunks import blocks
from unidec.data.dataset import Text, XMCDataset
from unidec.data.profile import spaced, tested_in_training, text_facts
from unidec.data.propensity import training_counts
from unidec.data.tokens import Ints
from unidec.errors import DataError
from unidec.evaluation.metrics import by_query, evaluate, filtered_truth, remove_filtered, truth_of
from unidec.evaluation.significance import Comparison, best_systems, compare_systems
from unidec.metric_names import BASELINES, in_words, parse, shown
from unidec.progress import progress
from unidec.ranking.sparse import largest_of_each
from unidec.text_page import render_text

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
BLOCK = 512  # maximum queries per block
BLOCK_SCORES = 2**24  # maximum scores per block: some 200 MB while it is ranked


@dataclass(frozen=True)
class Baselines:
    """Predictions and metrics of the baselines; both mappings are empty if no baseline could be
    built.

    Attributes:
        labels: predicted labels by baseline (`BASELINES`), int64 [n, K], without filtered pairs.
        metrics: of these queries, in percent.
        places: int64 [n], positions of these queries in the test split, ascending.
        about: how the baselines were built and measured, in a sentence or two.
    """

    labels: Mapping[str, Ints]
    metrics: Mapping[str, Mapping[str, float]]
    places: Ints
    about: str


def measure_baselines(dataset: XMCDataset, text: Text, inverse_L: Any, group_L: Any) -> Baselines:
    """Measure kNN over the training queries, alone and with label match, on the test split.

    Args:
        text: which texts are compared. inverse_L, group_L: inverse propensity and frequency group
        of each label.
    """
    # validation queries vote too, as they do for the model
    splits = (dataset.rows("train"), dataset.rows("validation"))
    train = np.sort(np.concatenate(splits))
    test = dataset.rows("test")
    rows = spaced(train, MAX_TRAIN)
    scores_a_query = max(len(rows) + dataset.num_labels, 1)
    affordable = max(MIN_TEST, MAX_SCORES // scores_a_query)
    places = spaced(np.arange(len(test)), min(MAX_TEST, affordable))
    asked = test[places]
    try:
        if not len(train) or not len(test):
            raise DataError("a split without queries", expected="training and test queries")
        texts = dataset.query_texts(rows, text)
        vectorizer, train_MF = fit_words(texts, dataset.path)
    except DataError as error:
        return Baselines({}, {}, places, f"No TF-IDF baselines: {error.what}.")
    filters = dataset.filter_pairs[asked]
    label_texts = itertools.chain.from_iterable(dataset.text_batches("labels", text))
    ranked = rank(
        train_MF=train_MF,
        relevance_ML=truth_of(dataset, rows).astype(np.float32),
        label_LF=vectorizer.transform(label_texts),
        query_nF=vectorizer.transform(dataset.query_texts(asked, text)),
        methods=list(BASELINES),
        width=width_of(filters),
        desc="TF-IDF baselines",
    )
    truth = filtered_truth(dataset.relevance[asked], filters)
    labels = {name: remove_filtered(found, filters, K) for name, found in ranked.items()}
    metrics = {name: evaluate(left, truth, inverse_L, group_L) for name, left in labels.items()}
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
        One comparison for each metric that is shown as "compared", without groups that no test
        query has. R@k is left out if the data set has at most k labels: it is then 100 for any
        model that ranks all labels.
    """
    if not baselines.labels:
        return []
    num_labels = truth.shape[1]
    names = [name for name in shown("compared") if not _is_trivial(name, num_labels)]
    rankings = {MODEL: model_NK[baselines.places], **baselines.labels}
    truth = csr_matrix(truth[baselines.places])
    runs = {
        system: [by_query(labels, truth, names, inverse_L, group_L)]
        for system, labels in rankings.items()
    }
    (of_model,) = runs[MODEL]
    names = [name for name in names if of_model[name][1].any()]
    best = best_systems(runs, list(baselines.labels), names)
    return compare_systems(runs, best, names, systems=[MODEL], num_samples=NUM_SAMPLES)


def verdict(compared: Sequence[Comparison]) -> str:
    """One sentence about the model's gains and losses against the baselines and their significance;
    "" for no comparisons.
    """
    if not compared:
        return ""
    return render_text("verdict.txt", compared=compared, in_words=in_words)


def warnings(metrics: Mapping[str, float], dataset: XMCDataset, text: Text) -> list[str]:
    """Sentences about reasons why the metrics of the test split may be misleading; [] if there are
    none.

    Args:
        metrics: of the test split, in percent.
    """
    num_labels = dataset.num_labels
    many = num_labels / 4  # among so many labels, even a mediocre ranking has all relevant ones
    facts = text_facts(dataset, "queries", text)
    tested_N, leaked_N = tested_in_training(dataset, *facts)
    perfect = [
        name
        for name, value in metrics.items()
        if "@" in name and "/" not in name and value >= PERFECT
    ]
    trivial = [name for name in perfect if _is_trivial(name, many)]
    return render_text(
        "warnings.txt",
        num_labels=num_labels,
        num_trained=int((training_counts(dataset) > 0).sum()),
        num_tested=int(tested_N.sum()),
        num_leaked=int(leaked_N.sum()),
        trivial=trivial,
        surprising=[name for name in perfect if name not in trivial],
    ).splitlines()


def _is_trivial(metric: str, num_labels: float) -> bool:
    """Whether predicting all labels gives 100 percent: recall, coverage and PSP with k at least the
    number of labels.
    """
    name = parse(metric)
    return name.kind in ("R", "PSP", "coverage") and name.k >= num_labels


def fit_words(texts: Iterable[str], where: object) -> tuple[Any, csr_matrix]:
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
        raise DataError(
            "no text has a word to count",
            where=where,
            got=error,
            expected="a word of two or more characters in at least one text",
        ) from error


def rank(
    train_MF: csr_matrix,
    relevance_ML: csr_matrix,
    label_LF: csr_matrix,
    query_nF: csr_matrix,
    methods: Sequence[str],
    width: int,
    desc: str,
) -> dict[str, Ints]:
    """The best labels of each query.

    "knn": the nearest training queries, with all ties for the last place, vote for their labels
    with the square of their cosine. "label-match": the cosine of query and label text. "mix": votes
    + `MATCH_WEIGHT` x match, each scaled to a row maximum of 1.

    Args:
        train_MF, label_LF, query_nF: float32 CSR, unit vectors as rows.
        relevance_ML: float32 CSR of 0 and 1.
        methods: some of the three above. width: number of labels per query. desc: of the progress
        bar.

    Returns:
        method -> labels, int64 [n, width], see `top_rows`.
    """
    from sklearn.preprocessing import normalize

    train_FM = csr_matrix(train_MF.T)
    label_FL = csr_matrix(label_LF.T)
    widest = max(train_FM.shape[1], label_FL.shape[1], 1)
    block = min(BLOCK, max(1, BLOCK_SCORES // widest))
    parts: dict[str, list[Ints]] = {method: [] for method in methods}
    with progress(total=query_nF.shape[0], desc=desc, unit="query") as bar:
        for some in blocks(query_nF.shape[0], block):
            x_BF = query_nF[some]
            scores = {}
            if {"knn", "mix"} & set(methods):
                cosine_BM = largest(csr_matrix(x_BF @ train_FM), NEIGHBOURS)
                scores["knn"] = cosine_BM.power(2) @ relevance_ML
            if {"label-match", "mix"} & set(methods):
                scores["label-match"] = x_BF @ label_FL
            if "mix" in methods:
                votes = normalize(scores["knn"], norm="max")
                match = normalize(scores["label-match"], norm="max")
                scores["mix"] = votes + MATCH_WEIGHT * match
            for method in methods:
                parts[method].append(top_rows(csr_matrix(scores[method]), width))
            bar.update(x_BF.shape[0])
    return {method: np.concatenate(parts[method]) for method in parts}


def largest(score: csr_matrix, count: int) -> csr_matrix:
    """Only the `count` largest entries of each row, with all ties for the last of them; entries are
    positive.
    """
    place_nK = largest_of_each(score.indptr, score.data, count)
    least_n = np.append(score.data, 0.0)[place_nK[:, -1]]  # 0 for rows with fewer entries
    least_E = np.repeat(least_n, np.diff(score.indptr))
    kept = score.copy()
    kept.data[score.data < least_E] = 0
    kept.eliminate_zeros()
    return kept


def width_of(filters: csr_matrix) -> int:
    """Number of labels to rank, so that K remain after the filter pairs of each query."""
    most = int(np.diff(filters.indptr).max(initial=0))
    return min(K + most, filters.shape[1])


def top_rows(score: csr_matrix, width: int) -> Ints:
    """Labels by descending score, int64 [n, width], padded with -1.

    Args:
        score: CSR [n, L]; every stored entry is a prediction. Equal scores are ordered by label
        number.
    """
    score.sum_duplicates()
    place_nK = largest_of_each(score.indptr, score.data, width)
    return np.append(score.indices, -1).astype(np.int64)[place_nK]
