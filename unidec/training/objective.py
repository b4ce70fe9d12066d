"""The loss of a step: both heads' losses on the vectors of a batch and its labels (UniDEC,
Algorithm 1, line 5).

Heads and the products of queries and labels compute in autocast's type, which accumulates in
float32; normalisation, temperature and losses compute in float32.

Legend: B queries of all ranks, S labels that a head sees, D width of a head, W width of the
encoder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from unidec.config import Loss
from unidec.model.additions import Methods
from unidec.model.batch import Prepared
from unidec.model.dropout import dropout
from unidec.model.full_bce import full_bce
from unidec.model.losses import UNSCALED, loss_options, symmetric_loss
from unidec.model.pairs import PoolTargets, one_positive
from unidec.model.unidec import UniDEC
from unidec.training.distributed import Ranks


@dataclass
class Objective:
    """The losses of a model; with several ranks each computes the full loss.

    Attributes:
        seed: decides the random numbers that a loss draws.
        methods: what the recipe's methods change and add.
        autocast: returns the context in which heads and products compute.
    """

    settings: Loss
    model: UniDEC
    methods: Methods
    _: KW_ONLY
    seed: int
    ranks: Ranks
    autocast: Callable[[], AbstractContextManager[Any]]

    def losses(self, x_BW: Tensor, batch: Prepared, step: int) -> dict[str, Tensor]:
        """Weighted losses of the heads: balance * L_D, (1 - balance) * (L_C + clf_bce * BCE), each
        including the losses that methods add on the head's scores.

        Args:
            x_BW: the encoder's outputs for this rank's texts of the batch: queries, then pool
                labels.
            step: number of the step in the run; with the seed it decides random numbers.

        Returns:
            0-d losses: "loss_de" and "loss_clf" of the heads that the model has, then those that
            methods add.
        """
        heads = self.model.heads
        balance = self.settings.balance
        shares = (balance, 1.0 - balance) if heads == "both" else (1.0, 1.0)
        if self.model.training:
            for change in self.methods.changes:
                x_BW, batch = change.apply(x_BW, batch)
        losses = {}
        if heads != "clf":
            losses["loss_de"] = shares[0] * self._de_loss(x_BW, batch, step)
        if heads != "de":
            losses["loss_clf"] = shares[1] * self._clf_loss(x_BW, batch, step)
        for method in self.methods.losses:
            head_loss = partial(self._head_loss, self._scales()[1], step)
            query_BW = x_BW[: batch.counts.own_queries]
            losses[method.name] = method.loss(query_BW, batch, head_loss)
        return losses

    def _head_loss(
        self, scale: Tensor, step: int, score_BS: Tensor, targets: PoolTargets
    ) -> Tensor:
        """The classifier's loss, query to label, 0-d, of scores that a method computed."""
        return self.loss(self.settings.clf, score_BS, scale, targets, forward=1.0, step=step)

    def _scales(self) -> Tensor:
        """1 / tau of the dual encoder and of the classifier, [2]."""
        return self.model.log_scale.exp()

    def _de_loss(self, x_BW: Tensor, batch: Prepared, step: int) -> Tensor:
        """L_D: queries against the texts of the labels."""
        num_queries = batch.counts.own_queries
        targets = batch.targets
        with self.autocast():
            de_BD = self.model.de(x_BW, num_queries, batch.own_labels)
        scale = self._scales()[0]
        query_BD, scale = self._queries(de_BD[:num_queries], scale, batch, targets)
        sizes = self.ranks.sizes(len(batch.pool.pool_S))
        label_SD = self._labels(de_BD[num_queries:], sizes, targets)
        losses = []
        for view in self.methods.views:
            score_BS = self._products(*view(query_BD, label_SD, self.model.settings.normalize))
            losses.append(self._of_scores("de", score_BS, scale, targets, batch=batch, step=step))
        return functools.reduce(torch.add, losses)

    def _of_scores(
        self,
        head: str,
        score_BS: Tensor,
        scale: Tensor,
        targets: PoolTargets,
        *,
        batch: Prepared,
        step: int,
    ) -> Tensor:
        """A head's loss on its scores plus the losses of methods, 0-d; arguments as of `loss`."""
        settings = self.settings
        kind = getattr(settings, head)
        forward = getattr(settings, f"{head}_forward")
        loss = self.loss(kind, score_BS, scale, targets, forward=forward, step=step)
        if head == "clf" and settings.clf_bce > 0:
            bce = self.loss("bce", score_BS, scale, targets, forward=1.0, step=step)
            loss = loss + settings.clf_bce * bce
        for method in self.methods.score_losses:
            loss = loss + method.loss(head, score_BS * scale, targets, batch)
        return loss

    def _clf_loss(self, x_BW: Tensor, batch: Prepared, step: int) -> Tensor:
        """L_C + clf_bce * BCE: queries against the classifier's rows."""
        model = self.model
        settings = self.settings
        targets = batch.clf.targets
        num_queries = batch.counts.own_queries
        with self.autocast():
            own_BD = model.clf(x_BW[:num_queries])
        scale = self._scales()[1]
        query_BD, scale = self._queries(own_BD, scale, batch, targets)
        row_SD, bias_S1 = self._rows(x_BW[num_queries:], batch)
        if model.settings.clf_cosine:
            query_BD = F.normalize(query_BD, dim=-1)
            row_SD = F.normalize(row_SD.float(), dim=-1)
        # over all labels: without all logits in memory
        is_chunked = settings.clf == "bce" and batch.clf.ids is None
        if is_chunked and settings.reduction == "pol":
            targets = one_positive(targets, len(query_BD), self._generator(step))
        losses = []
        for view in self.methods.views:
            query_BV, row_SV = view(query_BD, row_SD, model.settings.clf_cosine)
            if is_chunked:
                with self.autocast():
                    loss = full_bce(
                        query_BV, row_SV, bias_S1, scale, targets, normalise=settings.bce_normalise
                    )
            else:
                logit_BS = self._products(query_BV, row_SV)
                if bias_S1 is not None:
                    logit_BS = logit_BS + bias_S1.T
                loss = self._of_scores("clf", logit_BS, scale, targets, batch=batch, step=step)
            losses.append(loss)
        return functools.reduce(torch.add, losses)

    def _rows(self, text_TW: Tensor, batch: Prepared) -> tuple[Tensor, Tensor | None]:
        """The classifier's rows [S, D] and biases [S, 1] of the labels that this rank compares with
        the queries.
        """
        model = self.model
        clf = batch.clf
        assert model.table is not None
        own_SD = dropout(model.table.gather(clf.ids), model.settings.clf_dropout, model.training)
        table_SD = self._labels(own_SD, clf.sizes, clf.targets)
        with self.autocast():
            row_SD = self.methods.rows.rows(table_SD, text_TW, batch)
        if model.bias is None:
            return row_SD, None
        return row_SD, self._labels(model.bias.gather(clf.ids), clf.sizes, clf.targets)

    def _queries(
        self, own_BD: Tensor, scale: Tensor, batch: Prepared, targets: PoolTargets
    ) -> tuple[Tensor, Tensor]:
        """The queries of all ranks, and the scale, both with full gradients on every rank."""
        sum_gradient = targets.columns.sum_gradient
        query_BD = self.ranks.gather(own_BD, self.ranks.sizes(len(batch.pool.rows_B)))
        return sum_gradient(query_BD), sum_gradient(scale)

    def _labels(self, own_SD: Tensor, sizes: list[int], targets: PoolTargets) -> Tensor:
        """The labels that this rank compares with the queries: its own labels, or all ranks'."""
        return own_SD if targets.columns.partial else self.ranks.gather(own_SD, sizes)

    def _products(self, query_BD: Tensor, row_SD: Tensor) -> Tensor:
        """Inner products of queries and labels, [B, S], of the queries' dtype."""
        with self.autocast():
            return (query_BD @ row_SD.T).to(query_BD.dtype)

    def _generator(self, step: int) -> torch.Generator:
        """Draws which of a query's sampled positives carries the losses of a step."""
        return torch.Generator().manual_seed(hash((self.seed, step)) % 2**63)

    def loss(
        self,
        kind: str,
        similarity_BS: Tensor,
        scale: Tensor,
        targets: PoolTargets,
        *,
        forward: float,
        step: int,
    ) -> Tensor:
        """The loss `kind` of a head, 0-d; the weighted sum over a mixture of targets.

        Args:
            similarity_BS: cosines or scores before the temperature.
            scale: 1 / tau, 0-d.
            forward: weight of query -> label.
        """
        if targets.mixture:
            losses = []
            for share, part in targets.mixture:
                of_part = self.loss(kind, similarity_BS, scale, part, forward=forward, step=step)
                losses.append(share * of_part)
            return torch.stack(losses).sum()
        settings = self.settings
        options = loss_options(kind, settings)
        if settings.reduction == "pol":
            options["generator"] = self._generator(step)
        logit_BS = similarity_BS if kind in UNSCALED else similarity_BS * scale
        return symmetric_loss(
            kind, logit_BS, targets, reduction=settings.reduction, forward=forward, **options
        )
