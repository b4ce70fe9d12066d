"""Synonym replacement: in each step some tokens of the queries are replaced by similar ones.

Legend: V vocabulary, U tokens that occur, K similar tokens, D width of a token's embedding, F
tokens of the queries.

Source: thesis, table 1.6, synonyms by BERT's similarity; shares and words are not stated. Here
tokens are similar whose embeddings in the pretrained transformer have the highest cosines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F

from unidec.data.chunks import offsets_of
from unidec.data.tokens import Tokens, encode_texts
from unidec.model.additions import Drawn
from unidec.model.encoder import load_transformer
from unidec.model.encoder_inputs import Parts, joined
from unidec.model.search import exact_search

NUM_SIMILAR = 5  # one of these replaces a token
_STREAM = 0x73796E  # separates these random numbers from others of a step


@dataclass(frozen=True)
class Synonyms:
    """Replaces tokens.

    Attributes:
        share: of a query's tokens that are replaced.
        similar_VK: int64 [V, K], tokens that may replace each token; the token itself: unchanged.
    """

    # no cache of frozen vectors has texts of this source
    source: ClassVar = "queries with synonyms"
    share: float
    similar_VK: np.ndarray

    def apply(self, parts: Parts, drawn: Drawn) -> tuple[str, Tokens, np.ndarray]:
        """A batch's texts with replaced tokens, as one source and its rows."""
        rng = drawn.rng(_STREAM)
        token_F, lengths_B = joined(parts)
        is_replaced_F = rng.random(len(token_F)) < self.share
        pick_F = rng.integers(0, self.similar_VK.shape[1], len(token_F))
        changed_F = np.where(is_replaced_F, self.similar_VK[token_F, pick_F], token_F)
        _, like, _ = parts[0]
        offsets = offsets_of(lengths_B)
        tokens = Tokens(changed_F, offsets, like.vocab_size, like.pad_id, like.max_length)
        return self.source, tokens, np.arange(len(lengths_B))


def similar_tokens(folder: Path, tokens: Mapping[str, Tokens]) -> np.ndarray:
    """The tokens that may replace each token, int64 [V, K]: of those that occur in the texts the
    most similar ones. The special tokens around each text stay.

    Args:
        folder: of the pretrained transformer.
    """
    own = list(tokens.values())
    used = [np.unique(each.ids) for each in own]
    used_U = np.unique(np.concatenate(used)).astype(np.int64)
    used_U = np.setdiff1d(used_U, encode_texts([""], folder, own[0].max_length).ids)
    embedding = load_transformer(folder).get_input_embeddings()  # type: ignore[operator]
    embedding_UD = F.normalize(embedding.weight.detach()[torch.from_numpy(used_U)], dim=1)
    itself = sp.eye_array(len(used_U), dtype=bool, format="csr")
    _, place_UK = exact_search(embedding_UD, embedding_UD, NUM_SIMILAR, exclude=itself)
    num_tokens = max(each.vocab_size for each in own)
    similar_VK = np.repeat(np.arange(num_tokens)[:, None], NUM_SIMILAR, axis=1)
    found_UK = used_U[place_UK]
    similar_VK[used_U] = np.where(place_UK >= 0, found_UK, used_U[:, None])
    return similar_VK
