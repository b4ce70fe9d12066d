"""What a training step costs, part by part, on the ingested data set and its token caches.

    python benchmarks/step_cost.py
    python benchmarks/step_cost.py --set encoder.kind=transformer \\
        --set encoder.trainable_layers=-1 --set \\
        encoder.bag_dropout=0 --steps 10

Prints a table and writes JSON. The step is the trainer's own, taken apart where its autograd graph
can be cut: at the encoder's output, at the heads' outputs and at the similarities, so that backward
is split like forward. The same number of steps is then run whole, to show what the cutting costs.
Clusters and hard negatives come from the mean of the transformer's token embeddings: real enough
for the size of pools, at no cost. A recipe that caches gradients is measured in one pass; BCE over
all labels has no similarities of its own and counts with them.

Legend: B queries, S pool labels, W width of the encoder, D width of a head.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from unidec.config import Params, load_params, parse_overrides, recipe_names
from unidec.data.storage import write_json
from unidec.data.tokens import Tokens
from unidec.errors import ArtifactError
from unidec.model.batch import Prepared
from unidec.model.encoder import load_transformer
from unidec.model.sources import resolve_encoder
from unidec.pipeline import paths
from unidec.training import trainer as trainer_module
from unidec.training.trainer import Trainer, TrainingData

# part -> group; the groups of `OVERHEAD` shall be at most a fifth of a step
PARTS = {
    "sample the pool": "sampling",
    "make the texts' input": "encoder",
    "encoder forward": "encoder",
    "encoder backward": "encoder",
    "update encoder's rows": "encoder",
    "heads forward": "heads",
    "heads backward": "heads",
    "update dense": "encoder and heads",
    "similarities forward": "similarities",
    "similarities backward": "similarities",
    "losses forward": "losses",
    "losses backward": "losses",
    "norm and finite check": "norm",
    "update classifier": "classifier",
    "log": "logging",
}
OVERHEAD = ("sampling", "losses", "classifier", "logging")


class Stopwatch:
    """Seconds by part; a part that runs within another is taken off the outer one."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device = device
        self._inner = [0.0]

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin = self._now()
        self._inner.append(0.0)
        yield
        seconds = self._now() - begin
        self.seconds[name] += seconds - self._inner.pop()
        self._inner[-1] += seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class Cuts:
    """Places where a graph is cut: what continues is a leaf, whose gradient is passed back by
    `backward`.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def cut(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf = tensor.detach().requires_grad_()
        self._pairs.append((tensor, leaf))
        return leaf

    def backward(self) -> None:
        pairs = [(tensor, leaf.grad) for tensor, leaf in self._pairs if leaf.grad is not None]
        self._pairs.clear()
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [grad for _, grad in pairs])


class CutStep:
    """The trainer's step in parts. `run` changes weights as `Trainer.train_step` does."""

    def __init__(self, trainer: Trainer, watch: Stopwatch) -> None:
        self.trainer = trainer
        self.watch = watch
        self.at_encoder = Cuts()
        self.at_heads = Cuts()
        self.at_losses = Cuts()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within: heads and losses cut the graph, input building and losses keep time."""
        trainer = self.trainer
        model = self.trainer.model
        watch = self.watch
        kept = {
            "de": model.de,
            "clf": model.clf,
            "loss": trainer.objective.loss,
            "build": trainer.batches.build,
        }

        def head(name: str) -> Any:
            def run(x_BW: Tensor, *rest: Any) -> Tensor:
                with watch.part("heads forward"):
                    return self.at_heads.cut(kept[name](x_BW, *rest))

            return run

        def loss(kind: str, similarity_BS: Tensor, *rest: Any, **options: Any) -> Tensor:
            with watch.part("losses forward"):
                return kept["loss"](kind, self.at_losses.cut(similarity_BS), *rest, **options)

        def build(parts: Any) -> Any:
            with watch.part("make the texts' input"):
                return kept["build"](parts)

        replaced = [
            (model, "de", head("de")),
            (model, "clf", head("clf")),
            (trainer.objective, "loss", loss),
        ]
        replaced.append((trainer.batches, "build", build))
        for holder, name, function in replaced:
            object.__setattr__(holder, name, function)
        try:
            yield
        finally:
            for holder, name, _ in replaced[:2]:
                object.__delattr__(holder, name)
            object.__delattr__(trainer.objective, "loss")
            trainer.batches.build = kept["build"]

    def run(self, rows_B: np.ndarray, step: int) -> Prepared:
        trainer = self.trainer
        watch = self.watch
        with watch.part("sample the pool"):
            batch = trainer.prepare(rows_B, step)
        with watch.part("encoder forward"), trainer.encoding.autocast():
            x_BW = self.at_encoder.cut(trainer.model.encoder(batch.texts))
        with watch.part("similarities forward"):
            losses = trainer.objective.losses(x_BW, batch, trainer.at.step)
            loss = torch.stack(list(losses.values())).sum()
        with watch.part("losses backward"):
            loss.backward()
        with watch.part("similarities backward"):
            self.at_losses.backward()
        with watch.part("heads backward"):
            self.at_heads.backward()
        with watch.part("encoder backward"):
            self.at_encoder.backward()
        self._update(step, batch, losses)
        return batch

    def _update(self, step: int, batch: Prepared, losses: dict[str, Tensor]) -> None:
        trainer = self.trainer
        watch = self.watch
        optimisers = self.trainer.optimisers
        with watch.part("norm and finite check"):
            norm = torch.nn.utils.get_total_norm(optimisers.gradients())
            assert bool(torch.isfinite(norm))
        rows = {row: name for name, row in optimisers.row.items()}
        stepped = {row: row.step for row in rows}
        for row, name in rows.items():
            part = "update encoder's rows" if name.startswith("encoder.") else "update classifier"

            def timed(*args: Any, part: str = part, run: Any = stepped[row]) -> None:
                with watch.part(part):
                    run(*args)

            row.step = timed  # type: ignore[method-assign]
        with watch.part("update dense"):
            optimisers.step(trainer.at.step, norm)
        for row in rows:
            del row.step  # type: ignore[method-assign]
        if step % trainer_module.LOG_EVERY == 0:
            with watch.part("log"):
                json.dumps(trainer.figures(batch, losses, norm))


def lexical_vectors(tokens: Tokens, rows: np.ndarray, embedding_VD: Tensor) -> np.ndarray:
    """Mean of token embeddings at unit length, float32 [n, D]."""
    flat, offsets = tokens.ragged(rows)
    mean_ND = F.embedding_bag(
        torch.from_numpy(flat), embedding_VD, torch.from_numpy(offsets[:-1]), mode="mean"
    )
    return F.normalize(mean_ND, dim=-1).numpy()


def open_trainer(params: Params, run_dir: Path) -> Trainer:
    """A new run on the ingested data set, its refresh made from token embeddings."""
    tokens = {which: paths.open_tokens(which) for which in ("queries", "labels")}
    for cache in tokens.values():
        made = (cache.meta["text"], cache.max_length)
        if made != (params.tokens.text, params.tokens.max_length):
            raise ArtifactError(
                "the token caches are of other parameters",
                where=str(paths.TOKENS),
                got=made,
                expected=(params.tokens.text, params.tokens.max_length),
                fix="unidec data tokens",
            )
    trainer = Trainer(
        params.training, TrainingData(paths.open_dataset(), *tokens.values()), run_dir, paths.CACHE
    )
    transformer: Any = load_transformer(resolve_encoder(params.encoder.name))
    embedding_VD = transformer.get_input_embeddings().weight.detach()

    def vectors(name: str, rows: np.ndarray) -> np.ndarray:
        return lexical_vectors(tokens[name], rows, embedding_VD)

    refresher: Any = trainer.refresher
    refresher.query_vectors = lambda: vectors("queries", trainer.rows)
    refresher.label_vectors = lambda: vectors("labels", np.arange(len(tokens["labels"])))
    refresher.mine(0)
    trainer.made = refresher.load(0)
    trainer.model.train()
    return trainer


def measure(trainer: Trainer, num_steps: int, warm_up: int) -> dict[str, Any]:
    """Milliseconds of each part of a step, of the whole step cut and uncut, and the sizes of the
    batches.
    """
    batches = trainer.made.batches(trainer.rows, trainer.settings.pool.batch_size, 0, 0)
    watch = Stopwatch(trainer.device)
    step = CutStep(trainer, watch)
    sizes = []
    with step.installed():
        for number in range(warm_up + num_steps):
            if number == warm_up:
                watch.seconds.clear()
                sizes.clear()
            batch = step.run(batches[number % len(batches)], number)
            sizes.append((len(batch.pool.rows_B), len(batch.pool.pool_S), batch.counts.tokens))
            trainer.at.step += 1
    whole = Stopwatch(trainer.device)
    with whole.part("whole"):
        for number in range(num_steps):
            trainer.train_step(trainer.prepare(batches[(warm_up + number) % len(batches)], number))
            trainer.at.step += 1
    milliseconds = {
        name: 1000 * watch.seconds[name] / num_steps for name in PARTS if name in watch.seconds
    }
    total = sum(milliseconds.values())
    groups: dict[str, float] = defaultdict(float)
    for name, value in milliseconds.items():
        groups[PARTS[name]] += value / total
    queries, labels, tokens = (
        round(float(np.mean(column)), 1) for column in zip(*sizes, strict=True)
    )
    return {
        "parts_ms": milliseconds,
        "share": dict(groups),
        "step_ms": total,
        "uncut_step_ms": 1000 * whole.seconds["whole"] / num_steps,
        "queries": queries,
        "pool_labels": labels,
        "tokens": tokens,
        "overhead_share": sum(groups[name] for name in OVERHEAD),
        "overhead_share_with_similarities": sum(
            groups[name] for name in (*OVERHEAD, "similarities")
        ),
    }


def table(result: dict[str, Any]) -> str:
    """The result as people read it."""
    total = result["step_ms"]
    lines = [f"{'part':24} {'ms':>9} {'share':>7}   group"]
    lines += [
        f"{n:24} {v:9.2f} {100 * v / total:6.1f}%   {PARTS[n]}"
        for n, v in result["parts_ms"].items()
    ]
    lines += [
        f"{'step, cut in parts':24} {total:9.2f}",
        f"{'step, uncut':24} {result['uncut_step_ms']:9.2f}",
        (
            f"{result['queries']:g} queries, {result['pool_labels']:g} pool labels, "
            f"{result['tokens']:g} tokens a step"
        ),
        "sampling + losses + classifier update + logging: "
        f"{100 * result['overhead_share']:.1f}% of a step "
        "(with the products of queries and labels: "
        f"{100 * result['overhead_share_with_similarities']:.1f}%)",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", choices=recipe_names(), default="unidec")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="other parameters"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--name", help="of the result; default: the recipe's, and the overrides'")
    parser.add_argument(
        "--output", type=Path, help="JSON (benchmarks/results/step-cost-<name>.json)"
    )
    arguments = parser.parse_args()
    overrides = parse_overrides(arguments.set)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "params.yaml"
        file.write_text(f"recipe: {arguments.recipe}\n", encoding="utf-8")
        params = load_params(file, {"optim.encode_chunk": 0, **overrides})
        trainer = open_trainer(params, Path(folder) / "run")
        result = measure(trainer, arguments.steps, arguments.warm_up)
    facts = {
        "recipe": arguments.recipe,
        "overrides": overrides,
        "steps": arguments.steps,
        "dataset": trainer.dataset.name,
        "text": params.tokens.text,
        "device": trainer.device.type,
        "autocast": str(trainer.encoding.amp),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
    }
    name = arguments.name or "-".join([arguments.recipe, *(str(v) for v in overrides.values())])
    output = arguments.output or Path(__file__).parent / "results" / f"step-cost-{name}.json"
    write_json(output, {"facts": facts, "result": result})
    print(table(result))


if __name__ == "__main__":
    main()
