"""Fault 1's program: one life of a training, from wherever its newest checkpoint left it; whoever
runs it kills it.

    python life.py JOB.json            one life, in this process
    # a life a line of stdin, in children that are forked: nothing is imported twice
    python life.py JOB.json --warm

Prints `pid N` (a child's), `at STEP` when it begins, `step N` after each step, `refresh` and
`validate` before these, `end` at the end. A round that was trained and not measured before a kill
is measured by the next life."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from helpers.label_targets import soft_targets

from unidec.config import Params
from unidec.data.dataset import XMCDataset
from unidec.data.json_file import read_json_lines
from unidec.data.storage import write_bytes_atomic
from unidec.data.tokens import TokenCache
from unidec.training import trainer as module


def say(*words: object) -> None:
    print(*words, flush=True)


@mock.patch.object(module, "LOG_EVERY", 1)
def live(job: dict[str, Any]) -> None:
    params = Params.model_validate(job["params"])
    dataset = XMCDataset.open(job["dataset"], verify=False)
    tokens = [TokenCache.open(job[name], verify=False) for name in ("queries", "labels")]
    graph = (
        soft_targets(dataset.relevance[dataset.rows("train")], 0.1) if params.pool.gandalf else None
    )
    run_dir = Path(job["run"])
    # whoever edits the code while the tests run does not want to hear of it here
    accept = ["code"]
    data = module.TrainingData(dataset, *tokens, graph)
    trainer = module.Trainer(params.training, data, run_dir, Path(job["cache"]), accept=accept)
    say("at", trainer.at.step)
    while True:
        validate(trainer, run_dir / "rounds.jsonl")
        if trainer.finished:
            break
        if trainer.refresh_due:
            say("refresh")
            trainer.mine()
        trainer.train_round(lambda step, figures: say("step", step + 1))
    say("end")


def validate(trainer: Any, path: Path) -> None:
    settings = trainer.settings
    at_its_end = trainer.at.epoch_step == 0 and (
        trainer.finished or trainer.at.epoch % settings.pool.refresh == 0
    )
    before = [line for line in read_json_lines(path) if line["epoch"] <= trainer.at.epoch]
    if (
        not at_its_end
        or trainer.at.epoch == 0
        or (before and before[-1]["epoch"] == trainer.at.epoch)
    ):
        return
    say("validate")
    line = {
        "epoch": trainer.at.epoch,
        "step": trainer.at.step,
        "validation": metrics(trainer),
    }
    write_bytes_atomic(path, "".join(json.dumps(one) + "\n" for one in [*before, line]).encode())
    trainer.model.train()


def metrics(trainer: Any) -> dict[str, float]:
    """P@1 and P@5 of the dual encoder on the validation split, and the mean of all its
    similarities.
    """
    rows = trainer.dataset.rows("validation")
    trainer.model.eval()
    query_nD, _ = trainer.model.encode_queries(trainer.encoding.tokens["queries"], rows)
    similarity_nL = query_nD @ trainer.model.encode_labels(trainer.encoding.tokens["labels"]).T
    best_nK = np.argsort(-similarity_nL, axis=1, kind="stable")[:, :5]
    hit_nK = np.take_along_axis(trainer.dataset.relevance[rows].toarray() > 0, best_nK, axis=1)
    return {
        "P@1": float(hit_nK[:, 0].mean()),
        "P@5": float(hit_nK.mean()),
        "mean": float(similarity_nL.mean()),
    }


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if "--warm" not in sys.argv:
        live(job)
        return
    import torch._dynamo  # an optimiser's first step imports it
    from transformers.models.bert import modeling_bert

    # imported once, for all children
    assert torch._dynamo is not None and modeling_bert is not None
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            say("pid", os.getpid())
            live(job | json.loads(line))
            os._exit(0)
        os.waitpid(child, 0)
        say("gone")


if __name__ == "__main__":
    main()
