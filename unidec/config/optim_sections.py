"""Sections of params.yaml: how a model is optimised, from scratch or from an earlier one, and where
that runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from unidec.config.section import (
    Conflict,
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Section,
    Share,
)


class Optim(Section):
    """Optimisers, learning rates and stopping."""

    decides = ("training",)

    epochs: Count = 20
    """passes over the training queries"""
    lr_encoder: Positive = 1e-4
    """learning rate of the transformer"""
    lr_bag: Positive = 1e-3
    """learning rate of the bag of tokens"""
    lr_heads: Positive = 2e-4
    """learning rate of both heads"""
    lr_clf: NonNegative = 1e-3
    """learning rate of the classifier's rows; 0: they are not trained"""
    clf_state: Literal["adam", "adagrad", "sgd", "momentum", "adamw"] = "adam"
    """optimiser of the classifier's rows; adamw updates all rows in each step, the others only the
    pool's
    """
    clf_decay: NonNegative = 0.0
    """weight decay of the classifier's rows; with adamw and momentum only"""
    warmup_epochs: NonNegative = 1.0
    """epochs of linear warm-up of the learning rates, before their decay"""
    decay: Literal["cosine", "linear"] = "cosine"
    """how the learning rates fall to 0 after the warm-up, without patience"""
    adam_eps: Positive = 1e-8
    """epsilon of AdamW, which trains transformer and heads; published code often has 1e-6"""
    patience: CountOrZero = 0
    """early stopping: rounds without a better validation nDCG@5 before one last round; 0: train all
    epochs
    """
    budget_minutes: NonNegative = 0.0
    """with patience: time limit in processor minutes (GPU: wall-clock); 0: none"""
    weight_decay: NonNegative = 0.05
    """weight decay of the weight matrices of the transformer and the heads"""
    clip_norm: NonNegative = 1.0
    """maximum gradient norm; larger gradients are scaled down to it; 0: no limit"""
    encode_chunk: CountOrZero = 0
    """texts encoded at once, with cached gradients to save memory; 0: all texts"""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """number type of training; auto: bf16 where it is faster"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            yield Conflict(
                "optim.warmup_epochs optim.epochs",
                "the warm-up is longer than the training",
                "optim.warmup_epochs well below optim.epochs",
            )


class Warm(Section):
    """A training that starts from an earlier model, named in data/start.json."""

    decides = ("training",)

    epochs: Count = 4
    """passes over the training queries, instead of optim.epochs"""
    lr_scale: Positive = 0.7
    """factor for every learning rate"""
    warmup_epochs: NonNegative = 0.25
    """epochs of linear warm-up, instead of optim.warmup_epochs"""
    keep: Share = 0.25
    """weight of the earlier model's classifier row; the label text's embedding has the rest"""

    def conflicts(self) -> Iterator[Conflict]:
        if self.warmup_epochs > self.epochs:
            yield Conflict(
                "warm.warmup_epochs warm.epochs",
                "the warm-up is longer than the training",
                "warm.warmup_epochs well below warm.epochs",
            )


class Run(Section):
    """Where training runs and how often it writes checkpoints; nothing here affects the model by
    more than rounding.
    """

    devices: Count = 1
    """number of training processes, one per GPU (more than 1: started by torchrun)"""
    restarts: CountOrZero = 0
    """how often training restarts from the newest checkpoint after a process died"""
    table_place: Literal["device", "host", "disk"] = "device"
    """where classifier rows and optimiser state are kept"""
    checkpoint_minutes: NonNegative = 5.0
    """minutes between checkpoints in a round; 0: only at its end"""
    checkpoint_steps: CountOrZero = 0
    """steps between checkpoints within a round; 0: by time only"""
    recompute: bool = False
    """recompute activations in the backward pass: less memory, a third more computation"""
    compile: bool | Literal["auto"] = "auto"
    """torch.compile of the transformer: a minute or two at the start, faster steps on a GPU; auto:
    on a GPU for trainings of at least 10,000 steps, if it works there
    """
    deterministic: bool = False
    """bit-identical trainings on a GPU too (same machine and number of threads); operations without
    a deterministic form are refused
    """
    check_memory: bool = True
    """refuse to start a training that needs too much memory (`unidec plan`)"""
