"""Stage `index` writes outputs/bundle. `unidec index tune` finds a fast index of enough recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from unidec.bundle.bundle import Bundle
from unidec.bundle.bundle_folder import BundleLabels, Facts, Scoring, write_bundle
from unidec.bundle.bundle_info import KnnInfo
from unidec.config import Params, recorded
from unidec.config.index_spec import KINDS, IndexSpec, Kind
from unidec.data.dataset import Split, XMCDataset, texts_read
from unidec.data.profile import PROFILE_KEY, profile_dataset, spaced
from unidec.data.propensity import training_counts
from unidec.errors import ConfigError
from unidec.evaluation.drift import served_facts
from unidec.methods.assembly import load_model
from unidec.metric_names import headline
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.ranking import (
    Ranking,
    fused,
    quality_by_width,
    training_neighbours,
    tuned_blend,
)
from unidec.progress import say
from unidec.ranking.calibration import LEAST_RELEVANT, fit_calibration
from unidec.ranking.index import LabelIndex
from unidec.ranking.index_tune import Measured, default_kinds, tune
from unidec.ranking.neighbours import Neighbours
from unidec.ranking.ranker import Ranker
from unidec.ranking.row_prior import draw_rows
from unidec.training.precision import choose_device

CALIBRATED = 10  # predictions per query that the calibration is fitted to: those that users see


@dataclass(frozen=True)
class Indexed:
    """The bundle that was written.

    Attributes:
        clf_weight, knn_weight: weights of the classifier and of the votes in its scores. fusion:
            whether a fusion ranks instead. calibrated: whether scores have probabilities.
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
        k: results per query. wanted: required recall of the first k, 0 to 1. queries: a description
            of the queries.
        chosen: the fastest index that reaches the required recall; None: none does.
    """

    bundle: str
    labels: int
    k: int
    wanted: float
    queries: str
    measured: list[Measured]
    chosen: Measured | None


def _neighbours(params: Params, model: UniDEC, dataset: XMCDataset) -> Neighbours | None:
    """The training queries that vote; None if none do."""
    index = params.index
    if index.knn_weight == 0 and not index.fuses:
        return None
    return training_neighbours(
        model,
        dataset,
        params.optim.precision,
        by=index.knn_by,
        word_head=index.knn_head,
        width=index.width,
    )


def index(params: Params) -> Indexed:
    """Build the bundle of outputs/model.

    Weights that are "auto" are tuned on the validation split. Afterwards, its queries vote together
    with the training queries. If the votes get no weight, the bundle contains no queries.
    """
    settings = params.index
    precision = params.optim.precision
    dataset = paths.open_dataset()
    model = load_model(paths.MODEL, device=str(choose_device(params.device)))
    ranking = Ranking.of_model(model, dataset, "validation", precision)
    if settings.clf_prior:
        vectors = ranking.vectors
        draw_rows(vectors["clf"], vectors["de"], training_counts(dataset), settings.clf_prior)
    is_unit = model.settings.normalize
    by_width = quality_by_width(ranking, params, is_unit)
    if settings.width:
        ranking = ranking.at_width(settings.width, is_unit)
    neighbours = _neighbours(params, model, dataset)
    if neighbours is not None:
        ranking = ranking.with_words(neighbours.words)
    blend = tuned_blend(ranking, params, neighbours)
    if neighbours is not None and settings.fuses:
        blend = fused(ranking, params, neighbours, blend)
    metrics = headline(blend.metrics) if len(ranking.rows) else {}
    relevant = ranking.relevant(blend.ranked.rows[:, :CALIBRATED])
    calibration = fit_calibration(blend.ranked.scores[:, :CALIBRATED], relevant)
    if calibration is None:
        what = f"fewer than {LEAST_RELEVANT} predictions of the validation queries are relevant"
        say(f"no probabilities: {what}")
    heads = ranking.heads(settings, blend.clf_weight)
    spec = IndexSpec.parse(settings.factory, settings.search, dataset.num_labels)
    label_index = LabelIndex.build(
        heads, spec, show=True, parts=paths.BUNDLE.with_name("index.parts")
    )
    voting = knn = voters = None
    if neighbours is not None and (blend.knn_weight or blend.fusion):
        voting = ranking.voting(neighbours, settings.knn_neighbours)
        voting = replace(voting, weight=blend.knn_weight)
        voters = ranking.joined_to(voting) if len(ranking.rows) else neighbours
        knn = KnnInfo.of(voters, voting.weight, voting.num, voting.head)
    ranker = Ranker(heads, label_index, voting, blend.fusion, blend.reader)
    card: dict[str, Any] = {PROFILE_KEY: _training_profile(params, model, ranking, ranker)}
    if blend.tried:
        card["tuning"] = blend.tried
    if by_width:
        card["widths"] = by_width
    if blend.fusion:
        card["fusion"] = {"by_tail": blend.by_tail}
    titles = texts_read(dataset.labels, "title")
    write_bundle(
        paths.BUNDLE,
        paths.MODEL,
        index=label_index,
        labels=BundleLabels(dataset.labels["uid"], titles, ranking.vectors),
        scoring=Scoring(
            space=settings.space,
            clf_weight=blend.clf_weight,
            clf_normalize=settings.clf_normalize,
            knn=knn,
            fusion=blend.fusion,
            calibration=calibration,
        ),
        facts=Facts(
            text=params.tokens.text,
            dataset={"name": dataset.name, "sha256": dataset.sha256},
            metrics={"validation": metrics},
            params=recorded(params.model_dump()),
            card=card,
        ),
        neighbours=voters,
    )
    return Indexed(
        bundle=str(paths.BUNDLE),
        labels=dataset.num_labels,
        clf_weight=blend.clf_weight,
        knn_weight=blend.knn_weight,
        fusion=blend.fusion is not None,
        calibrated=calibration is not None,
        validation=metrics,
    )


def _training_profile(
    params: Params, model: UniDEC, ranking: Ranking, ranker: Ranker
) -> dict[str, Any]:
    """The profile of the training data (`profile_dataset`), with "served": `served_facts` of the
    ranking's queries (None without any), ranked as the bundle ranks, but without their own votes.
    """
    profile = profile_dataset(
        ranking.dataset, model.tokenizer_folder, model.max_length, params.tokens.text
    )
    scores = np.zeros(0, dtype=np.float32)
    if len(ranking.rows):
        scores = ranker.rank(ranking.encoded, 1).scores[:, 0]
    return profile | {"served": served_facts(ranker.queries(ranking.encoded), scores)}


def index_tune(
    source: Path,
    wanted: float,
    k: int,
    num_queries: int,
    kinds: Sequence[str],
    threads: int,
) -> Tuned:
    """Measure kinds of index on a bundle, which is not changed.

    Args:
        source: the bundle's folder.
        wanted: recall of the first k labels against exact search, 0 to 1.
        num_queries: how many queries of data/dataset's validation split are used (of training, if
        it has none).
        kinds: the kinds to measure; empty: those that suit the number of labels.
        threads: number of threads of builds and searches.

    Raises:
        ConfigError: an unknown kind.
        ArtifactError: the bundle is damaged, or there is no data set.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(
            "unknown kinds of index", got=", ".join(unknown), expected=", ".join(KINDS)
        )
    bundle = Bundle.load(source)
    k = min(k, bundle.num_labels)
    queries, description = _queries(bundle, num_queries)
    kinds_to_measure = cast(Sequence[Kind], kinds) or default_kinds(bundle.num_labels)
    measured = tune(bundle.ranker.heads, queries, k, kinds_to_measure, threads)
    enough = [one for one in measured if one.recall >= wanted]
    chosen = min(enough, key=lambda one: one.p50_ms, default=None)
    return Tuned(
        bundle=str(source),
        labels=bundle.num_labels,
        k=k,
        wanted=wanted,
        queries=description,
        measured=measured,
        chosen=chosen,
    )


def _queries(bundle: Bundle, num: int) -> tuple[npt.NDArray[np.float32], str]:
    """Some queries in the searched space, float32 [N, D'], and a description of them."""
    dataset = paths.open_dataset()
    split: Split = "validation" if len(dataset.rows("validation")) else "train"
    chosen = spaced(dataset.rows(split), num)
    encoded = bundle.encode(dataset.query_texts(chosen, bundle.info.text))
    return bundle.ranker.queries(encoded), f"{len(chosen)} {split} queries of {dataset.name}"
