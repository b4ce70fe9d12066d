"""What the classifier's table loses with less state, fewer bits and lazy rows.

    python benchmarks/table_states.py lazy
    python benchmarks/table_states.py quality
    python benchmarks/table_states.py quality --epochs 6 --seeds 0 1 --only bf16

`lazy`: how far one use moves a row, by lazy Adam (rows that a step does not use are not touched) and by dense Adam
(every row in every step), for rows that are used more or less often. Takes seconds, needs no data.

`quality`: trains the ingested data set (bag encoder, the classifier alone, on the pool) with each choice of
`model.clf_dtype` and `optim.clf_state` at several `optim.lr_clf`, and measures the validation split.

Each prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unidec.config import load_params
from unidec.data.storage import write_json
from unidec.model.row_table import RowTable
from unidec.pipeline.ranking import Ranking
from unidec.pipeline.training import open_trainer
from unidec.ranking.heads import Heads
from unidec.training.optim import ROW_OPTIMISERS

RATES = {"adam": (1e-3, 3e-3, 1e-2), "adagrad": (1e-2, 3e-2, 1e-1, 3e-1), "sgd": (1.0, 3.0, 10.0, 30.0, 100.0)}
CHOICES = (("fp32", "adam"), ("fp32", "adagrad"), ("fp32", "sgd"), ("bf16", "adam"), ("bf16", "adagrad"),
           ("bf16", "sgd"))  # fmt: skip
SETTINGS: dict[str, Any] = {
    "device": "cpu", "encoder.kind": "bag", "model.heads": "clf", "model.dim": 128, "index.space": "clf",
    "index.clf_weight": 1.0, "index.clf_normalize": True, "pool.clf_labels": "pool", "pool.size": 1000, "pool.eta": 0,
    "pool.batches": "random", "loss.clf_forward": 0.5, "loss.balance": 0.5,
}  # fmt: skip
METRICS = ("P@1", "P@5", "PSP@1", "PSP@5", "R@100")


# -- lazy and dense ----------------------------------------------------------------------------------------------------


def moved_by_one_use(gap: int, uses: int, steps: int, lazy: bool) -> float:
    """How far a row of one entry has moved a use, in learning rates, with a gradient of 1 at each use.

    Args:
        gap: steps from one use to the next.
        uses: how often it is used, the last time `gap` steps before the end.
        steps: of the whole training.
        lazy: lazy Adam, else torch's, with a gradient of 0 in the steps between.
    """
    first_use = steps - gap * uses
    weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    dense = torch.optim.Adam([weight], lr=1.0)
    table = RowTable(1, 1, torch.float64).train()
    rows = ROW_OPTIMISERS["adam"](table, 1.0)
    # before its first use the row has no moments: only the number of the step counts
    weight.grad = torch.zeros_like(weight)
    dense.step()
    dense.state[weight]["step"] += first_use - 1
    for step in range(first_use, steps):
        used = (step - first_use) % gap == 0
        if lazy and used:
            table.gather(torch.zeros(1, dtype=torch.int64)).grad = torch.ones(1, 1, dtype=torch.float64)
            rows.step(step + 1, 1.0)
        elif not lazy:
            weight.grad.fill_(float(used))
            dense.step()
    return -float(table.weight.detach() if lazy else weight.detach()) / uses


def run_lazy(arguments: argparse.Namespace) -> dict[str, Any]:
    """Print and return the table."""
    lines = []
    print("steps between uses | uses | lazy: learning rates a use | dense")
    for gap, uses in ((1, 1000), (10, 1000), (100, 100), (1000, 1), (1000, 5), (1000, 20)):
        lazy, dense = (moved_by_one_use(gap, uses, 100_000, kind) for kind in (True, False))
        lines.append({"gap": gap, "uses": uses, "lazy": round(lazy, 2), "dense": round(dense, 2)})
        print(f"{gap:18} | {uses:4} | {lazy:26.2f} | {dense:5.2f}")
    return {"lazy": lines}


# -- quality -----------------------------------------------------------------------------------------------------------


def train(arguments: argparse.Namespace, dtype: str, state: str, rate: float, seed: int) -> dict[str, Any]:
    """One training; its figures on the validation split."""
    params = load_params(arguments.params, SETTINGS | {
        "seed": seed, "model.clf_dtype": dtype, "optim.clf_state": state, "optim.lr_clf": rate,
        "optim.epochs": arguments.epochs,
    })  # fmt: skip
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = open_trainer(params, folder)
        while not trainer.finished:
            trainer.refresh()
            trainer.train_round()
    ranking = Ranking.of_model(
        trainer.model.eval(), trainer.dataset, "validation", params.optim.precision, trainer.label_vectors()
    )
    found = ranking.metrics(Heads(ranking.vectors, "clf", True))
    return {
        "dtype": dtype, "state": state, "lr_clf": rate, "seed": seed, "epochs": arguments.epochs,
        "seconds": round(time.perf_counter() - begin, 1),
        **{name: round(found[name], 2) for name in METRICS},
    }  # fmt: skip


def run_quality(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train every choice; a line for each as soon as it is there."""
    print(" | ".join(["dtype", "state", "lr_clf", "seed", *METRICS, "s"]), flush=True)
    lines = []
    for seed in arguments.seeds:
        for dtype, state in CHOICES:
            if arguments.only and not {dtype, state} & set(arguments.only):
                continue
            for rate in RATES[state]:
                line = train(arguments, dtype, state, rate, seed)
                lines.append(line)
                figures = [f"{line[name]:.2f}" for name in METRICS]
                print(
                    " | ".join([dtype, state, f"{rate:g}", str(seed), *figures, f"{line['seconds']:.0f}"]), flush=True
                )
    return {"settings": SETTINGS, "lines": lines}


RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"lazy": run_lazy, "quality": run_quality}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=sorted(RUNS))
    parser.add_argument("--params", default="params.yaml")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="*", help="types or states to train, e.g. bf16")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/table-<what>.json")
    arguments = parser.parse_args()
    result = RUNS[arguments.what](arguments)
    out = arguments.out or Path(__file__).parent / "results" / f"table-{arguments.what}.json"
    out.parent.mkdir(exist_ok=True)
    write_json(out, result)


if __name__ == "__main__":
    main()
