"""Stage `index`: label vectors, the blend of the scores, the search index -> outputs/bundle."""

from __future__ import annotations

from typing import Any, Literal

from unidec.config import OPERATIONS, Params
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.profile import KEY, training_profile
from unidec.pipeline.ranking import Ranking, fused, headline, training_neighbours, tuned_blend
from unidec.retrieval.bundle_folder import BundleLabels, Facts, KnnInfo, Scoring, write_bundle
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.scoring_space import LabelRows
from unidec.training.precision import choose_device

OPTION_KEYS = {
    "links": "hnsw_links", "build": "hnsw_build", "search": "hnsw_search", "lists": "ivf_lists",
    "probes": "ivf_probes", "code_dims": "pq_dims", "rescore": "rescore",
}  # fmt: skip
"""Fields of `IndexOptions`, and their keys in the section `index`."""


def index(params: Params) -> dict[str, Any]:
    """Build the bundle of outputs/model; the classifier's and the votes' weights are tuned on the validation split
    where they are "auto". Training queries that get no weight are left out of the bundle."""
    settings = params.index
    dataset = paths.open_dataset()
    model = UniDEC.load(paths.MODEL, device=str(choose_device(params.device)))
    ranking = Ranking.of_model(model, dataset, "validation", params.optim.precision)
    neighbours = None
    if settings.knn_weight != 0 or settings.fuses:
        neighbours = training_neighbours(model, dataset, params.optim.precision, by=settings.knn_by)
    blend = tuned_blend(ranking, params, neighbours)
    if neighbours is not None and settings.fuses:
        blend = fused(ranking, params, neighbours, blend)
    metrics = headline(blend.metrics) if len(ranking.rows) else {}
    vectors = ranking.vectors
    rows = LabelRows(vectors, settings.space, settings.clf_normalize)
    options = {name: getattr(settings, key) for name, key in OPTION_KEYS.items()}
    label_index = LabelIndex.build(rows, settings.kind, show=True, **options)
    card = {KEY: training_profile(params, model, ranking, label_index, blend, neighbours)}
    knn = None
    if neighbours is not None and (blend.knn_weight or blend.fusion):
        head: Literal["de", "clf"] = "de" if "de" in vectors else "clf"
        knn = KnnInfo.of(neighbours, blend.knn_weight, settings.knn_neighbours, head)
    write_bundle(
        paths.BUNDLE, paths.MODEL, label_index,
        BundleLabels(dataset.label_uids(), dataset.label_texts(), vectors),
        Scoring(settings.space, blend.clf_weight, settings.clf_normalize, knn, blend.fusion),
        Facts(
            params.tokens.text, {"name": dataset.name, "sha256": dataset.sha256}, {"validation": metrics},
            params.model_dump(exclude=set(OPERATIONS)), card | ({"tuning": blend.tried} if blend.tried else {}),
        ),
        neighbours if knn is not None else None,
    )  # fmt: skip
    return {
        "bundle": str(paths.BUNDLE), "labels": dataset.num_labels, "clf_weight": blend.clf_weight,
        "knn_weight": blend.knn_weight, "fusion": blend.fusion is not None, "validation": metrics,
    }  # fmt: skip
