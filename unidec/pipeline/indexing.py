"""Stage `index`: write outputs/bundle with label vectors, tuned score weights, the search index and the training
profile; and `unidec index tune`: find the fastest index with a wanted recall, on a bundle's labels and real queries."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from unidec.config import Params, recorded
from unidec.data.dataset import Split, Text
from unidec.data.profile import PROFILE_KEY, profile_dataset
from unidec.errors import ConfigError
from unidec.evaluation.drift import served_facts
from unidec.methods.assembly import load_model
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.ranking import Blend, Ranking, fused, headline, training_neighbours, tuned_blend
from unidec.retrieval.bundle import Bundle
from unidec.retrieval.bundle_folder import BundleLabels, Facts, KnnInfo, Scoring, write_bundle
from unidec.retrieval.calibration import LEAST_RELEVANT, fit_calibration
from unidec.retrieval.candidates import Candidates, candidate_keys
from unidec.retrieval.fusion import FEWEST_CANDIDATES, RESCORE
from unidec.retrieval.index import KINDS, Kind, LabelIndex
from unidec.retrieval.index_tune import Measured, default_kinds, tune
from unidec.retrieval.neighbours import Neighbours
from unidec.retrieval.scoring_space import LabelRows, pair_scores
from unidec.training.precision import choose_device

OPTION_KEYS = {
    "links": "hnsw_links", "build": "hnsw_build", "search": "hnsw_search", "lists": "ivf_lists",
    "probes": "ivf_probes", "code_dims": "pq_dims", "rescore": "rescore",
}  # fmt: skip
"""Field of `IndexOptions` -> its key in the section `index`."""
CALIBRATED = 10  # predictions per query that the calibration is fitted to: those that users look at


@dataclass(frozen=True)
class Indexed:
    """The bundle that was written.

    Attributes:
        clf_weight, knn_weight: of the classifier and of the votes in its scores. fusion: whether a fusion ranks
            instead. calibrated: whether scores have probabilities.
        validation: headline metrics in percent; empty without a validation split.
    """

    bundle: str
    labels: int
    clf_weight: float
    knn_weight: float
    fusion: bool
    calibrated: bool
    validation: dict[str, float]


@dataclass(frozen=True)
class Tuned:
    """Kinds of index, measured on a bundle.

    Attributes:
        k: results per query. wanted: recall of the first k, 0 to 1. queries: a description of the queries.
        chosen: the fastest kind that reaches the wanted recall; None: none does. params: its keys for params.yaml.
    """

    bundle: str
    labels: int
    k: int
    wanted: float
    queries: str
    measured: list[Measured]
    chosen: Measured | None
    params: dict[str, str | int]


def index(params: Params) -> Indexed:
    """Build the bundle of outputs/model.

    Weights that are "auto" are tuned on the validation split, whose queries vote with the training queries afterwards.
    If the votes get no weight, the bundle contains no queries."""
    settings = params.index
    dataset = paths.open_dataset()
    model = load_model(paths.MODEL, device=str(choose_device(params.device)))
    ranking = Ranking.of_model(model, dataset, "validation", params.optim.precision)
    neighbours = None
    if settings.knn_weight != 0 or settings.fuses:
        neighbours = training_neighbours(
            model, dataset, params.optim.precision, by=settings.knn_by, word_head=settings.knn_head
        )
    blend = tuned_blend(ranking, params, neighbours)
    if neighbours is not None and settings.fuses:
        blend = fused(ranking, params, neighbours, blend)
    metrics = headline(blend.metrics) if len(ranking.rows) else {}
    relevant = ranking.relevant(blend.ranked.rows[:, :CALIBRATED])
    calibration = fit_calibration(blend.ranked.scores[:, :CALIBRATED], relevant)
    if calibration is None:
        what = f"fewer than {LEAST_RELEVANT} of the validation queries' predictions are relevant labels"
        print(f"no probabilities: {what}", file=sys.stderr)  # stdout is for the printed result
    vectors = ranking.vectors
    rows = LabelRows(vectors, settings.space, settings.clf_normalize)
    options = {name: getattr(settings, key) for name, key in OPTION_KEYS.items()}
    label_index = LabelIndex.build(rows, settings.kind, show=True, **options)
    card: dict[str, Any] = {PROFILE_KEY: _training_profile(params, model, ranking, label_index, blend, neighbours)}
    if blend.tried:
        card["tuning"] = blend.tried
    if blend.fusion:
        card["fusion"] = {"by_tail": blend.by_tail, "lost_without": blend.lost_without}
    knn = voters = None
    if neighbours is not None and (blend.knn_weight or blend.fusion):
        head: Literal["de", "clf"] = "de" if "de" in vectors else "clf"
        voters = ranking.joined_to(neighbours) if len(ranking.rows) else neighbours
        knn = KnnInfo.of(voters, blend.knn_weight, settings.knn_neighbours, head)
    write_bundle(
        paths.BUNDLE, paths.MODEL, label_index,
        BundleLabels(dataset.labels["uid"], dataset.label_texts(), vectors),
        Scoring(settings.space, blend.clf_weight, settings.clf_normalize, knn, blend.fusion, calibration),
        Facts(
            params.tokens.text, {"name": dataset.name, "sha256": dataset.sha256}, {"validation": metrics},
            recorded(params.model_dump()), card,
        ),
        voters,
    )  # fmt: skip
    return Indexed(
        str(paths.BUNDLE), dataset.num_labels, blend.clf_weight, blend.knn_weight, blend.fusion is not None,
        calibration is not None, metrics,
    )  # fmt: skip


def _training_profile(
    params: Params, model: UniDEC, ranking: Ranking, index: LabelIndex, blend: Blend, neighbours: Neighbours | None
) -> dict[str, Any]:
    """The profile of the training data (`profile_dataset`), with "served": `served_facts` of the validation queries
    (None without any), whose best scores are as in `Bundle.rank` without exclusions.

    Args:
        ranking: of the validation split. index, blend, neighbours: as the bundle serves them.
    """
    settings = params.index
    profile = profile_dataset(ranking.dataset, model.tokenizer_folder, model.max_length, params.tokens.text)
    space, normalize = settings.space, settings.clf_normalize
    query, scores = ranking.queries(space, blend.clf_weight, normalize), np.zeros((0, 1), dtype=np.float32)
    if not len(query):
        pass
    elif blend.fusion is not None and blend.reader is not None:
        words, none = ranking.words(neighbours), np.zeros(0, dtype=np.int64)
        assert ranking.query_de is not None and ranking.query_clf is not None and words is not None
        found = index.search(query, FEWEST_CANDIDATES, RESCORE)[1]
        evidence = blend.reader.read(ranking.query_de, ranking.query_clf, words, found, none)
        scores = blend.reader.rank(blend.fusion, evidence, 1).scores
    else:
        scores, rows = index.search(query, 1)
        if neighbours is not None and blend.knn_weight:
            votes = ranking.votes(neighbours, settings.knn_neighbours)
            candidates = Candidates.of(
                candidate_keys(rows, votes.key_N, votes.shape[1]),
                votes,
                lambda query_P, label_P: pair_scores(query, query_P, label_P, ranking.vectors, space, normalize),
            )
            scores = candidates.top(blend.knn_weight, 1).scores
    return profile | {"served": served_facts(query, scores[:, 0])}


def index_tune(
    source: Path, wanted: float, k: int, num_queries: int, kinds: Sequence[str] = (), threads: int = 1
) -> Tuned:
    """Measure kinds of index on a bundle, which is not changed.

    Args:
        source: the bundle's folder.
        wanted: recall of the first k labels against exact search, 0 to 1.
        num_queries: how many queries of data/dataset's validation split are used (of training, if it has none).
        kinds: the kinds to measure; empty: those that suit the number of labels.
        threads: number of threads of builds and searches.

    Raises:
        ConfigError: an unknown kind.
        ArtifactError: the bundle is damaged, or there is no data set.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError("unknown kinds of index", got=", ".join(unknown), expected=", ".join(KINDS))
    bundle = Bundle.load(source)
    rows, k = LabelRows(bundle.vectors, bundle.info.space, bundle.info.clf_normalize), min(k, bundle.num_labels)
    queries, description = _queries(bundle, num_queries)
    kinds_to_measure = cast(Sequence[Kind], kinds) or default_kinds(bundle.num_labels)
    measured = tune(rows, queries, k, kinds_to_measure, threads)
    chosen, keys = None, dict[str, str | int]()
    if enough := [one for one in measured if one.recall >= wanted]:
        chosen = min(enough, key=lambda one: one.p50_ms)
        keys = {"index.kind": chosen.kind}
        keys |= {f"index.{OPTION_KEYS[name]}": value for name, value in chosen.options.items()}
    return Tuned(str(source), bundle.num_labels, k, wanted, description, measured, chosen, keys)


def _queries(bundle: Bundle, num: int) -> tuple[npt.NDArray[np.float32], str]:
    """Vectors of some queries in the searched space, float32 [N, D'], and a description of the queries."""
    dataset = paths.open_dataset()
    split: Split = "validation" if len(dataset.rows("validation")) else "train"
    rows = dataset.rows(split)
    chosen = np.sort(np.random.default_rng(0).choice(rows, min(num, len(rows)), replace=False))
    encoded = bundle.encode(dataset.query_texts(chosen, cast(Text, bundle.info.text)))
    return bundle.searched(encoded), f"{len(chosen)} {split} queries of {dataset.name}"
