"""Make static vectors of a transformer's tokens, as model2vec distils them: each token is encoded
alone, the vectors are reduced by PCA, and frequent tokens count less (SIF: Arora et al., 2017;
ranks of the vocabulary stand for frequencies, by Zipf's law).

    python benchmarks/distil_static.py FOLDER [--name all-MiniLM-L6-v2] [--width 256]
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unidec.data.tensor_file import write_tensors
from unidec.data.tokens import load_tokenizer
from unidec.model.encoder import TransformerEncoder, load_transformer
from unidec.model.packed import Padded
from unidec.model.sources import resolve_encoder

BATCH = 1024
SIF = 1e-4


@torch.no_grad()
def token_vectors(source: Path) -> Tensor:
    """Each token's vector between the special tokens of a text, float32 [V, D]."""
    encoder = TransformerEncoder(load_transformer(source), "mean", 0).eval()
    tokenizer = load_tokenizer(source, 16)
    around, _ = tokenizer.encode([""])
    begin, end = np.split(around.astype(np.int64), [(len(around) + 1) // 2])
    blocks = []
    for first in range(0, tokenizer.vocab_size, BATCH):
        ids_B = np.arange(first, min(first + BATCH, tokenizer.vocab_size))
        columns = [*begin, ids_B, *end]
        ids_BT = torch.from_numpy(np.stack([np.broadcast_to(c, ids_B.shape) for c in columns], 1))
        blocks.append(encoder(Padded(ids_BT, torch.ones_like(ids_BT, dtype=torch.bool))))
    return torch.cat(blocks)


def reduced(vectors_VD: Tensor, width: int) -> Tensor:
    """The first principal components, weighted by the tokens' ranks, float32 [V, width]."""
    centred_VD = vectors_VD - vectors_VD.mean(0)
    _, axes_DD = torch.linalg.eigh(centred_VD.T @ centred_VD)  # ascending
    rank_V = 1.0 / torch.arange(2, len(vectors_VD) + 2)
    share_V = rank_V / rank_V.sum()
    weight_V = SIF / (SIF + share_V)
    return centred_VD @ axes_DD.flip(1)[:, :width] * weight_V[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="all-MiniLM-L6-v2")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    source = resolve_encoder(options.name)
    options.folder.mkdir(parents=True)
    vectors_VD = reduced(token_vectors(source), options.width)
    write_tensors(options.folder / "model.safetensors", {"embeddings": vectors_VD})
    config = {"model_type": "model2vec", "hidden_dim": options.width, "normalize": True}
    (options.folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, options.folder / name)


if __name__ == "__main__":
    main()
