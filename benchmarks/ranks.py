"""What a second process on the same two cores costs and gives: step time, bytes exchanged as seen and as predicted.

    python benchmarks/ranks.py              # writes benchmarks/results/ranks.json, prints the table
    python benchmarks/ranks.py --steps 10   # quicker

Needs the default data set (`python -m flows.train --steps ingest,tokens`) and the MiniLM package. One rank with one
thread is what a rank costs, one rank with two threads what the machine gives without ranks, two ranks with one thread
each the thing measured. All on gloo over the loopback; there is no GPU and no NCCL here.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "ranks.json"
# all without a refresh: random batches, no mined negatives
COMMON: dict[str, Any] = {
    "device": "cpu", "pool.batches": "random", "pool.eta": 0, "model.clf_init": "normal", "optim.precision": "fp32",
    "run.checkpoint_minutes": 0,
}  # fmt: skip
SYSTEMS: dict[str, dict[str, Any]] = {
    "bag": {"encoder.kind": "bag", "pool.clf_labels": "pool", "pool.batch_size": 512, "pool.size": 3000},
    "transformer": {
        "encoder.kind": "transformer", "encoder.trainable_layers": -1, "encoder.bag_dropout": 0.0,
        "pool.clf_labels": "pool", "pool.batch_size": 32, "pool.size": 64,
    },
}  # fmt: skip
WAYS = {"1 rank, 1 thread": (1, 1), "1 rank, 2 threads": (1, 2), "2 ranks, 1 thread each": (2, 1)}


def loopback() -> int:
    """Bytes that this machine's loopback has carried (Linux), of all processes."""
    lines = Path("/proc/net/dev").read_text().splitlines() if sys.platform == "linux" else []
    return sum(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def one_rank(system: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train some steps on this rank; what it saw."""
    import torch

    from unidec.config import load_params
    from unidec.pipeline import paths
    from unidec.training.distributed import Ranks
    from unidec.training.refresh import Refresh
    from unidec.training.trainer import Trainer, TrainingData

    params = load_params(ROOT / "params.yaml", COMMON | SYSTEMS[system])
    ranks = Ranks.from_environment("cpu")
    tokens = [paths.open_tokens(which) for which in ("queries", "labels")]
    trainer = Trainer(
        params.training, TrainingData(paths.open_dataset(), *tokens), folder / "run", folder / "cache", ranks=ranks
    )
    trainer.made = Refresh()
    trainer.model.train()
    batches = trainer.made.batches(trainer.rows, params.pool.batch_size, params.seed, 0)[:steps]
    seconds, sizes, before = [], [], time.perf_counter()
    ranks.barrier()
    carried, cpu = loopback(), time.process_time()
    for batch in trainer.batches.ahead(batches, 0, 0, None):
        used = 0 if batch.texts.unique_U is None else len(batch.texts.unique_U)
        sizes.append({"queries": len(batch.pool.rows_B), "pool": len(batch.pool.pool_S), "bag_rows": used,
                      "clf_sizes": batch.clf.sizes, "tokens": batch.counts.tokens})  # fmt: skip
        trainer.train_step(batch)
        trainer.at.step += 1
        now = time.perf_counter()
        seconds.append(now - before)
        before = now
    ranks.barrier()
    result = {
        "seconds": seconds, "cpu_seconds": time.process_time() - cpu, "loopback": loopback() - carried, "sizes": sizes,
        "threads": torch.get_num_threads(),
        "dense": sum(p.numel() for p in trainer.optimisers.dense), "dim": params.model.dim,
        "bag_width": 0 if trainer.model.encoder.bag is None else trainer.model.encoder.bag.width,
        "heads": params.model.heads,
    }  # fmt: skip
    ranks.close()
    return result


def predicted(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes that the first rank receives a step, by the formula of results/ranks.md."""
    world, first = len(ranks), ranks[0]
    share, steps = (world - 1) / world, len(first["sizes"])
    total = dict.fromkeys(("embeddings", "gradients", "rows"), 0.0)
    for step in range(steps):
        own = first["sizes"][step]
        queries, pool, dim = own["queries"], own["pool"], first["dim"]
        others = sum(own["clf_sizes"][1:])
        total["embeddings"] += 4 * dim * (share * (queries + pool) + share * queries + others)
        total["gradients"] += 4 * first["dense"] * 2 * share
        others_rows = sum(rank["sizes"][step]["bag_rows"] for rank in ranks[1:])
        total["rows"] += others_rows * (8 + 4 * (first["bag_width"] + 1)) if first["bag_width"] else 0
    return {name: value / steps for name, value in total.items()}


def measure(system: str, world: int, threads: int, steps: int) -> dict[str, Any]:
    """Run `world` processes and sum up."""
    with tempfile.TemporaryDirectory() as name, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        processes = []
        for rank in range(world):
            env = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": str(threads),
                "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
            }  # fmt: skip
            command = [sys.executable, __file__, "--rank-of", system, "--steps", str(steps), "--folder", name]
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        outputs = [process.communicate()[0] for process in processes]
        if any(process.returncode for process in processes):
            raise SystemExit(f"a rank of {system} failed")
    ranks = [json.loads(output.splitlines()[-1]) for output in outputs]
    warm = max(1, min(3, steps - 1))
    row: dict[str, Any] = {
        "system": system, "ranks": world, "threads": threads, "steps": steps,
        "step_ms": 1000 * statistics.median(ranks[0]["seconds"][warm:]),
        "cpu_ms_a_rank": 1000 * ranks[0]["cpu_seconds"] / steps,
        "queries": statistics.mean(size["queries"] for size in ranks[0]["sizes"]),
        "pool": statistics.mean(size["pool"] for size in ranks[0]["sizes"]),
        "dense_parameters": ranks[0]["dense"],
    }  # fmt: skip
    if world > 1:
        row["predicted_bytes"] = predicted(ranks)
        # what the kernel saw, on the way to both ranks, with whatever else was on the loopback meanwhile
        row["loopback_mb_a_rank"] = ranks[0]["loopback"] / steps / world / 1e6
        row["predicted_mb"] = sum(row["predicted_bytes"].values()) / 1e6
    return row


def main() -> None:
    """Measure everything, or be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank-of", choices=SYSTEMS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.rank_of:
        print(json.dumps(one_rank(arguments.rank_of, arguments.steps, arguments.folder)))
        return
    rows = []
    for system in SYSTEMS:
        for name, (world, threads) in WAYS.items():
            row = measure(system, world, threads, arguments.steps)
            rows.append(row)
            exchanged = ""
            if world > 1:
                exchanged = (f"MB a step: {row['predicted_mb']:.2f} predicted, "
                             f"{row['loopback_mb_a_rank']:.2f} on the loopback")  # fmt: skip
            times = f"{row['step_ms']:9.1f} ms a step, {row['cpu_ms_a_rank']:9.1f} CPU ms a rank"
            print(f"{system:12s} {name:24s} {times} {exchanged}", flush=True)
    about = {"cores": os.cpu_count(), "backend": "gloo, loopback", "load": os.getloadavg()[0], "rows": rows}
    RESULT.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
