"""A plan from parameters and sizes."""

from __future__ import annotations

from dataclasses import replace

from unidec.config import Params
from unidec.training.plan.around import disk_items, host_items
from unidec.training.plan.items import Item, Plan
from unidec.training.plan.sizes import EncoderShape, Sizes, batch_sizes
from unidec.training.plan.step import Setting, state_items, work_items


def make_plan(
    params: Params, sizes: Sizes, shape: EncoderShape, *, cuda: bool, half: bool, process: int, context: int = 0
) -> Plan:
    """The memory a training takes, by arithmetic; several ranks as on one machine, a device each.

    Args:
        params: all parameters.
        sizes: of the data.
        shape: of the transformer (a bag takes its width and vocabulary from it).
        cuda: the device is a GPU; else what would lie on it lies in host memory.
        half: transformers compute in bfloat16.
        process: bytes of a process with the libraries loaded.
        context: bytes that the driver and its libraries hold on the device before the first tensor.

    Raises:
        ConfigError: more layers to train than the encoder has.
    """
    setting = Setting(params, sizes, shape, batch_sizes(params, sizes), cuda, half)
    items = [*state_items(setting), *work_items(setting), *host_items(setting, process), *disk_items(setting)]
    if cuda and context:
        items.append(Item("driver and libraries", "device", context, "context of the device and its libraries"))
    if cuda:
        whole = [i for i in state_items(setting) if i.place == "device" and not i.phases]
        # the classifier's rows are made where they live
        held = sum(i.num_bytes for i in whole if not i.name.startswith("classifier"))
        items.append(Item("model before it moves", "host", held, "weights are made in host memory", ("start",)))
    else:
        items = [replace(item, place="host") if item.place == "device" else item for item in items]
    ranks = params.run.devices
    if ranks > 1:  # each is a process of its own; the files that they map are the same
        items = [
            item if item.place != "host" or item.spare else replace(
                item, num_bytes=ranks * item.num_bytes, formula=f"{item.formula}, {ranks} ranks"
            )
            for item in items
        ]  # fmt: skip
    batch, n = setting.batch, setting.batch.texts
    facts = {
        "queries": sizes.num_queries, "labels": sizes.num_labels, "steps_per_epoch": batch.steps,
        "batch_queries": batch.queries, "pool_labels": batch.labels, "classifier_labels": batch.classifier_labels,
        "texts_per_step": n.count, "tokens_per_step": n.tokens, "padded_tokens_per_step": n.padded,
        "encoder_parameters": shape.parameters if setting.has_transformer else 0,
        "precision": "bf16" if half else "fp32",
    }  # fmt: skip
    return Plan(tuple(item for item in items if item.num_bytes), "cuda" if cuda else "cpu", facts)
