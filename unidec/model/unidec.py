"""UniDEC: a shared text encoder, a dual-encoder head, a classifier head and the classifier table.

Legend: B texts of a batch, N all texts, L labels, D width of a head, W width of the encoder.

Source: UniDEC (thesis, chapter 2): Phi_D(t) = normalize(g1(Phi(t))) for queries and labels,
Phi_C(x) = g2(Phi(x)) for queries, Psi an L x D table. Without `projection`, g1 and g2 are the
identity (DPR, NGAME, DEXML). With `query_head`, queries have their own g1. Methods of single papers
add parts (`unidec.model.additions`, `unidec.methods`).
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.config import Encoder, Model
from unidec.data.chunks import blocks
from unidec.data.storage import Folder, read_manifest
from unidec.data.tensor_file import open_tensors, write_tensors
from unidec.data.tokens import Tokens, encode_texts
from unidec.errors import ConfigError, UnidecError
from unidec.model.additions import AS_TRAINED, Add, Exported, Part, add_nothing
from unidec.model.arrays import (
    BY_LABEL,
    CLASSIFIER,
    CONFIG,
    KIND,
    VERSION,
    WEIGHTS,
    ModelConfig,
    heads_of,
    misfit,
)
from unidec.model.dense import Dense, load_dense
from unidec.model.dropout import Dropout
from unidec.model.encoder import TextEncoder, empty_transformer, load_transformer
from unidec.model.encoder_folder import resolved
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.lora import merged, with_own_weights, without_own_weights
from unidec.model.pairs import to_device
from unidec.model.row_table import HERE, Placement, RowTable
from unidec.model.weights import copy_into, take_start
from unidec.model.words import continuing_pieces
from unidec.progress import progress

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BLOCK_TEXTS = 1 << 13  # texts whose encoder outputs are on the device at once


class UniDEC(nn.Module):
    """Encoder, heads and classifier table.

    Args:
        encoder_settings, settings: sections `encoder` and `model`.
        placement: where the classifier's rows live, and which of them are held here.
        add: returns what methods add.

    Attributes:
        heads: "both", "de" or "clf".
        table: Psi, `RowTable` [L, D]; bias: `RowTable` [L, 1] or None.
        log_scale: float [2], log(1 / tau) of the two heads.

    Raises:
        ConfigError: without `projection`, `dim` is not the encoder's width.
    """

    def __init__(
        self,
        encoder_settings: Encoder,
        settings: Model,
        num_labels: int,
        encoder: TextEncoder,
        placement: Placement = HERE,
        *,
        add: Add = add_nothing,
    ):
        super().__init__()
        if not settings.projection and settings.dim != encoder.width:
            raise ConfigError(
                "without a projection the heads have the encoder's width",
                where="model.dim",
                got=settings.dim,
                expected=str(encoder.width),
                fix=f"model.dim: {encoder.width}, or model.projection: true",
            )
        self.encoder_settings = encoder_settings
        self.settings = settings
        self.num_labels = num_labels
        self.heads = settings.heads
        self.encoder = encoder
        self.head_de: nn.Sequential | None = None
        self.head_query: nn.Sequential | None = None  # of the dual encoder, for queries alone
        self.head_clf: nn.Sequential | None = None
        self.table: RowTable | None = None
        self.bias: RowTable | None = None
        additions = add(encoder_settings, settings, num_labels)
        self.label_vectors = additions.label_vectors
        for name, part in additions.parts(encoder.width).items():
            self._register(name, part)
        if self.heads != "clf":
            self.head_de = self._new_head(nn.Tanh())
            if settings.query_head:
                self.head_query = copy.deepcopy(self.head_de)
        if self.heads != "de":
            self.head_clf = self._new_head()
            self._create_table(additions.num_rows, placement)
        log_scale = -math.log(settings.temperature)
        self.log_scale = nn.Parameter(
            torch.full((2,), log_scale), requires_grad=settings.learn_temperature
        )
        # set by `create` and `load`
        self.config_folder: Path | None = None
        self.tokenizer_folder: Path = Path()
        self.max_length: int = 0
        self.params: dict[str, Any] = {}

    def _new_head(self, *activation: nn.Module) -> nn.Sequential:
        settings = self.settings
        layers: list[nn.Module] = [nn.Identity()]
        if settings.projection:
            layers = [nn.Linear(self.encoder.width, settings.dim), *activation]
        return nn.Sequential(*layers, Dropout(settings.dropout))

    def _register(self, name: str, part: Part) -> None:
        """Make a part an attribute whose values are in the model's state."""
        if isinstance(part, nn.Module):
            self.add_module(name, part)
        elif isinstance(part, nn.Parameter):
            self.register_parameter(name, part)
        else:
            self.register_buffer(name, part)

    def _create_table(self, num_rows: int | None, placement: Placement) -> None:
        settings = self.settings
        rows = self.num_labels if num_rows is None else num_rows
        if num_rows is not None and placement.num_rows:
            # rows that labels share are on one rank only
            placement = replace(placement, num_rows=num_rows)
        self.table = RowTable(rows, settings.dim, DTYPES[settings.clf_dtype], placement)
        self.bias = RowTable(rows, 1, torch.float32, placement) if settings.clf_bias else None

    @classmethod
    def create(
        cls,
        encoder_settings: Encoder,
        settings: Model,
        num_labels: int,
        folder: Path,
        num_tokens: int,
        params: dict[str, Any],
        placement: Placement = HERE,
        *,
        add: Add = add_nothing,
    ) -> UniDEC:
        """A new model on a pretrained transformer; the caller seeds torch's random numbers.

        Args:
            folder: from `resolve_encoder`; a bag alone uses the transformer's token embeddings and
                tokenizer only.
            num_tokens: size of the tokenizer's vocabulary.
            params: all parameters, saved with the model.
        """
        encoder_settings = resolved(encoder_settings, folder)
        transformer = load_transformer(folder)
        start_VD = transformer.get_input_embeddings().weight.detach()  # type: ignore[operator]
        start_tokens, width = start_VD.shape
        encoder = TextEncoder(
            encoder_settings,
            transformer if encoder_settings.has_transformer else None,
            num_tokens=max(num_tokens, start_tokens),
            width=width,
            token_layers=add(encoder_settings, settings, num_labels).token_layers(width),
            dense=load_dense(folder) if encoder_settings.has_transformer else (),
        )
        bag = encoder.bag
        if bag is not None:
            with torch.no_grad():
                bag.embedding.weight[:start_tokens].copy_(start_VD)
            if bag.num_words:
                continues_V = continuing_pieces(folder, bag.num_tokens)
                bag.continues.copy_(torch.from_numpy(continues_V))
        model = cls(encoder_settings, settings, num_labels, encoder, placement, add=add)
        model.config_folder = model.tokenizer_folder = folder
        model.max_length = int(params["tokens"]["max_length"])
        model.params = params
        if model.head_clf is not None and settings.projection:
            # keeps the angles of the encoder's space
            nn.init.orthogonal_(model.head_clf[0].get_parameter("weight"))
        if encoder_settings.start:
            take_start(model, encoder_settings.start)
        return model

    def text_rows(self, x_SW: Tensor, dropout: bool = True) -> Tensor:
        """Phi_C of labels' texts, scaled to unit length, float32 [S, D].

        Args:
            x_SW: encoder outputs of the texts.
            dropout: in training the head's dropout applies, as for queries.
        """
        assert self.head_clf is not None
        layers = self.head_clf if dropout else self.head_clf[0]
        return F.normalize(layers(x_SW).float(), dim=-1)

    def de(
        self, x_BW: Tensor, num_queries: int | None = None, labels_S: Tensor | None = None
    ) -> Tensor:
        """Phi_D, float32 [B, D], of unit length unless `normalize` is off.

        Args:
            x_BW: encoder outputs of `num_queries` queries (None: all), and then of label texts.
            labels_S: int64, the labels of these texts: methods may change their vectors.
        """
        assert self.head_de is not None
        head_query = self.head_query or self.head_de
        if head_query is self.head_de or num_queries is None:
            de_BD = head_query(x_BW).float()
        else:
            query_BD = head_query(x_BW[:num_queries])
            de_BD = torch.cat([query_BD, self.head_de(x_BW[num_queries:])]).float()
        if labels_S is not None and self.label_vectors is not None:
            label_SD = self.label_vectors(self, de_BD[num_queries:], labels_S)
            de_BD = torch.cat([de_BD[:num_queries], label_SD])
        return F.normalize(de_BD, dim=-1) if self.settings.normalize else de_BD

    def clf(self, x_BW: Tensor) -> Tensor:
        """Phi_C, float32 [B, D]."""
        assert self.head_clf is not None
        return self.head_clf(x_BW).float()

    def tables(self) -> dict[str, RowTable]:
        """All row tables by name."""
        return {name: part for name, part in self.named_modules() if isinstance(part, RowTable)}

    @property
    def device(self) -> torch.device:
        return self.log_scale.device

    def tokens(self, texts: Sequence[str], side: Literal["queries", "labels"]) -> Tokens:
        """Tokens of texts after the prompt of their side; raises DataError for invalid Unicode."""
        settings = self.encoder_settings
        prompt = settings.query_prompt if side == "queries" else settings.label_prompt
        return encode_texts(texts, self.tokenizer_folder, self.max_length, prompt)

    @torch.no_grad()
    def encode(
        self,
        name: str,
        tokens: Tokens,
        rows: np.ndarray | None = None,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
    ) -> np.ndarray:
        """Encoder outputs float32 [n, W] of texts, without dropout.

        Args:
            name: source of the texts in the input builder's caches ("queries" or "labels").
            rows: which texts; None: all.
            build: an input builder with caches; None: one without caches.
        """
        rows = np.arange(len(tokens)) if rows is None else rows
        x_NW = np.empty((len(rows), self.encoder.width), dtype=np.float32)
        for some, x_BW in self._blocks(name, tokens, rows, build, batch_size):
            x_NW[some] = x_BW.cpu().numpy()
        return x_NW

    def _blocks(
        self,
        name: str,
        tokens: Tokens,
        rows: np.ndarray,
        build: InputBuilder | None,
        batch_size: int,
        *,
        desc: str | None = None,
    ) -> Iterator[tuple[slice, Tensor]]:
        """Yields the encoder's outputs float32 of some rows at a time, on the device and without
        dropout. The host waits for a GPU only where these are copied, so it prepares batches while
        the GPU computes.
        """
        build = build or InputBuilder(self.encoder, self.device)
        block = max(BLOCK_TEXTS // batch_size, 1) * batch_size
        was_training = self.training
        self.eval()
        with progress(total=len(rows), desc=desc, unit="text") as bar:
            for some in blocks(len(rows), block):
                outputs = []
                for part in blocks(some.stop - some.start, batch_size):
                    rows_B = rows[some][part]
                    outputs.append(self.encoder(build([(name, tokens, rows_B)])).float())
                    bar.update(len(rows_B))
                yield some, torch.cat(outputs)
        self.train(was_training)

    @torch.no_grad()
    def vectors(
        self,
        name: str,
        tokens: Tokens,
        rows: np.ndarray | None = None,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
        desc: str | None = None,
        only: Literal["de", "clf"] | None = None,
        into: np.ndarray | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Phi_D, Phi_C) float32 [n, D] of texts; None for a head that the model does not have or
        `only` excludes.

        Encoder outputs are in memory for a block of texts at a time. Heads compute in float32 also
        under autocast, as in serving.

        Args:
            desc: title of a progress bar; None: no progress bar. Other arguments: as for `encode`.
            only: compute this head only.
            into: with `only`, the array [n, D] that is filled and returned.
        """
        rows = np.arange(len(tokens)) if rows is None else rows
        shape = (len(rows), self.settings.dim)
        out = {
            head: np.empty(shape, dtype=np.float32) if into is None else into
            for head in heads_of(self.heads)
            if only in (None, head)
        }
        if not out:
            return None, None
        for some, x_BW in self._blocks(name, tokens, rows, build, batch_size, desc=desc):
            labels = to_device(rows[some], self.device) if name == "labels" else None
            num_queries = 0 if name == "labels" else None
            with torch.autocast(self.device.type, enabled=False):
                for head, vectors_ND in out.items():
                    head_BD = self.de(x_BW, num_queries, labels) if head == "de" else self.clf(x_BW)
                    vectors_ND[some] = head_BD.cpu().numpy()
        return out.get("de"), out.get("clf")

    def encode_queries(
        self,
        tokens: Tokens,
        rows: np.ndarray | None = None,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Phi_D, Phi_C) float32 [n, D] of queries; None for a head that the model lacks."""
        return self.vectors("queries", tokens, rows, build, batch_size)

    def encode_labels(
        self,
        tokens: Tokens,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
        into: np.ndarray | None = None,
    ) -> np.ndarray | None:
        """Phi_D of label texts, float32 [L, D], in `into` if given; None without that head."""
        return self.vectors("labels", tokens, None, build, batch_size, only="de", into=into)[0]

    def classifier_table(
        self, into: np.ndarray | None = None
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Psi float32 [L, D], bias float32 [L]) of the rows held here; None for what the model
        lacks. Psi fills `into` if it is given.
        """
        weight_LD = None if self.table is None else self.table.numpy(into)
        bias_L = None if self.bias is None else self.bias.numpy().squeeze(1)
        return weight_LD, bias_L

    def dense_state(self) -> dict[str, Tensor]:
        """The state dict `without_own_weights`, and without the tables' weights."""
        state = self.state_dict()
        for name in self.tables():
            del state[f"{name}.weight"]
        return without_own_weights(self, state)

    def load_dense_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy a `dense_state` into this model. Raises RuntimeError: names or shapes differ, or
        adapters belong to other weights.
        """
        tables = {f"{name}.weight": table.weight for name, table in self.tables().items()}
        self.load_state_dict(with_own_weights(self, tensors) | tables)

    def save_into(
        self, folder: Folder, extra: dict[str, Any] | None = None, exported: Exported = AS_TRAINED
    ) -> None:
        """Write weights, configuration and tokenizer into a folder of `storage.write_folder`.

        Args:
            extra: further entries of config.json.
            exported: how methods export the model.
        """
        assert self.config_folder is not None
        state = merged(self, self.state_dict())
        rows_LD, bias_L = exported.classifier
        if rows_LD is not None:
            state[CLASSIFIER[0]] = torch.from_numpy(rows_LD).to(DTYPES[self.settings.clf_dtype])
        if bias_L is not None:
            state[CLASSIFIER[1]] = torch.from_numpy(bias_L)[:, None]
        for name in list(state):
            if name.split(".")[0] in exported.without:
                del state[name]
        write_tensors(folder.path / WEIGHTS, state)
        _copy_files(self.tokenizer_folder, folder.path / "tokenizer", TOKENIZER_FILES)
        _copy_files(self.config_folder, folder.path / "encoder_config", ["config.json"])
        bag = self.encoder.bag
        config = {
            "encoder": self.encoder_settings.model_dump(),
            "model": self.settings.model_dump() | dict(exported.settings),
            "num_labels": self.num_labels,
            "max_length": self.max_length,
            "params": self.params,
            "unit_vectors": self.encoder.unit_vectors,
            "num_tokens": bag.num_tokens if bag else 0,
            "encoder_width": self.encoder.part_width,
        }
        transformer = self.encoder.transformer
        if transformer is not None:
            if transformer.width != self.encoder.part_width:
                config["transformer_width"] = transformer.width
            if transformer.dense_facts:
                config["dense"] = transformer.dense_facts
        text = json.dumps(config | (extra or {}), indent=2, sort_keys=True)
        (folder.path / CONFIG).write_text(f"{text}\n", encoding="utf-8")

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        verify: bool = True,
        rows: bool = True,
        *,
        add: Add = add_nothing,
    ) -> UniDEC:
        """Load a model from its folder, ready to encode.

        Args:
            verify: check the hashes of the files.
            rows: also load the classifier's rows and biases and other tensors by label; otherwise
                these are None, and the file need not have them (a bundle stores label vectors
                outside the model).
            add: returns what methods add; needed with `rows` for a model with tensors of methods.

        Raises:
            ArtifactError: the model is missing, damaged or of a newer version, or its weights do
                not fit the configuration.
        """
        path = Path(path)
        read_manifest(path, KIND, VERSION, verify=verify)
        config = ModelConfig.read(path)
        sections = (config.encoder, config.settings, config.num_labels)
        transformer = None
        try:
            if config.encoder.has_transformer:
                transformer = empty_transformer(config.config_folder)
            encoder = TextEncoder(
                config.encoder,
                transformer,
                num_tokens=config.num_tokens,
                width=config.width,
                token_layers=add(*sections).token_layers(config.width),
                dense=[Dense(layer) for layer in config.dense],
            )
            if rows:
                model = cls(*sections, encoder, add=add)
            else:
                model = cls(*sections, encoder, Placement(num_rows=0))
                model.table = model.bias = None
            encoder.unit_vectors = config.unit_vectors
            with open_tensors(path / WEIGHTS) as file:
                names = {name: name for name in file.names if rows or name not in BY_LABEL}
                copy_into(model.state_dict(), file, names)
        except (LookupError, ValueError, TypeError, RuntimeError, OSError, UnidecError) as error:
            raise misfit(path, error) from error
        model.max_length = config.max_length
        model.params = config.params
        model.config_folder = config.config_folder
        model.tokenizer_folder = config.tokenizer_folder
        return model.to(device).eval()


def _copy_files(source: Path, target: Path, names: Collection[str]) -> None:
    """Copy the named files that exist."""
    target.mkdir()
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
