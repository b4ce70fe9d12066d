"""A UniDEC query encoder for sentence-transformers, where its stock modules do not suffice.

`unidec export sentence-transformers --with-code` copies this file into the folder it writes. It needs
sentence-transformers, torch, numpy, tokenizers and safetensors, and nothing of unidec, which itself never imports it.

Legend: B texts, T tokens of the longest, F tokens of all texts (words among them), D width of a head.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from sentence_transformers.base.modules.input_module import InputModule
from tokenizers import Tokenizer
from torch import Tensor, nn

_ODD = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment and multipliers
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class UnidecQueries(InputModule):
    """A bag of tokens beside the transformer's vector that comes in, if there is one; then one head, or both.

    Args:
        tokenizer: of the bag.
        config: what is in config.json: widths, which parts there are, how heads are put together.
    """

    def __init__(self, tokenizer: Tokenizer, **config: Any):
        super().__init__()
        self.tokenizer, self.about = tokenizer, config
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(config["max_length"], stride=0, strategy="longest_first", direction="right")
        bag_width, parts = config["bag_width"], 2 if config["bag_head"] else 1
        width = config["transformer_width"] + bag_width * parts
        if bag_width:
            self.bag = nn.Embedding(config["num_tokens"] + config["num_words"], bag_width)
        if config["num_words"]:
            self.register_buffer("continues", torch.zeros(config["num_tokens"], dtype=torch.uint8))
        if config["residual"]:
            self.residual_in, self.residual_out = nn.Linear(width, width), nn.Linear(width, width)
        if config["head"] in ("both", "de"):
            self.de = nn.Linear(width, config["dim"])
        if config["head"] in ("both", "clf"):
            self.clf = nn.Linear(width, config["dim"])

    # -- sentence-transformers' calls ---------------------------------------------------------------------------------

    def preprocess(self, inputs: Any, prompt: str | None = None, **kwargs: Any) -> dict[str, Tensor]:
        """input_ids and attention_mask int64 [B, T], padded on the right; where this is the first module."""
        found = self.tokenizer.encode_batch([(prompt or "") + text for text in inputs])
        length = max((len(one.ids) for one in found), default=0)
        ids_BT = torch.zeros(len(found), length, dtype=torch.int64)
        mask_BT = torch.zeros(len(found), length, dtype=torch.int64)
        for row, one in enumerate(found):
            ids_BT[row, : len(one.ids)] = torch.tensor(one.ids, dtype=torch.int64)
            mask_BT[row, : len(one.ids)] = 1
        return {"input_ids": ids_BT, "attention_mask": mask_BT}

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Adds `sentence_embedding`, float32 [B, D']: the query side of the score."""
        parts = [features["sentence_embedding"]] if self.about["transformer_width"] else []
        if self.about["bag_width"]:
            parts += self._bags(features["input_ids"], features["attention_mask"].bool())
        x_BW = torch.cat(parts, dim=-1)
        if self.about["residual"]:
            x_BW = x_BW + self.residual_out(F.gelu(self.residual_in(x_BW)))
        features["sentence_embedding"] = torch.cat(self._heads(x_BW), dim=-1)
        return features

    def get_embedding_dimension(self) -> int:
        """D'."""
        heads = 2 if self.about["head"] == "both" else 1
        return heads * self.about["dim"] + int(self.about["has_bias"])

    @property
    def max_seq_length(self) -> int:
        """Tokens of a text at most."""
        return int(self.about["max_length"])

    def get_config_dict(self) -> dict[str, Any]:
        """config.json."""
        return dict(self.about)

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Writes the module's folder."""
        self.save_config(output_path)
        self.tokenizer.save(os.path.join(output_path, "tokenizer.json"))
        state = {name: value.contiguous() for name, value in self.state_dict().items()}
        save_file(state, os.path.join(output_path, "model.safetensors"))
        root, name = os.path.split(output_path)
        if name:  # sentence-transformers 6.2 puts this file into the module's own folder, and looks for it in the root
            shutil.copyfile(__file__, os.path.join(root, f"{__name__.rpartition('.')[2]}.py"))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs: Any) -> UnidecQueries:
        """A module from its folder."""
        told = {
            name: kwargs[name] for name in ("token", "cache_folder", "revision", "local_files_only") if name in kwargs
        }
        where: dict[str, Any] = {"subfolder": subfolder} | told
        config = cls.load_config(model_name_or_path, **where)
        names = ("tokenizer.json", "model.safetensors")
        tokenizer, weights = (cls.load_file_path(model_name_or_path, name, **where) for name in names)
        module = cls(Tokenizer.from_file(tokenizer), **config)
        module.load_state_dict(load_file(weights), strict=True)
        return module

    # -- the encoder --------------------------------------------------------------------------------------------------

    def _bags(self, ids_BT: Tensor, mask_BT: Tensor) -> list[Tensor]:
        """Sums of the tokens' weighted embeddings at unit length: of all tokens, and of the first ones where wanted."""
        flat_F, lengths_B = ids_BT[mask_BT], mask_BT.sum(1)
        if self.about["num_words"]:
            with_words = self._with_words(flat_F.cpu().numpy(), lengths_B.cpu().numpy())
            flat_F, lengths_B = (torch.from_numpy(part).to(ids_BT.device) for part in with_words)
        offsets_B = lengths_B.cumsum(0) - lengths_B
        weights: list[Tensor | None] = [None]
        if self.about["bag_head"]:
            place_F = torch.arange(len(flat_F), device=flat_F.device) - torch.repeat_interleave(offsets_B, lengths_B)
            weights.append((place_F < self.about["bag_head"]).to(self.bag.weight.dtype))
        return [
            F.normalize(
                F.embedding_bag(flat_F, self.bag.weight, offsets_B, mode="sum", per_sample_weights=weight_F), dim=-1
            )
            for weight_F in weights
        ]

    def _heads(self, x_BW: Tensor) -> list[Tensor]:
        parts = []
        if self.about["head"] in ("both", "de"):
            parts.append(F.normalize(torch.tanh(self.de(x_BW)), dim=-1))
        if self.about["head"] in ("both", "clf"):
            clf_BD, weight = self.clf(x_BW), float(self.about["clf_weight"])
            if self.about["clf_normalize"]:
                clf_BD = F.normalize(clf_BD, dim=-1)
            parts.append(clf_BD * weight)
            if self.about["has_bias"]:
                parts.append(torch.full_like(clf_BD[:, :1], weight))
        return parts

    def _with_words(self, flat_F: np.ndarray, lengths_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Each word of several pieces as one token more behind them, numbered by a hash of its pieces."""
        ends_B = np.cumsum(lengths_B)
        begins_F = self.continues.cpu().numpy()[flat_F] == 0
        begins_F[(ends_B - lengths_B)[lengths_B > 0]] = True
        start_W = np.flatnonzero(begins_F)
        pieces_W = np.diff(np.append(start_W, len(flat_F)))
        several = np.flatnonzero(pieces_W > 1)
        if not len(several):
            return flat_F, lengths_B
        place_F = np.arange(len(flat_F)) - np.repeat(start_W, pieces_W)
        key_F = _mixed(flat_F.astype(np.uint64) * np.uint64(1 << 20) + place_F.astype(np.uint64))
        key_M = _mixed(np.add.reduceat(key_F, start_W)[several])
        row_M = self.about["num_tokens"] + (key_M % np.uint64(self.about["num_words"])).astype(np.int64)
        after_M = start_W[several] + pieces_W[several]
        text_M = np.searchsorted(ends_B, after_M - 1, side="right")
        return np.insert(flat_F, after_M, row_M), lengths_B + np.bincount(text_M, minlength=len(lengths_B))


def _mixed(key: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser; overflow is meant."""
    key = key + _ODD
    key = (key ^ (key >> np.uint64(30))) * _MIX[0]
    key = (key ^ (key >> np.uint64(27))) * _MIX[1]
    return key ^ (key >> np.uint64(31))
