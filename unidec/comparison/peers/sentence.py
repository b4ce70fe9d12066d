# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "sentence-transformers==6.2.0", "transformers==5.23.0", "torch==2.13.0",
#   "accelerate==1.15.0", "datasets==5.2.0",
# ]
# ///
"""sentence-transformers on a peer task: `sentence.py TASK OUT SETTINGS` (`running.py`).

A bag of token embeddings (`st-static`) or a transformer (`st-transformer`), trained by their
trainer with multiple negatives ranking; as their guide asks, no text is in a batch twice. Another
true label of a query counts as a negative when a batch has it. Exact search by cosine.

Shape legend: L labels, V token ids, D width, K labels a query.
"""

from __future__ import annotations

import json
import resource
import sys
import time
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
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer
from transformers import AutoModel

ON_GPU = torch.cuda.is_available()
# the best of four on lf-debian's titles; theirs
LEARNING_RATE = {"st-static": 0.06, "st-transformer": 5e-5}


def static_model(folder: Path, texts: list[str], max_length: int) -> SentenceTransformer:
    """A bag that starts as ours does: token embeddings times inverse document frequency in the
    training texts.

    Their bag is a mean compared by cosine: the weight inside the embedding is the same vector as
    our weight beside it.
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
    folder = Path(given["encoder"])
    start = time.perf_counter()
    torch.manual_seed(given["seed"])
    if given["peer"] == "st-static":
        model = static_model(folder, texts["train"], given["max_length"])
        loss: Any = MultipleNegativesRankingLoss(model)
    else:
        words = Transformer(str(folder), max_seq_length=given["max_length"])
        pooling = Pooling(words.get_embedding_dimension(), pooling_mode=given["pooling"])
        model = SentenceTransformer(modules=[words, pooling])
        # the size of the mini-batches changes the memory, not the loss
        loss = CachedMultipleNegativesRankingLoss(
            model, mini_batch_size=given["batch_size"] if ON_GPU else 64
        )
    query_E, label_E = load_npz(task / "Y.train.npz").nonzero()
    pairs = {
        "anchor": [texts["train"][query] for query in query_E],
        "positive": [texts["labels"][label] for label in label_E],
    }
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out / "trainer"),
        num_train_epochs=given["epochs"],
        per_device_train_batch_size=given["batch_size"],
        learning_rate=LEARNING_RATE[given["peer"]],
        warmup_steps=0.1,  # share of all steps
        batch_sampler="no_duplicates",
        seed=given["seed"],
        save_strategy="no",
        bf16=ON_GPU,
        report_to="none",
    )
    SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=Dataset.from_dict(pairs), loss=loss
    ).train()
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
