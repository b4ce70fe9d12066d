"""Text encoders behind one interface: a transformer, a bag of tokens, or both with concatenated
outputs.

Legend: B texts, T tokens of the longest text, F tokens of all texts, U distinct tokens, D width of
a part, W width of all parts.

Each part of the encoder is either trained or frozen. Frozen results are computed once for each text
(`unidec.model.frozen`) and passed to the encoder as input: the vectors of a frozen transformer, or
the output of an encoder that is frozen as a whole.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unidec.config import Encoder
from unidec.errors import ConfigError
from unidec.model.dense import Dense, zero_linear
from unidec.model.dropout import Dropout
from unidec.model.packed import (
    ATTENTION,
    PACKABLE,
    Packed,
    Padded,
    attend,
    in_half,
)
from unidec.model.pairs import rows_at
from unidec.model.row_table import RowTable
from unidec.model.sources import is_static
from unidec.model.static import empty_static, load_static
from unidec.model.words import with_words


@dataclass(frozen=True)
class EncoderInput:
    """A batch of texts as input of the encoder; only the fields that its parts need are set.

    Attributes:
        num_texts: B.
        chunks: input of the transformer: texts of similar length, padded together, or packed ones.
        place_B: int64, position of each text in the concatenated chunks; None: texts are in order.
        vector_BD: pooled vectors of a frozen transformer.
        output_BW: output of a frozen encoder, before dropout; no other field is set then.
        unique_U: int64, distinct token ids of the bag; local_F: int64, position of each token in
            `unique_U`; offsets_B: int64, position in `local_F` of each text's first token; head_F:
            bool, whether the token is among the first `encoder.bag_head` of its text.
    """

    num_texts: int
    chunks: tuple[Padded | Packed, ...] = ()
    place_B: Tensor | None = None
    vector_BD: Tensor | None = None
    unique_U: Tensor | None = None
    local_F: Tensor | None = None
    offsets_B: Tensor | None = None
    head_F: Tensor | None = None
    output_BW: Tensor | None = None


def _layers(transformer: Any) -> list[nn.Module]:
    """The transformer's layers, from the first to the last."""
    for module in transformer.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == transformer.config.num_hidden_layers
        ):
            return list(module)
    raise ConfigError(
        f"no stack of layers found in a {type(transformer).__name__}",
        where="encoder.trainable_layers",
        fix="0 (frozen) or -1 (all layers train)",
    )


class TransformerEncoder(nn.Module):
    """A transformer, its pooling, and the layers after it. The top `trainable_layers` layers and
    all layers after the pooling train (-1: everything; 0: nothing).

    Args:
        width: number of first dimensions of the vector that are kept (Matryoshka); 0: all.

    Raises:
        ConfigError: the transformer has fewer layers or dimensions.
    """

    def __init__(
        self,
        transformer: nn.Module,
        pooling: str,
        trainable_layers: int,
        dense: Sequence[Dense] = (),
        width: int = 0,
    ):
        super().__init__()
        config: Any = transformer.config
        self.transformer = transformer
        self.pooling = pooling
        self.behind = tuple(dense)
        self.dense = nn.Sequential(*dense)
        self.full_width = dense[-1].about.out_features if dense else int(config.hidden_size)
        if not 0 <= width <= self.full_width:
            raise ConfigError(
                "the transformer's vector has other dimensions",
                where="encoder.width",
                got=width,
                expected=f"1 to {self.full_width}",
                fix=f"encoder.width: {self.full_width}, or a smaller one",
            )
        self.width = width or self.full_width
        self.num_frozen_layers = 0
        self.trained = [transformer] if trainable_layers == -1 else []
        if trainable_layers >= 0:
            if trainable_layers > config.num_hidden_layers:
                raise ConfigError(
                    "more trainable layers than the transformer has",
                    where="encoder.trainable_layers",
                    got=trainable_layers,
                    expected=f"-1 to {config.num_hidden_layers}",
                )
            self.num_frozen_layers = config.num_hidden_layers - trainable_layers
        if trainable_layers > 0:
            self.trained = _layers(transformer)[self.num_frozen_layers :]
        self.requires_grad_(False)
        if trainable_layers != 0 and dense:
            self.trained.append(self.dense)
        for layer in self.trained:
            layer.requires_grad_(True)

    @property
    def dense_facts(self) -> list[dict[str, Any]]:
        """The layers after the pooling, as in files."""
        return [layer.about.model_dump() for layer in self.behind]

    def train(self, mode: bool = True) -> TransformerEncoder:
        super().train(False)
        self.training = mode
        for layer in self.trained:  # frozen layers have no dropout
            layer.train(mode)
        return self

    def forward(self, texts: Padded | Packed) -> Tensor:
        """Pooled vectors of texts, float32 [B, D]."""
        hidden = self.transformer(**texts.inputs(self.transformer.config)).last_hidden_state
        vector_BD = self.dense(texts.pool(hidden, self.pooling))
        if self.width < self.full_width:
            vector_BD = vector_BD[:, : self.width]
        return vector_BD.float()


