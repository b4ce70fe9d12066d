"""Sections that run the project's own trainer: correctness, step, refresh, synchronisations,
compile.
"""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from bench import (
    Bench,
    launches,
    of_step,
    queued_seconds,
    seconds,
    some_batches,
    train,
    uniform,
)
from no_waiting import NoWaiting
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unidec.model.batch import Prepared
from unidec.model.search import recall
from unidec.training.gradient_cache import encode_texts
from unidec.training.precision import autocast_type
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import LOG_EVERY, Trainer

GPU_RECIPES = ("unidec-gpu-paper", "unidec-gpu-long")
ROUNDS = 5  # in which what is compared takes turns
# most that the device may differ from the CPU in float32: losses, gradients, clusters' mean cosine,
# and what share of the shortlist may be other labels (None: shown, not judged)
TOLERANCES = {
    # sums of some 10^4 terms in another order differ by some 10^-6 of their value, and 1 /
    # temperature = 18 multiplies that in logits; of equal or nearly equal scores at a shortlist's
    # end either may be in it
    "fp32": (1e-4, 1e-3, 1e-3, 0.01),
    # the frozen transformer's vectors are kept in float16: where the two devices' float32 values
    # round to different neighbours, an input differs by 2^-11 of its value
    "fp32, frozen vectors in float16": (1e-3, 1e-2, 1e-3, 0.02),
    # each of a transformer's products is rounded to 8 bits, 2^-9 of its value, a dozen of them one
    # after the other; a random encoder's texts are nearly alike, so that this reorders them
    "bf16": (5e-2, 2e-1, 2e-2, None),
}


def made(trainer: Trainer) -> Refresh:
    """What `trainer.refresh` wrote for the first round."""
    return Refresh.load(trainer.run_dir / "refresh" / "epoch-00000", 0)


def correctness(bench: Bench) -> None:
    """Losses, gradients and one refresh on the device against the same on the CPU in float32, from
    the same start.
    """
    for recipe in (*GPU_RECIPES, "unidec"):
        _compare(
            bench,
            recipe,
            "fp32",
            "fp32" if recipe in GPU_RECIPES else "fp32, frozen vectors in float16",
        )
    if autocast_type("auto", bench.device) is not None:
        for recipe in GPU_RECIPES:
            _compare(bench, recipe, "bf16", "bf16")


def _compare(bench: Bench, recipe: str, precision: str, tolerance: str) -> None:
    train_rows, labels, batch, pool = bench.sizes.small
    values = {
        "encoder.name": str(bench.encoder(64, 2, to_compare=True)),
        "encoder.dropout": 0.0,
        "encoder.bag_dropout": 0.0,
        "model.dropout": 0.0,
        "model.clf_dropout": 0.0,
        "model.dim": 64,
        "pool.batch_size": batch,
        "pool.size": pool,
    }
    on_cpu = bench.params(recipe, **values, **{"device": "cpu", "optim.precision": "fp32"})
    reference = bench.trainer(on_cpu, train_rows, labels)
    own = bench.trainer(
        bench.params(recipe, **values, **{"optim.precision": precision}), train_rows, labels
    )
    own.model.load_dense_state(reference.model.dense_state())
    own.optimisers.load_row_states(reference.optimisers.row_states())

    expected = reference.mine()
    found = own.mine()
    shortlists = made(own).negatives, made(reference).negatives
    reference.made = own.made = made(reference)  # of the same clusters and negatives from here on
    differences: dict[str, float] = {}
    for ours, theirs in zip(some_batches(own, 3), some_batches(reference, 3), strict=True):
        exact = _losses_and_gradients(reference, theirs)
        for part, value in _losses_and_gradients(own, ours).items():
            relative = float((value - exact[part]).norm() / exact[part].norm())
            differences[part] = max(differences.get(part, 0.0), relative)

    with_itself = "" if bench.on_card else "; the processor is compared with itself"
    against = (
        f"{recipe} in {precision}, {batch} queries, pool of {pool}, {labels} labels{with_itself}"
    )
    most = TOLERANCES[tolerance]
    for part, value in differences.items():
        bench.add(
            f"{part}, relative difference to the CPU",
            value,
            "",
            against,
            most=most[part != "losses"],
        )
    cosine = abs(found["cluster_cosine"] - expected["cluster_cosine"])
    bench.add("refresh: mean cosine of clusters, difference", cosine, "", against, most=most[2])
    if shortlists[0] is not None and shortlists[1] is not None:
        other = 1 - recall(shortlists[0].astype(np.int64), shortlists[1].astype(np.int64))
        bench.add("refresh: hard negatives that are others", other, "share", against, most=most[3])


