"""Surrogate task: the labels of a cluster share a classifier row, which trains with clusters as
labels (Astec: Dahiya et al. 2021). Trains on one rank only.

Legend: L labels, C clusters.
"""

from __future__ import annotations

from unidec.methods.label_clusters import cluster_of_label
from unidec.model.additions import Classifier, Rows
from unidec.model.unidec import UniDEC


class ClusterRows(Rows):
    """A row for each cluster of labels; in the export, each label has the row of its cluster."""

    def __init__(self, model: UniDEC):
        self.model = model

    def exported(self) -> Classifier:
        cluster_L = cluster_of_label(self.model)
        rows_CD, bias_C = self.model.classifier_table()
        assert rows_CD is not None
        return rows_CD[cluster_L], None if bias_C is None else bias_C[cluster_L]
