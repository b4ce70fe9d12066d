"""The loss of a step: both heads' losses on the vectors of a batch and its labels (UniDEC, Algorithm 1, line 5).

Heads and the products of queries and labels compute in autocast's type, which accumulates in float32; normalisation,
temperature and losses compute in float32.

Legend: B queries of all ranks, S labels that a head sees, D width of a head, W width of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unidec.model.full_bce import full_bce
from unidec.model.losses import UNSCALED, loss_options, symmetric_loss
from unidec.model.pairs import PoolTargets
from unidec.model.unidec import UniDEC, related_texts
from unidec.sections import Loss
from unidec.training.batches import Prepared
from unidec.training.distributed import Ranks
from unidec.training.mixup import Mix


class Objective:
    """The losses of a model; with several ranks each computes the full loss.

    Args:
        seed: decides the random numbers that a loss draws.
        autocast: returns the context in which heads and products compute.
        num_kept: number of clusters that each level of a label tree keeps (`pool.shortlist`); 0: all.
    """

    def __init__(
        self,
        settings: Loss,
        seed: int,
        model: UniDEC,
        ranks: Ranks,
        autocast: Callable[[], AbstractContextManager[Any]],
        num_kept: int = 0,
    ):
        self.settings, self.seed, self.model, self.ranks, self.autocast = settings, seed, model, ranks, autocast
        self.num_kept = num_kept

    def losses(self, x_BW: Tensor, batch: Prepared, step: int) -> dict[str, Tensor]:
        """Weighted losses of the heads: balance * L_D, (1 - balance) * (L_C + clf_bce * BCE).

        Args:
            x_BW: the encoder's outputs for this rank's texts of the batch: queries, then pool labels.
            step: number of the step in the run; with the seed it decides random numbers.

        Returns:
            0-d losses: "loss_de" and "loss_clf" of the heads that the model has, "loss_levels" of its label tree.
        """
        settings, both = self.settings, self.model.heads == "both"
        mix = batch.mix if self.model.training else None
        if mix is not None:
            x_BW = mix.vectors(x_BW)
        losses = {}
        if self.model.heads != "clf":
            losses["loss_de"] = (settings.balance if both else 1.0) * self._de_loss(x_BW, batch, step, mix)
        if self.model.heads != "de":
            losses["loss_clf"] = (1.0 - settings.balance if both else 1.0) * self._clf_loss(x_BW, batch, step, mix)
        if self.model.tree is not None:
            losses["loss_levels"] = self._level_loss(x_BW[: batch.num_own_queries], batch, step)
        return losses

    def _level_loss(self, x_BW: Tensor, batch: Prepared, step: int) -> Tensor:
        """The losses of a label tree, summed over its levels: the classifier's loss, query to label, on the clusters
        whose parents are kept (CascadeXML, a loss for each resolution)."""
        assert self.model.tree is not None
        with self.autocast():
            scores = self.model.tree(x_BW, self.num_kept, [(level.row_P, level.col_P) for level in batch.levels])
        kind, scale = self.settings.clf, self.model.log_scale.exp()[1]
        levels = zip(scores, batch.levels, strict=True)
        return torch.stack([self.loss(kind, score_BC, scale, level, 1.0, step) for score_BC, level in levels]).sum()

    def _de_loss(self, x_BW: Tensor, batch: Prepared, step: int, mix: Mix | None) -> Tensor:
        """L_D: queries against the texts of the labels."""
        num_queries, settings, targets = batch.num_own_queries, self.settings, batch.targets
        with self.autocast():
            de_BD = self.model.de(x_BW, batch.own_labels)
        query_BD, scale = self._queries(de_BD[:num_queries], self.model.log_scale.exp()[0], batch, targets)
        label_SD = self._labels(de_BD[num_queries:], self.ranks.sizes(len(batch.pool.pool_S)), targets)
        similarity_BS = self._products(query_BD, label_SD)
        return self._mixed(settings.de, similarity_BS, scale, targets, settings.de_forward, step, mix)

    def _clf_loss(self, x_BW: Tensor, batch: Prepared, step: int, mix: Mix | None) -> Tensor:
        """L_C + clf_bce * BCE: queries against the classifier's rows."""
        model, settings, targets = self.model, self.settings, batch.clf_targets
        query_BW, text_SW = x_BW[: batch.num_own_queries], x_BW[batch.num_own_queries :]
        with self.autocast():
            own_BD = model.clf(query_BW)
        query_BD, scale = self._queries(own_BD, model.log_scale.exp()[1], batch, targets)
        assert model.table is not None
        own_SD = F.dropout(model.table.gather(batch.clf_labels), model.settings.clf_dropout, model.training)
        row_SD = self._labels(own_SD, batch.clf_sizes, targets)
        if model.settings.clf_residual:  # trains on one rank only, which encodes all of the pool's texts
            text_SW = text_SW if batch.clf_places is None else text_SW[batch.clf_places]
            with self.autocast():
                text_SD, text_ND = model.text_rows(text_SW).tensor_split([len(row_SD)])
            if not model.settings.clf_queries:
                text_ND = text_SD
            related_SD = (
                None if batch.related is None else related_texts(text_ND, *batch.related, num_labels=len(row_SD))
            )
            row_SD = model.residual_rows(text_SD, row_SD, related_SD)
        bias_S1 = None
        if model.bias is not None:
            bias_S1 = self._labels(model.bias.gather(batch.clf_labels), batch.clf_sizes, targets)
        if settings.clf == "bce" and batch.clf_labels is None:  # over all labels: without all logits in memory
            with self.autocast():
                return full_bce(query_BD, row_SD, bias_S1, scale, targets, normalise=settings.bce_normalise)
        logit_BS = self._products(query_BD, row_SD)
        if bias_S1 is not None:
            logit_BS = logit_BS + bias_S1.T
        loss = self._mixed(settings.clf, logit_BS, scale, targets, settings.clf_forward, step, mix)
        if settings.clf_bce > 0:
            loss = loss + settings.clf_bce * self._mixed("bce", logit_BS, scale, targets, 1.0, step, mix)
        return loss

    def _mixed(
        self, kind: str, similarity_BS: Tensor, scale: Tensor, targets: PoolTargets, forward: float, step: int,
        mix: Mix | None,
    ) -> Tensor:  # fmt: skip
        """`loss`, for mixed queries the weighted sum over the targets of `mix`."""
        shares = [(1.0, targets)] if mix is None else mix.targets(targets)
        losses = [(share, self.loss(kind, similarity_BS, scale, shared, forward, step)) for share, shared in shares]
        return losses[0][1] if len(losses) == 1 else torch.stack([share * loss for share, loss in losses]).sum()

    def _queries(self, own_BD: Tensor, scale: Tensor, batch: Prepared, targets: PoolTargets) -> tuple[Tensor, Tensor]:
        """The queries of all ranks, and the scale, both with full gradients on every rank."""
        sum_gradient = targets.columns.sum_gradient
        query_BD = self.ranks.gather(own_BD, self.ranks.sizes(len(batch.pool.rows_B)))
        return sum_gradient(query_BD), sum_gradient(scale)

    def _labels(self, own_SD: Tensor, sizes: list[int], targets: PoolTargets) -> Tensor:
        """The labels that this rank compares with the queries: its own ones, or those of all ranks."""
        return own_SD if targets.columns.partial else self.ranks.gather(own_SD, sizes)

    def _products(self, query_BD: Tensor, row_SD: Tensor) -> Tensor:
        """Inner products of queries and labels, [B, S], of the queries' dtype."""
        with self.autocast():
            return (query_BD @ row_SD.T).to(query_BD.dtype)

    def loss(
        self, kind: str, similarity_BS: Tensor, scale: Tensor, targets: PoolTargets, forward: float, step: int
    ) -> Tensor:
        """The loss `kind` of a head, 0-d.

        Args:
            similarity_BS: cosines or scores before the temperature.
            scale: 1 / tau, 0-d.
            forward: weight of query -> label.
        """
        settings = self.settings
        options: dict[str, Any] = loss_options(kind, settings)
        if settings.reduction == "pol":  # draws one of the sampled positives
            options["generator"] = torch.Generator().manual_seed(hash((self.seed, step)) % 2**63)
        logit_BS = similarity_BS if kind in UNSCALED else similarity_BS * scale
        return symmetric_loss(kind, logit_BS, targets, reduction=settings.reduction, forward=forward, **options)
