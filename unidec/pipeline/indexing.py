"""Stage `index`: label vectors, the blend of the scores, the search index -> outputs/bundle."""

from __future__ import annotations

from typing import Any

from unidec.config import OPERATIONS, Params
from unidec.model.unidec import UniDEC
from unidec.pipeline import paths
from unidec.pipeline.profile import KEY, training_profile
from unidec.pipeline.ranking import Ranking, headline, training_neighbours, tuned_blend
from unidec.retrieval.bundle_folder import write_bundle
from unidec.retrieval.index import LabelIndex
from unidec.retrieval.label_rows import LabelRows
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
    if settings.knn_weight != 0:
        neighbours = training_neighbours(model, dataset, params.optim.precision, by=settings.knn_by)
    blend = tuned_blend(ranking, params, neighbours)
    metrics = headline(blend.metrics) if len(ranking.rows) else {}
    vectors = ranking.vectors
    rows = LabelRows(vectors, settings.space, settings.clf_normalize)
    options = {name: getattr(settings, key) for name, key in OPTION_KEYS.items()}
    label_index = LabelIndex.build(rows, settings.kind, show=True, **options)
    card = {KEY: training_profile(params, model, ranking, label_index, blend, neighbours)}
    write_bundle(
        paths.BUNDLE, paths.MODEL, label_index,
        de_LD=vectors.get("de"), clf_LD=vectors.get("clf"), bias_L=vectors.get("bias"),
        uids=dataset.label_uids(), titles=dataset.label_texts(), space=settings.space, clf_weight=blend.clf_weight,
        clf_normalize=settings.clf_normalize, neighbours=neighbours if blend.knn_weight else None,
        knn_weight=blend.knn_weight, knn_neighbours=settings.knn_neighbours, text=params.tokens.text,
        dataset={"name": dataset.name, "sha256": dataset.sha256}, metrics={"validation": metrics},
        params=params.model_dump(exclude=set(OPERATIONS)), card=card | ({"tuning": blend.tried} if blend.tried else {}),
    )  # fmt: skip
    return {
        "bundle": str(paths.BUNDLE), "labels": dataset.num_labels, "clf_weight": blend.clf_weight,
        "knn_weight": blend.knn_weight, "validation": metrics,
    }  # fmt: skip