def _losses_and_gradients(trainer: Trainer, batch: Prepared) -> dict[str, Tensor]:
    """Both heads' losses [2], and the gradients of each part of the model one after another, on the
    CPU.
    """
    x_BW, backward = encode_texts(trainer.model.encoder, batch.texts, trainer.encoding.autocast)
    losses = torch.stack(list(trainer.objective.losses(x_BW, batch, 0).values()))
    backward(losses.sum())
    parts: dict[str, list[Tensor]] = {}
    for name, parameter in trainer.model.named_parameters():
        if parameter.grad is not None:
            part = "transformer" if name.startswith("encoder.") else "heads"
            parts.setdefault(f"gradients of the {part}", []).append(parameter.grad)
    for row in trainer.optimisers.row.values():
        assert row.table.used is not None and row.table.used[1].grad is not None
        parts.setdefault("gradients of table rows", []).append(row.table.used[1].grad)
    found = {
        part: torch.cat([x.float().flatten().cpu() for x in gradients])
        for part, gradients in parts.items()
    }
    trainer.optimisers.zero_grad()
    return {"losses": losses.detach().cpu(), **found}


FORMS = ("packed", "padded", "compiled")  # compiled: packed too
MOST_LAUNCHES = 300  # of a step


@dataclass(frozen=True)
class Timed:
    """A step that is timed: its recipe, how many times narrower than `hidden` its encoder is, its
    forms on a card, and most milliseconds of a packed step on an H100.
    """

    recipe: str
    narrower: int
    forms: tuple[str, ...] = FORMS
    most: float | None = None


STEPS = {
    "DistilBERT's size": Timed("unidec-gpu-paper", 1, most=30.0),
    "MiniLM's size": Timed("unidec-gpu-paper", 2, most=12.0),
    "MiniLM's size and a bag": Timed("unidec-gpu", 2, FORMS[:2]),
}