class TokenLayers(nn.Module):
    """A method's layers that replace the bag's sum: from the weighted embeddings [B, T, D] of the
    first tokens of each text, padded with zeros, to vectors [B, D].

    Attributes:
        name: of the layers in the model's state. num_tokens: T.
    """

    name: ClassVar[str]
    num_tokens: int


class BagEncoder(nn.Module):
    """Weighted sum of token embeddings, scaled to unit length: `normalize(sum_t exp(w_t) e_t)`,
    both w and e trained.

    `w` starts at the log of the tokens' inverse document frequency, so the bag starts as a TF-IDF
    mean of the transformer's token embeddings (as in Astec and SiameseXML). With
    `encoder.bag_words`, words of several pieces have rows of their own, which start at 0. With
    `encoder.bag_head` the first tokens of a text also form a second bag, of the same rows.

    Args:
        num_tokens: V, rows for the vocabulary.
        token_layers: replace the sum.
    """

    continues: Tensor

    def __init__(
        self, settings: Encoder, num_tokens: int, width: int, token_layers: TokenLayers | None
    ):
        super().__init__()
        self.dropout = settings.bag_dropout
        self.num_words = settings.bag_words
        self.head = settings.bag_head
        self.width = width * (2 if self.head else 1)
        self.embedding = RowTable(num_tokens + self.num_words, width)
        self.log_weight = RowTable(num_tokens + self.num_words, 1)
        self.num_read = 0  # tokens that the layers read
        self._layers_name = ""
        if token_layers is not None:
            self.num_read = token_layers.num_tokens
            self._layers_name = token_layers.name
            self.add_module(token_layers.name, token_layers)
        if self.num_words:  # bool [V], whether a piece continues a word
            self.register_buffer("continues", torch.zeros(num_tokens, dtype=torch.bool))

    @property
    def num_tokens(self) -> int:
        """V."""
        return self.embedding.num_rows - self.num_words

    @property
    def token_layers(self) -> nn.Module | None:
        """Layers that replace the sum; None if there are none."""
        return self._modules.get(self._layers_name)

    def features(self, flat_F: np.ndarray, lengths_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Table rows of the texts' features, and the number of features of each text: tokens, and
        with `num_words` also words of several pieces.
        """
        if not self.num_words:
            return flat_F, lengths_B
        return with_words(flat_F, lengths_B, self._host_continues, self.num_words)

    @functools.cached_property
    def _host_continues(self) -> np.ndarray:
        """`continues` on the host, cached: a copy for each batch would make the host wait."""
        return self.continues.cpu().numpy()

    @torch.no_grad()
    def start_weights(self, document_frequency_V: np.ndarray, num_documents: int) -> None:
        """Set the tokens' weights from their document frequencies (number of texts with the token).
        Special tokens, in every text, get almost no weight.
        """
        idf_V = np.log((1 + num_documents) / (1 + document_frequency_V)).clip(min=1e-3)
        log_idf_V1 = torch.from_numpy(np.log(idf_V)).unsqueeze(1)
        self.log_weight.weight.copy_(log_idf_V1)

    def forward(self, batch: EncoderInput) -> Tensor:
        """Vectors float32 [B, D] of unit length (0 without tokens); with two bags [B, 2 D]."""
        local_F = batch.local_F
        assert local_F is not None
        embedding_UD = self.embedding.gather(batch.unique_U)
        log_weight_U = self.log_weight.gather(batch.unique_U).squeeze(1)
        weight_F = rows_at(log_weight_U, local_F).exp()
        if self.training and self.dropout > 0:
            weight_F = weight_F * (torch.rand_like(weight_F) >= self.dropout)
        if self.token_layers is not None:
            return self.token_layers(self._padded(batch, embedding_UD, weight_F))
        weights = [weight_F]
        if batch.head_F is not None:
            weights.append(weight_F * batch.head_F)
        bags = []
        for weight_F in weights:
            sum_BD = F.embedding_bag(
                local_F, embedding_UD, batch.offsets_B, mode="sum", per_sample_weights=weight_F
            )
            bags.append(F.normalize(sum_BD, dim=-1))
        return torch.cat(bags, dim=-1)

    def _padded(self, batch: EncoderInput, embedding_UD: Tensor, weight_F: Tensor) -> Tensor:
        """Weighted embeddings of each text's first tokens, padded with zeros, [B, T, D]."""
        assert batch.local_F is not None and batch.offsets_B is not None
        num_tokens = len(weight_F)
        place_T = torch.arange(self.num_read, device=weight_F.device)
        place_BT = batch.offsets_B[:, None] + place_T
        end_B = F.pad(batch.offsets_B[1:], (0, 1), value=num_tokens)
        # an extra token with zeros pads
        place_BT = torch.where(place_BT < end_B[:, None], place_BT, num_tokens)
        local_F = F.pad(batch.local_F, (0, 1), value=len(embedding_UD))
        rows_UD = F.pad(embedding_UD, (0, 0, 0, 1))
        embedding_ND = rows_at(rows_UD, local_F[place_BT].flatten())
        weight_N = rows_at(F.pad(weight_F, (0, 1)), place_BT.flatten())
        return (embedding_ND * weight_N.unsqueeze(-1)).unflatten(0, place_BT.shape)


class TextEncoder(nn.Module):
    """Phi: the concatenated parts, dropout, and with `encoder.residual` a residual network.

    Args:
        transformer: the loaded AutoModel, or None for a bag alone.
        num_tokens, width: rows and width of the bag's embeddings (the width is the transformer's
            hidden size).
        token_layers: of `BagEncoder`.
        dense: layers after the transformer's pooling.

    Attributes:
        unit_vectors: whether the transformer's vectors are scaled to unit length; those of a
            transformer that trains alone are not. A model that starts from another model takes that
            model's value, whichever parts train.
        recompute: keep only a chunk's input for backward and compute its activations again, with
            the same dropout: a third more work, a small part of the memory (Chen et al., 2016).
    """

    def __init__(
        self,
        settings: Encoder,
        transformer: nn.Module | None,
        num_tokens: int,
        width: int,
        token_layers: TokenLayers | None = None,
        *,
        dense: Sequence[Dense] = (),
    ):
        super().__init__()
        self.settings = settings
        self.recompute = False
        self.unit_vectors = settings.unit_vectors
        self.part_width = width
        self.width = 0
        self.transformer: TransformerEncoder | None = None
        self.bag: BagEncoder | None = None
        self.residual: nn.Sequential | None = None
        if settings.has_transformer:
            assert transformer is not None
            self.transformer = TransformerEncoder(
                transformer, settings.pooling, settings.trainable_layers, dense, settings.width
            )
            self.width += self.transformer.width
        if settings.kind != "transformer":
            self.bag = BagEncoder(settings, num_tokens, width, token_layers)
            self.width += self.bag.width
        self.dropout = Dropout(settings.dropout)
        if settings.residual:
            last = zero_linear(self.width)  # starts as the identity
            first = nn.Linear(self.width, self.width)
            self.residual = nn.Sequential(first, nn.GELU(), Dropout(0.1), last)
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
        if self.frozen:  # dropout applies to the output alone
            for part in self.children():
                part.train(mode and part is self.dropout)
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
        options: Any = {"fallback_random": True} if backend == "inductor" else None
        device = next(self.transformer.parameters()).device
        try:
            add_one = torch.compile(lambda x: x + 1, backend=backend, options=options)
            add_one(torch.ones(2, device=device))
        except (RuntimeError, ImportError, OSError) as error:
            raise ConfigError(
                "torch.compile does not work on this machine",
                where="run.compile",
                got=str(error).strip()[:500],
                fix="install a C++ compiler (g++), for a GPU triton as well; or run.compile: false",
            ) from error
        # torch looks at the gradients of rounded weights, which are no leaves
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        self.transformer.compile(dynamic=True, backend=backend, options=options)

    def forward(self, batch: EncoderInput) -> Tensor:
        """Vectors float32 [B, W] of texts."""
        if batch.output_BW is not None:
            return self.dropout(batch.output_BW.float())
        return self._with_residual(self.dropout(self._parts(batch)))

    @torch.no_grad()
    def frozen_output(self, batch: EncoderInput) -> Tensor:
        """Output of a frozen encoder before its dropout, float32 [B, W]."""
        return self._with_residual(self._parts(batch))

    def _with_residual(self, x_BW: Tensor) -> Tensor:
        return x_BW if self.residual is None else x_BW + self.residual(x_BW)

    def _parts(self, batch: EncoderInput) -> Tensor:
        parts = []
        if self.transformer is not None:
            vector_BD = batch.vector_BD
            if vector_BD is None:
                vector_BD = self.transformer_vectors(batch)
            vector_BD = vector_BD.float()
            parts.append(F.normalize(vector_BD, dim=-1) if self.unit_vectors else vector_BD)
        if self.bag is not None:
            parts.append(self.bag(batch))
        return torch.cat(parts, dim=-1)

    def transformer_vectors(self, batch: EncoderInput) -> Tensor:
        """The transformer's pooled vectors, float32 [B, D]."""
        assert self.transformer is not None
        # fewer texts than ranks, none for this rank: its gradients must be 0, not missing
        if not batch.chunks:
            device = next(self.transformer.parameters()).device
            no_text = torch.zeros(1, 1, dtype=torch.int64, device=device)
            return self.transformer(Padded(no_text, no_text == 0))[:0]
        run: Callable[..., Tensor] = self.transformer
        device_type = batch.chunks[0][0].device.type
        if isinstance(batch.chunks[0], Packed) and torch.is_autocast_enabled(device_type):
            run = in_half(self.transformer, torch.get_autocast_dtype(device_type), device_type)
        if self.recompute and torch.is_grad_enabled():
            run = functools.partial(checkpoint, run, use_reentrant=False)
        vectors = torch.cat([run(chunk) for chunk in batch.chunks])
        return vectors if batch.place_B is None else vectors[batch.place_B]


def load_transformer(folder: Path) -> nn.Module:
    """A folder's transformer, without the unused pooling head, or its static vectors."""
    from transformers.utils import logging

    if is_static(folder):
        return load_static(folder)
    logging.set_verbosity_error()  # transformers would report the pooling head's unused weights
    logging.disable_progress_bar()
    config = transformer_config(folder)
    options = transformer_options(config)
    # float32 whatever the file's type: half-precision weights would lose most of their updates
    load = transformer_class(config).from_pretrained
    return load(folder, use_safetensors=True, **options).float()


def transformer_config(folder: Path) -> Any:
    """The configuration of a transformer in a folder or in a file.

    Raises:
        ConfigError: it is damaged, of an architecture that the installed transformers does not
            have, or needs remote code, which is never run.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        what = "not the config.json of a transformer that the installed transformers has"
        fix = "save it with AutoModel.save_pretrained"
        if "trust_remote_code" in str(error):
            what = "this encoder needs code of its own (trust_remote_code), which unidec never runs"
            fix = "name an encoder that the installed transformers has: unidec encoders lists them"
        raise ConfigError(what, where=folder, got=str(error)[:200], fix=fix) from error


def transformer_class(config: Any) -> Any:
    """The class that loads a transformer; for an encoder-decoder such as T5, its encoder alone."""
    from transformers import AutoModel, AutoModelForTextEncoding

    return AutoModelForTextEncoding if config.is_encoder_decoder else AutoModel


def empty_transformer(config_folder: Path) -> nn.Module:
    """A transformer as in config.json, with random weights; the caller loads the weights."""
    if is_static(config_folder):
        return empty_static(config_folder)
    config = transformer_config(config_folder)
    return transformer_class(config).from_config(config, **transformer_options(config)).float()


def write_config(transformer: Any, folder: Path) -> None:
    """Write the config.json of a transformer, from which `empty_transformer` makes another one."""
    from transformers import AutoModel

    config = copy.deepcopy(transformer.config)
    # an encoder-decoder whose encoder was loaded alone says that it is none
    whole = AutoModel._model_mapping[type(config)]
    config.is_encoder_decoder = not isinstance(transformer, whole)
    config.save_pretrained(folder)


def transformer_options(config: Any, gpu: bool = False) -> dict[str, Any]:
    """Options of `AutoModel` for a config: no unused pooling head, and with a GPU here or elsewhere
    (`gpu`) fused attention if the architecture supports it (MPNet does not).
    """
    from transformers import AttentionInterface, AutoModel

    attention = "eager"
    gpu |= torch.cuda.is_available()
    if gpu and AutoModel._model_mapping[type(config)]._supports_sdpa:
        AttentionInterface.register(ATTENTION, attend)
        attention = ATTENTION if config.model_type in PACKABLE else "sdpa"
    options: dict[str, Any] = {"attn_implementation": attention}
    if config.model_type in ("bert", "roberta", "xlm-roberta", "mpnet"):
        options["add_pooling_layer"] = False
    return options
