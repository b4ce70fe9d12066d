# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0",
#   "accelerate==1.15.0", "datasets==5.2.0",
# ]
# ///
"""sentence-transformers on a peer task: `sentence.py TASK OUT SETTINGS` (`running.py`).

A bag of token embeddings (`st-static`) or a transformer (`st-transformer`), trained by their
trainer with multiple negatives ranking: half of the epochs on pairs, half on triplets with
negatives that their miner finds with the model of the first half. No label of a query is a negative
of it, neither mined nor in the batch. Exact search by cosine.

Shape legend: E pairs, V token ids, D width, L labels.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset  # type: ignore[import-not-found,import-untyped,unused-ignore]
from scipy.sparse import csr_matrix, load_npz, save_npz
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    __version__,
    util,
)
from sentence_transformers.base.sampler import DefaultBatchSampler
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import AutoModel

ON_GPU = torch.cuda.is_available()
# the best of four on lf-debian's titles; the library's default
LEARNING_RATE = {"st-static": 0.06, "st-transformer": 5e-5}
# a mined negative scores at least 5 % below the query's lowest label, as their guide advises
MARGIN = 0.05
ROWS_AT_ONCE = 1024  # queries of the miner's search


class LabelsApart(DefaultBatchSampler):
    """The library's no-duplicates batches, in which also no query has a label (or its own text)
    among the texts of the other rows. As there, a row that does not fit waits for the next batch.
    """

    def __init__(self, dataset: Dataset, *given: Any, **named: Any):
        super().__init__(dataset, *given, **named)
        relevant: dict[str, set[str]] = defaultdict(set)
        for query, label in zip(dataset["anchor"], dataset["positive"], strict=True):
            relevant[query] |= {query, label}
        self.rows = []  # its query's labels, and the labels that it has itself
        for query, *labels in zip(*dataset.to_dict().values(), strict=True):
            self.rows.append((relevant[query], set(labels)))

    def __iter__(self) -> Iterator[list[int]]:
        assert self.generator is not None
        self.generator.manual_seed(self.seed + self.epoch)
        waiting = torch.randperm(len(self.rows), generator=self.generator).tolist()
        while waiting:
            batch: list[int] = []
            relevant: set[str] = set()
            labels: set[str] = set()
            left = []
            for place, row in enumerate(waiting):
                if len(batch) == self.batch_size:
                    left += waiting[place:]
                    break
                own_relevant, own = self.rows[row]
                if own & labels or own & relevant or own_relevant & labels:
                    left.append(row)
                    continue
                batch.append(row)
                relevant |= own_relevant
                labels |= own
            yield batch
            waiting = left


def static_model(folder: Path, texts: list[str], max_length: int) -> SentenceTransformer:
    """A bag that starts as ours does: token embeddings times inverse document frequency in the
    training texts.

    The library's bag is a mean compared by cosine: weights multiplied into its embeddings give the
    same vector as our separate weights.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max(1, max_length - tokenizer.num_special_tokens_to_add(False)))
    model = AutoModel.from_pretrained(str(folder), local_files_only=True, use_safetensors=True)
    embedding_VD = model.get_input_embeddings().weight.detach().float().numpy()
    frequency_V = np.zeros(len(embedding_VD), dtype=np.int64)
    for encoded in tokenizer.encode_batch(texts, add_special_tokens=False):
        frequency_V[np.unique(encoded.ids)] += 1
    idf_V = np.log((1 + len(texts)) / (1 + frequency_V)).clip(min=1e-3)
    weights = torch.from_numpy((embedding_VD * idf_V[:, None]).astype(np.float32))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, weights)])


def new_model(given: Mapping[str, Any], texts: list[str]) -> tuple[SentenceTransformer, Any]:
    """A model before its training, and its loss."""
    folder = Path(given["encoder"])
    if given["peer"] == "st-static":
        model = static_model(folder, texts, given["max_length"])
        return model, MultipleNegativesRankingLoss(model)
    words = Transformer(str(folder), max_seq_length=given["max_length"])
    pooling = Pooling(words.get_embedding_dimension(), pooling_mode=given["pooling"])
    model = SentenceTransformer(modules=[words, pooling])
    # the size of the mini-batches changes the memory, not the loss
    size = given["batch_size"] if ON_GPU else 64
    return model, CachedMultipleNegativesRankingLoss(model, mini_batch_size=size)


def with_negatives(model: SentenceTransformer, pairs: Dataset, labels: list[str]) -> Dataset:
    """Triplets: each pair with the hardest label below the margin that is not one of its query's;
    pairs without such a label are omitted.
    """
    return util.mine_hard_negatives(
        pairs,
        model,
        corpus=labels,
        relative_margin=MARGIN,
        num_negatives=1,
        batch_size=256,
        faiss_batch_size=ROWS_AT_ONCE,
        verbose=False,
    )


def encode(model: SentenceTransformer, texts: list[str]) -> torch.Tensor:
    return model.encode(texts, batch_size=256, normalize_embeddings=True, convert_to_tensor=True)


def main() -> None:
    task = Path(sys.argv[1])
    out = Path(sys.argv[2])
    given = json.loads(sys.argv[3])
    texts = {
        name: json.loads((task / f"{name}.json").read_text())
        for name in ("train", "labels", "test")
    }
    start = time.perf_counter()
    torch.manual_seed(given["seed"])
    model, loss = new_model(given, texts["train"])
    query_E, label_E = load_npz(task / "Y.train.npz").nonzero()
    columns = {
        "anchor": [texts["train"][query] for query in query_E],
        "positive": [texts["labels"][label] for label in label_E],
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out / "trainer"),
        num_train_epochs=given["epochs"] / 2,
        per_device_train_batch_size=given["batch_size"],
        learning_rate=LEARNING_RATE[given["peer"]],
        warmup_steps=0.1,  # share of all steps
        batch_sampler=LabelsApart,
        seed=given["seed"],
        save_strategy="no",
        bf16=ON_GPU,
        report_to="none",
    )
    pairs = Dataset.from_dict(columns)
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=pairs, loss=loss).train()
    mined = with_negatives(model, pairs, texts["labels"])
    SentenceTransformerTrainer(model=model, args=arguments, train_dataset=mined, loss=loss).train()
    facts: dict[str, Any] = {
        "train_seconds": time.perf_counter() - start,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "version": f"sentence-transformers {__version__}",
    }
    label_LD = encode(model, texts["labels"])
    start = time.perf_counter()
    found = util.semantic_search(encode(model, texts["test"]), label_LD, top_k=given["width"])
    facts["search_ms"] = 1000 * (time.perf_counter() - start) / len(found)
    scores = [hit["score"] for hits in found for hit in hits]
    labels = [hit["corpus_id"] for hits in found for hit in hits]
    indptr = np.cumsum([0, *map(len, found)])
    save_npz(
        out / "test.npz", csr_matrix((scores, labels, indptr), shape=(len(found), len(label_LD)))
    )
    facts["peak_memory_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
