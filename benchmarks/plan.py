"""The two largest settings of the papers, planned: no data, no encoder and no GPU are needed.

    python benchmarks/plan.py

LF-AmazonTitles-1.3M as UniDEC trains it (1,098 queries, pool of 3,000, 256 wide, 32 tokens, every layer of a
DistilBERT), and a table of 450 million labels, 64 wide (Query2Bid-450M of DePSL: batch 2,048, 12 tokens). Prints a
table and writes benchmarks/results/plan.json. All of it is computed, nothing is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unidec.config import Params
from unidec.data.storage import write_json
from unidec.pipeline.plan import Sizes, gib, plan_memory

ENCODER = {"name": "distilbert-base-uncased", "kind": "transformer", "trainable_layers": -1}
AMAZON = {"encoder": ENCODER, "model": {"dim": 256}, "pool": {"batch_size": 1098, "size": 3000, "beta": 3, "eta": 6},
          "tokens": {"max_length": 32}}  # fmt: skip
# the classifier alone, random batches: nobody searches 450 million labels exactly every few epochs
BID = {"encoder": ENCODER, "model": {"dim": 64, "heads": "clf", "clf_init": "normal", "clf_dtype": "bf16"},
       "pool": {"batch_size": 2048, "size": 3000, "eta": 0, "batches": "random"}, "tokens": {"max_length": 12},
       "index": {"space": "clf"}}  # fmt: skip
HOST, DISK = 1 << 40, 4 << 40

# name: (parameters, sizes, the card's bytes)
CASES: dict[str, tuple[dict[str, Any], Sizes, int]] = {
    "1.3M labels, 48 GB": (AMAZON, Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000), 48 * 10**9),
    "1.3M labels, 16 GiB": (AMAZON, Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000), 16 << 30),
    "1.3M labels, 16 GiB, recomputed": (
        {**AMAZON, "run": {"recompute": True}}, Sizes.given(1_300_000, 2_248_619, 32, pairs=49_900_000), 16 << 30,
    ),
    **{
        f"450M labels, 141 GB, {state}": (
            {**BID, "optim": {"clf_state": state}}, Sizes.given(450_000_000, 10_000_000, 12), 141 * 10**9,
        )
        for state in ("adagrad", "sgd", "adam")
    },
}  # fmt: skip


def main() -> None:
    """Plan every case."""
    results = {}
    print(f"{'':34} {'state':>11} {'step':>11} {'peak':>11}  on the GPU; host at most; fits")
    for name, (values, sizes, card) in CASES.items():
        plan = plan_memory(Params.model_validate(values), sizes, {"device": card, "host": HOST, "disk": DISK})
        step, peak = plan.needed("device")["step"], plan.peak("device")
        training = max(size for phase, size in plan.needed("host").items() if phase != "index")
        verdict = f"does not fit: {plan.fix}" if plan.short else "fits"
        print(f"{name:34} {gib(plan.state_bytes):>11} {gib(step):>11} {gib(peak[1]):>11}  {peak[0]}; "
              f"{gib(training)} in training, {gib(plan.peak('host')[1])} with the index; {verdict}")  # fmt: skip
        results[name] = {"parameters": values, "card_bytes": card, **plan.as_dict()}
    write_json(Path(__file__).parent / "results" / "plan.json", {"kind": "computed, not measured", "cases": results})


if __name__ == "__main__":
    main()