def step(bench: Bench) -> None:
    """A step by part, and against the encoder's forward and backward pass on the same texts: texts
    packed and padded.
    """
    sizes = bench.sizes
    for name, timed in STEPS.items():
        encoder = str(bench.encoder(sizes.hidden // timed.narrower, sizes.layers))
        for form in timed.forms if bench.on_card else ("padded",):
            params = bench.params(timed.recipe, **{"encoder.name": encoder})
            trainer = with_packs(bench.trainer(params), form != "padded")
            if form == "compiled":
                trainer.model.encoder.compile_transformer(bench.sizes.compiler)
            trainer.made = uniform(trainer)
            batches = some_batches(trainer, sizes.steps)
            what = f"{name}, {form}, {of_step(trainer, batches[-1])}"
            bare_s, whole_s = _in_turn(bench, trainer, batches)
            rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)[: len(batches)]
            ahead = functools.partial(trainer.batches.ahead, rows, 0, 0, trainer.made.negatives)
            prepared_s = [
                seconds(bench.device, lambda: train(trainer, ahead())) / len(rows)  # noqa: B023
                for _ in range(ROUNDS)
            ]
            whole = _median(whole_s)
            bench.add("encoder forward and backward", 1000 * _median(bare_s), "ms", what)
            most = timed.most if form != "padded" else None
            bench.add("step", 1000 * whole, "ms", what, most=most)
            prepared = _median(prepared_s)
            bench.add("step with its batch prepared on the way", 1000 * prepared, "ms", what)
            found = parts_of_step(bench, trainer)
            for part, (taken, queued, count) in found.items():
                bench.add(f"of it alone: {part}", 1000 * taken, "ms", what)
                bench.add(f"until the host has queued it: {part}", 1000 * queued, "ms", what)
                bench.add(f"launches: {part}", count, "", what)
            count = sum(each[-1] for each in found.values())
            judged = bench.on_card and form != "padded"
            bench.add("launches", count, "", what, most=MOST_LAUNCHES, judged=judged)
            with FlopCounterMode(display=False) as counter:
                train(trainer, batches[-1:])
            bench.add("counted operations", counter.get_total_flops() / 1e12, "TFLOP", what)
            rate = counter.get_total_flops() / 1e12 / whole
            bench.add("their rate", rate, "TFLOP/s", what, origin="computed from the step's time")
            for part, taken_s in (("step", whole_s), ("step with its batch", prepared_s)):
                ratio = _median([one / other for one, other in zip(taken_s, bare_s, strict=True)])
                bench.add(
                    f"{part} / encoder alone", ratio, "", what, most=1.05, judged=bench.on_card
                )


LAYERS = 6  # of the transformer whose operators are counted: DistilBERT's and MiniLM's number


def counts(bench: Bench) -> None:
    """Launches of a step by part, texts padded and packed; without a card, operators, of which each
    dropout has two more than on a card. They do not depend on widths, and on batches only by the
    number of padded chunks.
    """
    encoder = str(bench.encoder(64, LAYERS))
    for recipe in ("unidec-gpu-paper", "unidec-gpu"):
        for form in ("padded", "packed"):
            params = bench.params(recipe, **{"encoder.name": encoder})
            train_rows, labels, *_ = bench.sizes.small
            trainer = with_packs(bench.trainer(params, train_rows, labels), form == "packed")
            trainer.made = uniform(trainer)
            what = f"{recipe}, {LAYERS} layers, {form}"
            found = parts_of_step(bench, trainer)
            for part, (*_, count) in found.items():
                bench.add(f"launches: {part}", count, "", what)
            bench.add("launches", sum(count for *_, count in found.values()), "", what)


def with_packs(trainer: Trainer, packs: bool) -> Trainer:
    """A trainer whose transformer reads packed texts, or padded ones."""
    build = replace(trainer.encoding.build, packs=packs)
    trainer.encoding.build = trainer.batches.build = build
    return trainer


def parts_of_step(bench: Bench, trainer: Trainer) -> dict[str, tuple[float, float, int]]:
    """Of each part of a step, with a wait behind it: seconds, those until the host has queued its
    work (where they are the same, the host sets the pace), and launches.
    """
    found: dict[str, Any] = {}

    def encode() -> None:
        found["x"], found["backward"] = encode_texts(
            trainer.model.encoder, found["batch"].texts, trainer.encoding.autocast
        )

    def losses() -> None:
        by_name = trainer.objective.losses(found["x"], found["batch"], 0)
        found["loss"] = torch.stack(list(by_name.values())).sum()

    def backward() -> None:
        found["backward"](found["loss"])

    def update() -> None:
        norm = trainer.gradients.complete()
        trainer.optimisers.step(trainer.at.step, norm, trainer.checks.failed)

    parts = {"encoder": encode, "losses": losses, "backward": backward, "update": update}
    columns = []
    for measure in (seconds, queued_seconds, launches):
        (found["batch"],) = some_batches(trainer, 1)  # a used one knows its targets' weights
        columns.append([measure(bench.device, run) for run in parts.values()])
    return dict(zip(parts, zip(*columns, strict=True), strict=True))


def _in_turn(
    bench: Bench, trainer: Trainer, batches: list[Prepared]
) -> tuple[list[float], list[float]]:
    """Seconds of the encoder alone, and of a step, in each of `ROUNDS` turns."""

    def bare() -> None:
        for batch in batches:
            x_BW, backward = encode_texts(
                trainer.model.encoder, batch.texts, trainer.encoding.autocast
            )
            backward(x_BW.sum())
            trainer.optimisers.zero_grad()

    def whole() -> None:
        train(trainer, batches)

    for warm_up in (bare, whole):
        warm_up()
    turns = [(seconds(bench.device, bare), seconds(bench.device, whole)) for _ in range(ROUNDS)]
    bare_s, whole_s = (
        [taken / len(batches) for taken in column] for column in zip(*turns, strict=True)
    )
    return bare_s, whole_s


def _median(values: list[float]) -> float:
    return float(np.median(values))


def refresh(bench: Bench) -> None:
    """Two epochs as published, and what share of a round of T = 5 epochs its clusters and hard
    negatives take.
    """
    trainer = bench.trainer(bench.params("unidec-gpu-paper", **{"pool.refresh": 5}))
    report: dict[str, Any] = {}
    refresh_s = seconds(bench.device, lambda: report.update(trainer.mine()))
    trainer.made = made(trainer)
    rows = []
    for epoch in range(2):
        rows += trainer.made.batches(trainer.rows, trainer.batch_size, 0, epoch)
    warm_up = rows[:3]
    timed = rows[3:] if bench.on_card else rows[3 : 3 + bench.sizes.steps]
    train(trainer, trainer.batches.ahead(warm_up, 0, 0, trainer.made.negatives))
    steps = lambda: train(trainer, trainer.batches.ahead(timed, 0, 0, trainer.made.negatives))  # noqa: E731
    step_s = seconds(bench.device, steps) / len(timed)
    round_s = 5 * trainer.steps_per_epoch * step_s

    sizes = (
        f"{len(trainer.rows)} queries, {trainer.dataset.num_labels} labels, "
        f"{trainer.steps_per_epoch} steps an epoch"
    )
    for key in ("encode_queries", "cluster", "encode_labels", "mine"):
        bench.add(f"of it: {key.replace('_', ' ')}", report[f"{key}_seconds"], "s", sizes)
    bench.add("refresh", refresh_s, "s", sizes)
    bench.add(
        "five epochs of steps",
        round_s,
        "s",
        sizes,
        origin=f"computed from the mean of {len(timed)} measured steps",
    )
    whole = 20 * (refresh_s + round_s) / 3600
    bench.add("100 epochs", whole, "h", sizes, origin="computed from refresh and steps")
    share = refresh_s / (refresh_s + round_s)
    bench.add("share of the refresh at T = 5", share, "", sizes, most=0.02, judged=bench.on_card)


def synchronisations(bench: Bench) -> None:
    """Steps between two logging steps in which the host waits for the device."""
    train_rows, labels, batch, pool = bench.sizes.small
    for recipe, place in (
        ("unidec-gpu-paper", "device"),
        ("unidec-gpu-paper", "host"),
        ("unidec", "device"),
    ):
        values = {"run.table_place": place, "pool.batch_size": batch, "pool.size": pool}
        trainer = bench.trainer(bench.params(recipe, **values), train_rows, labels)
        trainer.made = uniform(trainer)
        trainer.checks.each_step = False  # as on a GPU
        transformer = trainer.model.encoder.transformer
        if not bench.on_card and transformer is not None:
            transformer.transformer.set_attn_implementation("sdpa")  # as on a GPU
        rows = trainer.made.batches(trainer.rows, trainer.batch_size, 0, 0)
        train(trainer, [trainer.prepare(rows[0], 0)])
        waited = 0
        where = ""
        for number in range(1, LOG_EVERY):
            error = _waits(bench, trainer, rows[number % len(rows)], number)
            if error is not None:
                waited = waited + 1
                where = where or _place(error)
                trainer.optimisers.zero_grad()
            trainer.at.step = number + 1
        means = (
            "set_sync_debug_mode"
            if bench.on_card
            else "a mode that refuses operators that wait, on the processor"
        )
        sizes = (
            f"{recipe}, rows on the {place}, {LOG_EVERY - 1} steps, "
            f"{means}{where and '; first at ' + where}"
        )
        bench.add("steps in which the host waits", waited, "", sizes, most=0)


def _waits(bench: Bench, trainer: Trainer, rows_B: np.ndarray, number: int) -> Exception | None:
    """Prepare a batch and train on it: what was refused, or None."""
    try:
        if bench.on_card:
            torch.cuda.set_sync_debug_mode("error")
            trainer.train_step(trainer.prepare(rows_B, number))
        else:
            batch = trainer.prepare(rows_B, number)
            with NoWaiting():
                trainer.train_step(batch)
    except (RuntimeError, AssertionError) as error:
        if "synchroniz" not in str(error) and "waits" not in str(error):
            raise
        return error
    finally:
        if bench.on_card:
            torch.cuda.set_sync_debug_mode("default")
    return None


def _place(error: Exception) -> str:
    """The innermost line of the library."""
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "unidec" in frame.filename
    ]
    frame = lines[-1] if lines else traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
