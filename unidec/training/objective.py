"""What a step minimises: both heads' losses on the vectors of a batch and its labels (UniDEC, Algorithm 1, line 5).

Legend: B queries of all ranks, S labels that a head sees, D width of a head, W width of the encoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unidec.config import Params
from unidec.model.losses import PoolTargets, symmetric_loss
from unidec.model.unidec import UniDEC
from unidec.training.batches import Prepared
from unidec.training.distributed import Ranks


class Objective:
    """The losses of a model under its parameters.

    Args:
        params: all parameters.
        model: heads, classifier table and temperatures.
        ranks: the processes that train together; each computes the whole loss.
    """

    def __init__(self, params: Params, model: UniDEC, ranks: Ranks):
        self.settings, self.seed, self.model, self.ranks = params.loss, params.seed, model, ranks

    def losses(self, x_BW: Tensor, batch: Prepared, step: int) -> dict[str, Tensor]:
        """Weighted losses of the heads: balance * L_D, (1 - balance) * (L_C + clf_bce * BCE).

        Args:
            x_BW: the encoder's outputs for this rank's texts: queries, then pool labels.
            batch: whose texts these are.
            step: number of the step in the run; decides what is drawn at random.

        Returns:
            "loss_de", "loss_clf": 0-d, of the heads that the model has.
        """
        settings, model, ranks, own = self.settings, self.model, self.ranks, batch.num_own_queries
        scale = model.log_scale.exp()
        query_sizes, pool_sizes = ranks.sizes(len(batch.pool.rows_B)), ranks.sizes(len(batch.pool.pool_S))
        both = model.heads == "both"
        losses = {}
        if model.heads != "clf":
            de_BD = model.de(x_BW)
            logit_BS = ranks.gather(de_BD[:own], query_sizes) @ ranks.gather(de_BD[own:], pool_sizes).T
            losses["loss_de"] = (settings.balance if both else 1.0) * self.loss(
                settings.de, logit_BS, scale[0], batch.targets, settings.de_forward, step
            )
        if model.heads != "de":
            assert model.table is not None
            clf_BD = ranks.gather(model.clf(x_BW[:own]), query_sizes)
            logit_BS = clf_BD @ ranks.gather(model.table.gather(batch.clf_labels), batch.clf_sizes).T
            if model.bias is not None:
                logit_BS = logit_BS + ranks.gather(model.bias.gather(batch.clf_labels), batch.clf_sizes).T
            weight = 1.0 - settings.balance if both else 1.0
            clf = self.loss(settings.clf, logit_BS, scale[1], batch.clf_targets, settings.clf_forward, step)
            if settings.clf_bce > 0:
                bce = self.loss("bce", logit_BS, scale[1], batch.clf_targets, 1.0, step)
                clf = clf + settings.clf_bce * bce
            losses["loss_clf"] = weight * clf
        return losses

    def loss(
        self, kind: str, similarity_BS: Tensor, scale: Tensor, targets: PoolTargets, forward: float, step: int
    ) -> Tensor:
        """One head's loss, 0-d, of its similarities [B, S] before the temperature.

        Args:
            kind: the loss's name.
            similarity_BS: cosines of the dual encoder, raw scores of the classifier.
            scale: 1 / tau, 0-d.
            targets: true and ignored pairs among them.
            forward: weight of query to label.
            step: as in `losses`.
        """
        settings = self.settings
        options: dict[str, Any] = {"reduction": settings.reduction, "forward": forward}
        if settings.reduction == "pol":  # which of the sampled positives; a stream of its own for each step
            options["generator"] = torch.Generator().manual_seed(hash((self.seed, step)) % 2**63)
        if kind == "triplet":  # its margin is in units of similarity
            return symmetric_loss(kind, similarity_BS, targets, margin=settings.margin, **options)
        if kind == "bce":
            options["normalise"] = settings.bce_normalise
        return symmetric_loss(kind, similarity_BS * scale, targets, **options)
