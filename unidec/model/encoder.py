"""Text encoders behind one interface: a transformer, a bag of tokens, or both with concatenated
outputs.

Legend: B texts, T tokens of the longest text, F tokens of all texts, U distinct tokens, D width of
a part, W width of
all parts.

Each part of the encoder is either trained or frozen. Frozen results are computed once for each text
(`unidec.model.frozen`) and passed to the encoder as input: the vectors of a frozen transformer, or
the output of an encoder that is frozen as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unidec.config import Encoder
from unidec.data.tokens import GPU_CHUNK_TOKENS, Tokens, length_chunks
from unidec.errors import ConfigError
from unidec.model.inception import Inception
from unidec.model.pairs import rows_at, to_device
from unidec.model.row_table import RowTable
from unidec.model.words import with_words


@dataclass(frozen=True)
class EncoderInput:
    """A batch of texts as input of the encoder; only the fields that its parts need are set.

    Attributes:
        num_texts: B.
        chunks: input of the transformer, texts of similar length together: for each chunk
            (positions in the batch int64 [b], ids int64 [b, t], mask bool [b, t]).
        vector_BD: pooled vectors of a frozen transformer.
        output_BW: output of a frozen encoder, before dropout; no other field is set then.
        unique_U: int64, distinct token ids of the bag; local_F: int64, position of each token in
            `unique_U`; offsets_B: int64, position in `local_F` of each text's first token; head_F:
            bool, whether the token is among the first `encoder.bag_head` of its text.
    """

    num_texts: int
    chunks: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    vector_BD: Tensor | None = None
    unique_U: Tensor | None = None
    local_F: Tensor | None = None
    offsets_B: Tensor | None = None
    head_F: Tensor | None = None
    output_BW: Tensor | None = None


def pool_tokens(hidden_BTD: Tensor, mask_BT: Tensor, pooling: str) -> Tensor:
    """One vector for each text, float32 [B, D]: the mean over its tokens, or the first token's
    vector ("cls").
    """
    hidden_BTD = hidden_BTD.float()
    if pooling == "cls":
        return hidden_BTD[:, 0]
    weight_BT1 = mask_BT.unsqueeze(-1).float()
    return (hidden_BTD * weight_BT1).sum(1) / weight_BT1.sum(1).clamp_min(1)


def _layers(transformer: Any) -> nn.ModuleList:
    """The transformer's layers, from the first to the last."""
    for name in ("encoder", "transformer"):
        layers = getattr(getattr(transformer, name, None), "layer", None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ConfigError(
        f"no stack of layers found in a {type(transformer).__name__}",
        where="encoder.trainable_layers",
        fix=(
            "0 (frozen) or -1 (all layers train); other values work with BERT, RoBERTa, MPNet "
            "and DistilBERT"
        ),
    )


class TransformerEncoder(nn.Module):
    """A transformer and its pooling; the top `trainable_layers` layers train (-1: everything, 0:
    nothing).
    """

    def __init__(self, transformer: nn.Module, pooling: str, trainable_layers: int):
        super().__init__()
        self.transformer = transformer
        self.pooling = pooling
        self.width = int(transformer.config.hidden_size)  # type: ignore[union-attr,arg-type]
        self.requires_grad_(trainable_layers == -1)
        self.num_frozen_layers = 0
        self._trained: list[nn.Module] = [transformer]
        if trainable_layers >= 0:
            num_layers = int(transformer.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]
            if trainable_layers > num_layers:
                raise ConfigError(
                    "more trainable layers than the transformer has",
                    where="encoder.trainable_layers",
                    got=trainable_layers,
                    expected=f"-1 to {num_layers}",
                )
            self.num_frozen_layers = num_layers - trainable_layers
            self._trained = (
                list(_layers(transformer)[self.num_frozen_layers :]) if trainable_layers else []
            )
        for layer in self._trained:
            layer.requires_grad_(True)

    def train(self, mode: bool = True) -> TransformerEncoder:
        super().train(False)
        self.training = mode
        for layer in self._trained:  # frozen layers have no dropout
            layer.train(mode)
        return self

    def forward(self, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """Pooled vectors float32 [B, D] of token ids int64 [B, T]."""
        if self.transformer.config._attn_implementation == "sdpa":  # type: ignore[union-attr]
            # a 4-d mask is used as it is; transformers would read the values of a mask [B, T], and
            # the host would wait
            attended = mask_BT[:, None, None, :].expand(-1, 1, mask_BT.shape[1], -1)
        else:
            attended = mask_BT.long()
        hidden = self.transformer(input_ids=ids_BT, attention_mask=attended).last_hidden_state
        return pool_tokens(hidden, mask_BT, self.pooling)


class BagEncoder(nn.Module):
    """Weighted sum of token embeddings, scaled to unit length: `normalize(sum_t exp(w_t) e_t)`,
    both w and e trained.

    `w` starts at the log of the tokens' inverse document frequency, so the bag starts as a TF-IDF
    mean of the transformer's token embeddings (as in Astec and SiameseXML). Rows of whole words
    start at 0.

    Args:
        num_tokens: V, rows for the vocabulary. num_words: further rows, for words of several
        pieces.
        dropout: share of the tokens that are dropped in training.
        head: the first `head` tokens of a text also form a second bag, of the same rows; 0: no
        second bag.
        inception: InceptionXML's layers over the first `inception` tokens of a text replace the
        sum; 0: the sum.
    """

    continues: Tensor

    def __init__(
        self,
        num_tokens: int,
        width: int,
        dropout: float,
        num_words: int = 0,
        head: int = 0,
        inception: int = 0,
    ):
        super().__init__()
        self.dropout = dropout
        self.num_words = num_words
        self.head = head
        self.width = width * (2 if head else 1)
        self.embedding = RowTable(num_tokens + num_words, width)
        self.log_weight = RowTable(num_tokens + num_words, 1)
        self.num_read = inception
        self.inception = Inception(inception, width) if inception else None
        if num_words:  # bool [V], whether a piece continues a word
            self.register_buffer("continues", torch.zeros(num_tokens, dtype=torch.bool))

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.embedding.num_rows - self.num_words

    def features(self, flat_F: np.ndarray, lengths_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Table rows of the texts' features, and the number of features of each text: tokens, and
        with `num_words` also words of several pieces.
        """
        if not self.num_words:
            return flat_F, lengths_B
        return with_words(flat_F, lengths_B, self._host_continues, self.num_words)

    @functools.cached_property
    def _host_continues(self) -> np.ndarray:
        """`continues` on the host, cached: copying it from the device for each batch would make the
        host wait.
        """
        return self.continues.cpu().numpy()

    @torch.no_grad()
    def start_weights(self, document_frequency_V: np.ndarray, num_documents: int) -> None:
        """Set the tokens' weights from their document frequencies (number of texts with the token).
        Special tokens, in every text, get almost no weight.
        """
        idf_V = np.log((1 + num_documents) / (1 + document_frequency_V)).clip(min=1e-3)
        self.log_weight.weight.copy_(torch.from_numpy(np.log(idf_V)).float().unsqueeze(1))

    def forward(self, batch: EncoderInput) -> Tensor:
        """Vectors float32 [B, D] of unit length (0 where every token was dropped); with `head` [B,
        2 D].
        """
        assert (
            batch.unique_U is not None and batch.local_F is not None and batch.offsets_B is not None
        )
        embedding_UD = self.embedding.gather(batch.unique_U)
        weight_F = rows_at(self.log_weight.gather(batch.unique_U).squeeze(1), batch.local_F).exp()
        if self.training and self.dropout > 0:
            weight_F = weight_F * (torch.rand_like(weight_F) >= self.dropout)
        if self.inception is not None:
            return self.inception(self._padded(batch, embedding_UD, weight_F))
        weights = [weight_F] if batch.head_F is None else [weight_F, weight_F * batch.head_F]
        sums = [
            F.embedding_bag(
                batch.local_F, embedding_UD, batch.offsets_B, mode="sum", per_sample_weights=w
            )
            for w in weights
        ]
        return torch.cat([F.normalize(sum_BD, dim=-1) for sum_BD in sums], dim=-1)

    def _padded(self, batch: EncoderInput, embedding_UD: Tensor, weight_F: Tensor) -> Tensor:
        """Weighted embeddings of each text's first `num_read` tokens, padded with
        zeros, [B, T, D].
        """
        assert batch.local_F is not None and batch.offsets_B is not None
        num_tokens = len(weight_F)
        end_B = F.pad(batch.offsets_B[1:], (0, 1), value=num_tokens)
        place_BT = batch.offsets_B[:, None] + torch.arange(self.num_read, device=weight_F.device)
        # an extra token with zeros pads
        place_BT = torch.where(place_BT < end_B[:, None], place_BT, num_tokens)
        local_F = F.pad(batch.local_F, (0, 1), value=len(embedding_UD))
        weight_F = F.pad(weight_F, (0, 1))
        embedding_ND = rows_at(F.pad(embedding_UD, (0, 0, 0, 1)), local_F[place_BT].flatten())
        weighted_ND = embedding_ND * rows_at(weight_F, place_BT.flatten()).unsqueeze(-1)
        return weighted_ND.unflatten(0, place_BT.shape)


class TextEncoder(nn.Module):
    """Phi: the concatenated parts, dropout, and with `encoder.residual` a residual network.

    Args:
        transformer: the loaded AutoModel, or None for a bag alone.
        num_tokens, width: rows and width of the bag's embeddings (the width is the transformer's
        hidden size).

    Attributes:
        unit_vectors: whether the transformer's vectors are scaled to unit length; those of a
            transformer that trains alone are not. A model that starts from another model takes that
            model's value, whichever parts train.
        recompute: keep only a chunk's input for backward and compute its activations again, with
            the same dropout: a third more work, a small part of the memory (Chen et al., 2016).
    """

    def __init__(
        self, settings: Encoder, transformer: nn.Module | None, num_tokens: int, width: int
    ):
        super().__init__()
        self.settings = settings
        self.recompute = False
        self.transformer: TransformerEncoder | None = None
        self.bag: BagEncoder | None = None
        if settings.has_transformer:
            assert transformer is not None
            self.transformer = TransformerEncoder(
                transformer, settings.pooling, settings.trainable_layers
            )
        if settings.kind != "transformer":
            inception = settings.inception_tokens if settings.kind == "inception" else 0
            self.bag = BagEncoder(
                num_tokens,
                width,
                settings.bag_dropout,
                settings.bag_words,
                settings.bag_head,
                inception,
            )
        self.part_width = width
        parts = (self.transformer, self.bag)
        self.width = sum(part.width for part in parts if part is not None)
        self.dropout = nn.Dropout(settings.dropout)
        self.residual: nn.Sequential | None = None
        if settings.residual:
            last = nn.Linear(self.width, self.width)
            nn.init.zeros_(last.weight)  # starts as the identity
            nn.init.zeros_(last.bias)
            self.residual = nn.Sequential(
                nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(0.1), last
            )
        self.unit_vectors = settings.unit_vectors
        if settings.frozen:
            self.requires_grad_(False)
            self.train()

    @property
    def frozen(self) -> bool:
        """Whether nothing in the encoder trains: its cached outputs are then its input."""
        return self.settings.frozen

    @property
    def takes_vectors(self) -> bool:
        """Whether the whole transformer is frozen: its cached vectors are then an input."""
        return self.transformer is not None and self.settings.trainable_layers == 0

    def train(self, mode: bool = True) -> TextEncoder:
        super().train(mode)
        for part in (self.transformer, self.bag, self.residual) if self.frozen else ():
            if part is not None:
                part.eval()  # dropout applies to the output alone
        return self

    def compile_transformer(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile the transformer and its pooling in place (torch.compile); does nothing without a
        transformer.

        Names of weights do not change, and dropout draws the same numbers. The numbers of texts and
        tokens are symbols in the graph, so chunks of all sizes share one graph (a chunk of one text
        has its own).

        Raises:
            ConfigError: torch.compile does not work on this machine.
        """
        if self.transformer is None:
            return
        options: dict[str, Any] | None = (
            {"fallback_random": True} if backend == "inductor" else None
        )
        device = next(self.transformer.parameters()).device
        try:
            torch.compile(lambda x: x + 1, backend=backend, options=options)(
                torch.ones(2, device=device)
            )
        except (RuntimeError, ImportError, OSError) as error:
            raise ConfigError(
                "torch.compile does not work on this machine",
                where="run.compile",
                got=str(error).strip()[:500],
                fix="install a C++ compiler (g++), for a GPU triton as well; or run.compile: false",
            ) from error
        self.transformer.compile(dynamic=True, backend=backend, options=options)

    def forward(self, batch: EncoderInput) -> Tensor:
        """Vectors float32 [B, W] of texts."""
        if batch.output_BW is not None:
            return self.dropout(batch.output_BW.float())
        x_BW = self.dropout(self._parts(batch))
        return x_BW if self.residual is None else x_BW + self.residual(x_BW)

    @torch.no_grad()
    def frozen_output(self, batch: EncoderInput) -> Tensor:
        """Output of a frozen encoder before its dropout, float32 [B, W]."""
        x_BW = self._parts(batch)
        return x_BW if self.residual is None else x_BW + self.residual(x_BW)

    def _parts(self, batch: EncoderInput) -> Tensor:
        parts = []
        if batch.vector_BD is not None:
            parts.append(self._scaled(batch.vector_BD.float()))
        elif self.transformer is not None:
            parts.append(self._scaled(self.transformer_vectors(batch)))
        if self.bag is not None:
            parts.append(self.bag(batch))
        return torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]

    def transformer_vectors(self, batch: EncoderInput) -> Tensor:
        """The transformer's pooled vectors, float32 [B, D]."""
        assert self.transformer is not None
        # fewer texts than ranks, none for this rank: its gradients must be 0, not missing
        if not batch.chunks:
            no_text = torch.zeros(
                1, 1, dtype=torch.int64, device=next(self.transformer.parameters()).device
            )
            return self.transformer(no_text, no_text == 0)[:0]
        transformer: Callable[..., Tensor] = self.transformer
        if self.recompute and torch.is_grad_enabled():
            transformer = functools.partial(checkpoint, self.transformer, use_reentrant=False)
        vectors = [transformer(ids, mask) for _, ids, mask in batch.chunks]
        place_B = torch.cat([places for places, _, _ in batch.chunks])
        return torch.cat(vectors)[torch.argsort(place_B)]

    def _scaled(self, vector_BD: Tensor) -> Tensor:
        return F.normalize(vector_BD, dim=-1) if self.unit_vectors else vector_BD


class InputBuilder:
    """Builds `EncoderInput`s from rows of tokenised texts: with numpy on the host, then copied to
    the device.

    Args:
        frozen_vectors: by source, cached vectors float [N, D] of a transformer that is frozen as a
        whole.
        frozen_outputs: by source, cached outputs float [N, W] of an encoder that is frozen as a
        whole.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        device: torch.device,
        frozen_vectors: dict[str, np.ndarray] | None = None,
        frozen_outputs: dict[str, np.ndarray] | None = None,
    ):
        self.encoder = encoder
        self.device = device
        self.frozen_vectors = frozen_vectors or {}
        self.frozen_outputs = frozen_outputs or {}

    @property
    def chunk_tokens(self) -> int:
        """Tokens with padding up to which more than `CHUNK_TEXTS` texts are a chunk; 0: never."""
        return GPU_CHUNK_TOKENS if self.device.type == "cuda" else 0

    def __call__(self, parts: Sequence[tuple[str, Tokens, np.ndarray]]) -> EncoderInput:
        """Input for rows of several sources, (name, tokens, rows int64) each, in the given order;
        cached outputs of a frozen encoder are used where they exist.
        """
        if not self.encoder.frozen:
            return self.texts(parts)
        if all(name in self.frozen_outputs for name, _, _ in parts):
            outputs = [self.frozen_outputs[name][rows] for name, _, rows in parts]
            return EncoderInput(sum(map(len, outputs)), output_BW=self._to(np.concatenate(outputs)))
        texts = self.texts(parts)
        return EncoderInput(texts.num_texts, output_BW=self.encoder.frozen_output(texts))

    def texts(self, parts: Sequence[tuple[str, Tokens, np.ndarray]]) -> EncoderInput:
        """Input for rows of several sources from which the encoder computes its output, also where
        it is frozen.
        """
        encoder = self.encoder
        num_texts = sum(len(rows) for _, _, rows in parts)
        vector_BD: Tensor | None = None
        chunks: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
        if encoder.takes_vectors and all(name in self.frozen_vectors for name, _, _ in parts):
            vector_BD = self._to(
                np.concatenate([self.frozen_vectors[name][rows] for name, _, rows in parts])
            )
        elif encoder.transformer is not None:
            chunks = tuple(self._chunks(parts))
        if encoder.bag is None:
            return EncoderInput(num_texts, chunks, vector_BD)
        ragged = [tokens.ragged(rows) for _, tokens, rows in parts]
        flat_F = np.concatenate([flat for flat, _ in ragged])
        lengths_B = np.concatenate([np.diff(offsets) for _, offsets in ragged])
        flat_F, lengths_B = encoder.bag.features(flat_F, lengths_B)
        unique_U, local_F = np.unique(flat_F, return_inverse=True)
        offsets_B = np.cumsum(lengths_B) - lengths_B
        head_F: Tensor | None = None
        if encoder.bag.head:
            head_F = self._to(
                np.arange(len(flat_F)) - np.repeat(offsets_B, lengths_B) < encoder.bag.head
            )
        return EncoderInput(
            num_texts,
            chunks,
            vector_BD,
            self._to(unique_U),
            self._to(local_F),
            self._to(offsets_B.astype(np.int64)),
            head_F,
        )

    def _to(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)

    def _chunks(
        self, parts: Sequence[tuple[str, Tokens, np.ndarray]]
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        first = 0
        for _, tokens, rows in parts:
            for places in length_chunks(tokens.lengths(rows), tokens=self.chunk_tokens):
                ids_BT, mask_BT = tokens.batch(
                    rows[places], self.encoder.settings.transformer_tokens
                )
                yield self._to(places + first), self._to(ids_BT), self._to(mask_BT)
            first += len(rows)


def load_transformer(folder: Path) -> nn.Module:
    """The transformer of a local folder that `resolve_encoder` returned (safetensors only), without
    the unused pooling head.
    """
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    logging.set_verbosity_error()  # transformers would report the pooling head's unused weights
    logging.disable_progress_bar()
    options = transformer_options(AutoConfig.from_pretrained(folder))
    # float32 whatever the file's type: half-precision weights would lose most of their updates
    return AutoModel.from_pretrained(folder, use_safetensors=True, **options).float()


def empty_transformer(config_folder: Path) -> nn.Module:
    """A transformer of the architecture in config.json, with random weights; the caller loads the
    weights.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(config_folder)
    return AutoModel.from_config(config, **transformer_options(config)).float()


def transformer_options(config: Any) -> dict[str, Any]:
    """Options of `AutoModel` for a config: no unused pooling head, and on a GPU fused attention if
    the architecture supports it (MPNet does not).
    """
    from transformers import AutoModel

    fused = torch.cuda.is_available() and AutoModel._model_mapping[type(config)]._supports_sdpa
    options: dict[str, Any] = {"attn_implementation": "sdpa" if fused else "eager"}
    if config.model_type in ("bert", "roberta", "xlm-roberta", "mpnet"):
        options["add_pooling_layer"] = False
    return options
