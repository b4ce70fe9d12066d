# /// script
# requires-python = ">=3.11"
# dependencies = ["sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0"]
# ///
"""sentence-transformers for `time_to_quality.py`: `time_to_quality_peer.py FOLDER`.

FOLDER/asked.json holds the settings. All layers of a transformer are trained by MultipleNegativesRankingLoss on pairs
of a query's and a label's text, as their guide has it: AdamW, a linear schedule with 10 % warm-up, no text twice in a
batch, gradients clipped at 1. The schedule runs over a time in place of steps, so it ends where the time does on any
machine. On the way the vectors of all labels and of the validation queries are written; at the end the test queries'
too, where the settings ask for them. Seconds include loading the model and tokenising, not the writing of vectors.

Legend: E pairs.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import Clock
from scipy.sparse import load_npz

WARM_UP, CLIP_NORM, ENCODED_AT_ONCE = 0.1, 1.0, 256
Pair = tuple[str, str]


def batches_without_duplicates(pairs: list[Pair], size: int, rng: np.random.Generator) -> Iterator[list[Pair]]:
    """Batches without end, epoch after epoch in a new order. No text is in a batch twice: a pair whose text is there
    already waits for the next one. What does not fill an epoch's last batch is left out of that epoch."""
    while True:
        waiting, full = deque(rng.permutation(len(pairs)).tolist()), 0
        while True:
            batch: list[Pair] = []
            texts: set[str] = set()
            later = []
            while waiting and len(batch) < size:
                number = waiting.popleft()
                if texts.isdisjoint(pairs[number]):
                    batch.append(pairs[number])
                    texts.update(pairs[number])
                else:
                    later.append(number)
            if len(batch) < size:
                break
            waiting.extendleft(reversed(later))
            full += 1
            yield batch
        if not full:
            raise ValueError(f"{len(pairs)} training pairs do not fill a batch of {size}: give a smaller --batch-size")


def rate_factor(share: float) -> float:
    """Of the learning rate after a share of the time: up to 1 in the first tenth, then in a line down to 0."""
    return share / WARM_UP if share < WARM_UP else max(0.0, (1 - share) / (1 - WARM_UP))


class Training:
    """A model in training, its clock, and the points of its curve: {"seconds", "steps", "epochs"}."""

    def __init__(self, folder: Path, asked: dict[str, Any]) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        self.folder, self.asked, self.points = folder, asked, list[dict[str, float]]()
        task = Path(asked["task"])
        names = ("train", "labels", "validation", "test")
        self.texts = {name: json.loads((task / f"{name}.json").read_text(encoding="utf-8")) for name in names}
        query_E, label_E = load_npz(task / "Y.train.npz").nonzero()
        train, labels = self.texts["train"], self.texts["labels"]
        self.pairs = [(train[query], labels[label]) for query, label in zip(query_E, label_E, strict=True)]
        torch.manual_seed(asked["seed"])
        self.clock, self.steps, self.bf16 = Clock(asked["every"]), 0, asked["precision"] == "bf16"
        # eager: on processors quicker than torch's fused attention
        words = Transformer(
            asked["encoder"], max_seq_length=asked["max_length"], model_kwargs={"attn_implementation": "eager"}
        )
        pooling = Pooling(words.get_embedding_dimension(), pooling_mode=asked["pooling"])
        self.model = SentenceTransformer(modules=[words, pooling], device="cpu")
        self.loss = MultipleNegativesRankingLoss(self.model)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=asked["learning_rate"], weight_decay=0.0)

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.bf16)

    def run(self) -> None:
        """Train until the time is over; a point before the first step, whenever one is due, and at the end."""
        asked, budget = self.asked, self.asked["seconds"]
        self.add_point()
        self.model.train()
        for batch in batches_without_duplicates(
            self.pairs, asked["batch_size"], np.random.default_rng(asked["seed"])
        ):  # fmt: skip
            share = self.clock.seconds / budget
            if share >= 1:
                break
            loss = self.step(batch, asked["learning_rate"] * rate_factor(share))
            self.steps += 1
            if self.clock.is_due and self.clock.seconds < budget:  # else the last point follows at once
                print(
                    f"    {self.clock.seconds:7.0f} of {budget:.0f} s, step {self.steps}, loss {loss:.3f}", flush=True
                )
                self.add_point()
        self.add_point(with_test=asked["with_test"])

    def step(self, batch: list[Pair], rate: float) -> float:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with self.autocast():
            columns = [self.model(self.model.preprocess(list(texts))) for texts in zip(*batch, strict=True)]
        # as their trainer does it: the transformer in bfloat16, similarities and loss in float32
        loss = self.loss.compute_loss_from_embeddings([each["sentence_embedding"].float() for each in columns], None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return float(loss.detach())

    def add_point(self, with_test: bool = False) -> None:
        """Write the vectors of labels and of a split or two, under the point's number."""
        with self.clock.paused() as seconds:
            epochs = self.steps * self.asked["batch_size"] / len(self.pairs)
            for name in ("labels", "validation", *(["test"] if with_test else [])):
                np.save(self.folder / f"{name}-{len(self.points)}.npy", self.encode(self.texts[name]))
            self.points.append({"seconds": seconds, "steps": self.steps, "epochs": epochs})
            self.model.train()

    def encode(self, texts: list[str]) -> np.ndarray:
        """Of unit length, float32 [texts, D]."""
        if not texts:
            return np.zeros((0, self.model.get_embedding_dimension()), dtype=np.float32)
        with self.autocast():
            found = self.model.encode(
                texts, batch_size=ENCODED_AT_ONCE, show_progress_bar=False, convert_to_tensor=True
            )
        return torch.nn.functional.normalize(found.float(), dim=-1).numpy()


def main() -> None:
    folder = Path(sys.argv[1])
    training = Training(folder, json.loads((folder / "asked.json").read_text(encoding="utf-8")))
    training.run()
    found = {
        "curve": training.points,
        "pairs": len(training.pairs),
        "version": f"sentence-transformers {version('sentence-transformers')}",
        "trained": sum(parameter.numel() for parameter in training.model.parameters()),
    }
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
