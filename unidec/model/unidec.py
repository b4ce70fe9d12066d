"""UniDEC: a shared text encoder, a dual-encoder head, a classifier head and the classifier table.

Legend: B texts of a batch, N all texts, L labels, D width of a head, W width of the encoder.

Source: UniDEC (thesis, chapter 2): Phi_D(t) = normalize(g1(Phi(t))) for queries and labels,
Phi_C(x) = g2(Phi(x)) for
queries, Psi an L x D table. Without `projection`, g1 and g2 are the identity (DPR, NGAME, DEXML).
Methods of single papers add parts of their own (`unidec.model.additions`, `unidec.methods`)."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from unidec.config import Encoder, Model
from unidec.data.storage import Folder, read_manifest
from unidec.data.tensor_file import open_tensors, write_tensors
from unidec.data.tokens import Tokens
from unidec.errors import ArtifactError, ConfigError
from unidec.model.additions import AS_TRAINED, Add, Exported, Part, add_nothing
from unidec.model.arrays import (
    BY_LABEL,
    CLASSIFIER,
    CONFIG,
    KIND,
    VERSION,
    WEIGHTS,
    ModelConfig,
    misfit,
)
from unidec.model.encoder import InputBuilder, TextEncoder, empty_transformer, load_transformer
from unidec.model.pairs import all_to_host, to_device
from unidec.model.row_table import HERE, Placement, RowTable
from unidec.model.weights import copy_into, take_start
from unidec.model.words import continuing_pieces
from unidec.progress import Progress, progress

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROJECT_BLOCK = 1 << 13  # texts whose encoder outputs are in memory and pass the heads at once
# rows of the table that are computed at once (a multiple of the encoder's batch size)
START_BLOCK = 1 << 15
LabelInput = Callable[[np.ndarray], Tensor]  # from rows int64 [n] to encoder outputs [n, W]


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
        self.encoder_settings = encoder_settings
        self.settings = settings
        self.num_labels = num_labels
        self.heads = settings.heads
        self.encoder = encoder
        self.head_de: nn.Sequential | None = None
        self.head_clf: nn.Sequential | None = None
        self.table: RowTable | None = None
        self.bias: RowTable | None = None
        if not settings.projection and settings.dim != encoder.width:
            raise ConfigError(
                "without a projection the heads have the encoder's width",
                where="model.dim",
                got=settings.dim,
                expected=str(encoder.width),
                fix=f"model.dim: {encoder.width}, or model.projection: true",
            )
        additions = add(settings, num_labels)
        self.label_vectors = additions.label_vectors
        for name, part in additions.parts(encoder.width).items():
            self._register(name, part)
        if self.heads != "clf":
            layers = (
                [nn.Linear(encoder.width, settings.dim), nn.Tanh()]
                if settings.projection
                else [nn.Identity()]
            )
            self.head_de = nn.Sequential(*layers, nn.Dropout(settings.dropout))
        if self.heads != "de":
            layer = nn.Linear(encoder.width, settings.dim) if settings.projection else nn.Identity()
            self.head_clf = nn.Sequential(layer, nn.Dropout(settings.dropout))
            self._create_table(additions.num_rows, placement)
        self.log_scale = nn.Parameter(
            torch.full((2,), -float(np.log(settings.temperature))),
            requires_grad=settings.learn_temperature,
        )
        # set by `create` and `load`
        self.config_folder: Path | None = None
        self.tokenizer_folder: Path = Path()
        self.max_length: int = 0
        self.params: dict[str, Any] = {}

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
        transformer = load_transformer(folder)
        start_VD = transformer.get_input_embeddings().weight.detach()  # type: ignore[operator]
        num_tokens = max(num_tokens, start_VD.shape[0])
        encoder = TextEncoder(
            encoder_settings,
            transformer if encoder_settings.has_transformer else None,
            num_tokens,
            start_VD.shape[1],
        )
        if encoder.bag is not None:
            with torch.no_grad():
                encoder.bag.embedding.weight[: start_VD.shape[0]].copy_(start_VD)
                if encoder.bag.num_words:
                    encoder.bag.continues.copy_(
                        torch.from_numpy(continuing_pieces(folder, encoder.bag.num_tokens))
                    )
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

    @torch.no_grad()
    def start_table(self, label_input: LabelInput | None = None) -> None:
        """Initialise Psi as `model.clf_init` says: from label embeddings, by Xavier, or from N(0,
        0.02) (Renee).

        Label embeddings are texts through the classifier head, scaled to unit length. If the
        encoder's vectors have no unit length (a transformer that trains alone), they are scaled to
        the inverse of their length, so that scores start as cosines: unit rows would give logits of
        several tens, and a softmax without a gradient.

        Works in blocks, so that no second table is in memory. Random rows are drawn for all labels
        from the default generator of the model's device: they are the same wherever the table lives
        and whichever rows are held here.

        Args:
            label_input: needed for "label_embedding" only: returns encoder outputs [n, W] of label
            rows.
        """
        if self.table is None or self.head_clf is None:
            return
        first = self.table.first_row
        last = self.table.first_row + self.table.own_rows
        embeds = self.settings.clf_init == "label_embedding"
        stop = last if embeds else self.table.num_rows
        for start in range(first if embeds else 0, stop, START_BLOCK):
            end = min(start + START_BLOCK, stop)
            if embeds:
                assert label_input is not None
                x_BW = label_input(np.arange(start, end))
                rows_BD = self.text_rows(x_BW, dropout=False)
                if not self.encoder.unit_vectors:
                    rows_BD = rows_BD / self.head_clf[0](x_BW).norm(dim=-1, keepdim=True).clamp_min(
                        1.0
                    )
            else:
                rows_BD = self._random_rows(end - start)
            begin = max(start, first)
            until = min(end, last)
            if begin < until:
                self.table.weight[begin - first : until - first] = rows_BD[
                    begin - start : until - start
                ]

    def _random_rows(self, count: int) -> Tensor:
        """Random rows float32 [count, D], by Xavier or from N(0, 0.02)."""
        rows_BD = torch.empty(count, self.settings.dim, device=self.device)
        if self.settings.clf_init == "normal":
            return rows_BD.normal_(std=0.02)
        rows = self.table.num_rows if self.table is not None else count
        # Xavier's, for the whole table
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (rows + self.settings.dim))
        return rows_BD.uniform_(-bound, bound)

    def text_rows(self, x_SW: Tensor, dropout: bool = True) -> Tensor:
        """Phi_C of labels' texts, scaled to unit length, float32 [S, D].

        Args:
            x_SW: encoder outputs of the texts.
            dropout: in training the head's dropout applies, as for queries.
        """
        assert self.head_clf is not None
        layers = self.head_clf if dropout else self.head_clf[0]
        return F.normalize(layers(x_SW).float(), dim=-1)

    def de(self, x_BW: Tensor, labels_S: Tensor | None = None) -> Tensor:
        """Phi_D, float32 [B, D], of unit length unless `normalize` is off.

        Args:
            x_BW: encoder outputs.
            labels_S: int64, the labels whose texts are the last S rows of `x_BW`: methods may
            change their vectors.
        """
        assert self.head_de is not None
        de_BD = self.head_de(x_BW).float()
        if labels_S is not None and self.label_vectors is not None:
            num_queries = len(de_BD) - len(labels_S)
            label_SD = self.label_vectors(self, de_BD[num_queries:], labels_S)
            de_BD = torch.cat([de_BD[:num_queries], label_SD])
        return F.normalize(de_BD, dim=-1) if self.settings.normalize else de_BD

    def clf(self, x_BW: Tensor) -> Tensor:
        """Phi_C, float32 [B, D]."""
        assert self.head_clf is not None
        return self.head_clf(x_BW).float()

    def tables(self) -> dict[str, RowTable]:
        """All row tables by name."""
        return {
            name: module for name, module in self.named_modules() if isinstance(module, RowTable)
        }

    @property
    def device(self) -> torch.device:
        return self.log_scale.device

    @torch.no_grad()
    def encode(
        self,
        name: str,
        tokens: Tokens,
        rows: np.ndarray | None = None,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
        bar: Progress[Any] | None = None,
    ) -> np.ndarray:
        """Encoder outputs float32 [n, W] of texts, without dropout.

        Args:
            name: source of the texts in the input builder's caches ("queries" or "labels").
            rows: which texts; None: all.
            build: an input builder with caches; None: one without caches.
            bar: progress bar, advanced by the number of texts.
        """
        rows = np.arange(len(tokens)) if rows is None else np.asarray(rows, dtype=np.int64)
        was_training = self.training
        self.eval()
        x_NW = np.empty((len(rows), self.encoder.width), dtype=np.float32)
        outputs = self._outputs(name, tokens, rows, build, batch_size, bar)
        for start, x_BW in zip(range(0, len(rows), batch_size), all_to_host(outputs), strict=True):
            x_NW[start : start + batch_size] = x_BW
        self.train(was_training)
        return x_NW

    def _outputs(
        self,
        name: str,
        tokens: Tokens,
        rows: np.ndarray,
        build: InputBuilder | None,
        batch_size: int,
        bar: Progress[Any] | None,
    ) -> Iterator[Tensor]:
        """Yields the encoder's outputs of each batch, float32 on the device."""
        build = build or InputBuilder(self.encoder, self.device)
        for start in range(0, len(rows), batch_size):
            batch = build([(name, tokens, rows[start : start + batch_size])])
            yield self.encoder(batch).float()
            if bar is not None:
                bar.update(batch.num_texts)

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
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Phi_D, Phi_C) float32 [n, D] of texts; None for a head that the model does not have or
        `only` excludes.

        Encoder outputs are in memory for a block of texts at a time. Heads compute in float32 also
        under autocast, as in serving.

        Args:
            desc: title of a progress bar; None: no progress bar. The other arguments are those of
            `encode`.
            only: compute this head only.
        """
        rows = np.arange(len(tokens)) if rows is None else np.asarray(rows, dtype=np.int64)
        block = max(PROJECT_BLOCK // batch_size, 1) * batch_size
        heads = [
            key for key in ("de", "clf") if self.heads in ("both", key) and only in (None, key)
        ]
        if not heads:
            return None, None
        out = {key: np.empty((len(rows), self.settings.dim), dtype=np.float32) for key in heads}
        was_training = self.training
        self.eval()
        with (
            progress(total=len(rows), desc=desc, unit="text")
            if desc
            else contextlib.nullcontext() as bar
        ):

            def projected() -> Iterator[Tensor]:
                for start in range(0, len(rows), block):
                    outputs = self._outputs(
                        name, tokens, rows[start : start + block], build, batch_size, bar
                    )
                    x_BW = torch.cat(list(outputs))
                    labels = (
                        to_device(rows[start : start + block], self.device)
                        if name == "labels"
                        else None
                    )
                    with torch.autocast(self.device.type, enabled=False):
                        vectors = [
                            self.de(x_BW, labels) if key == "de" else self.clf(x_BW)
                            for key in heads
                        ]
                        heads_BD = torch.cat(vectors, dim=-1)
                    yield heads_BD

            for start, heads_BD in zip(
                range(0, len(rows), block), all_to_host(projected()), strict=True
            ):
                for key, vectors_BD in zip(
                    heads, np.split(heads_BD, len(heads), axis=1), strict=True
                ):
                    out[key][start : start + block] = vectors_BD
        self.train(was_training)
        return out.get("de"), out.get("clf")

    def encode_queries(
        self,
        tokens: Tokens,
        rows: np.ndarray | None = None,
        build: InputBuilder | None = None,
        batch_size: int = 1024,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Phi_D, Phi_C) float32 [n, D] of query texts; None for a head that the model does not
        have.
        """
        return self.vectors("queries", tokens, rows, build, batch_size)

    def encode_labels(
        self, tokens: Tokens, build: InputBuilder | None = None, batch_size: int = 1024
    ) -> np.ndarray | None:
        """Phi_D of label texts, float32 [L, D]; None without a dual-encoder head."""
        return self.vectors("labels", tokens, None, build, batch_size, only="de")[0]

    def classifier_table(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Psi float32 [L, D], bias float32 [L]) of the rows held here; None for what the model
        does not have.
        """
        weight = None if self.table is None else self.table.numpy()
        bias = None if self.bias is None else self.bias.numpy()[:, 0]
        return weight, bias

    def dense_state(self) -> dict[str, Tensor]:
        """The state dict without the tables' weights."""
        tables = {f"{name}.weight" for name in self.tables()}
        return {name: value for name, value in self.state_dict().items() if name not in tables}

    def load_dense_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors of a `dense_state` into this model. Raises RuntimeError: names or shapes
        differ.
        """

        def read(name: str, *rows: int | None) -> Tensor:
            return tensors[name] if rows[0] is None else tensors[name][slice(*rows)]

        copy_into(
            self.dense_state(), {name: tuple(value.shape) for name, value in tensors.items()}, read
        )

    def save_into(
        self, folder: Folder, extra: dict[str, Any] | None = None, exported: Exported = AS_TRAINED
    ) -> None:
        """Write weights, configuration and tokenizer into a folder that `storage.write_folder`
        opened.

        Args:
            extra: further entries of config.json.
            exported: how methods export the model.
        """
        assert self.config_folder is not None
        state = self.state_dict()
        rows_LD, bias_L = exported.classifier
        if rows_LD is not None:
            state[CLASSIFIER[0]] = torch.from_numpy(rows_LD).to(DTYPES[self.settings.clf_dtype])
        if bias_L is not None:
            state[CLASSIFIER[1]] = torch.from_numpy(bias_L)[:, None]
        state = {
            name: tensor
            for name, tensor in state.items()
            if name.split(".")[0] not in exported.without
        }
        write_tensors(folder.path / WEIGHTS, state)
        for name, source, names in (
            ("tokenizer", self.tokenizer_folder, TOKENIZER_FILES),
            ("encoder_config", self.config_folder, ("config.json",)),
        ):
            (folder.path / name).mkdir()
            for file in names:
                if (source / file).is_file():
                    shutil.copyfile(source / file, folder.path / name / file)
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
        } | (extra or {})
        (folder.path / CONFIG).write_text(
            json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )

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
        """A model from its folder, ready to encode.

        Args:
            verify: check the hashes of the files.
            rows: also load the classifier's rows and biases and other tensors by label; otherwise
                these are None, and the file need not have them (a bundle stores label vectors
                outside the model).
            add: returns what methods add; needed with `rows` for a model with tensors of methods.

        Raises:
            ArtifactError: missing, damaged, of a newer version, or weights that do not fit the
            configuration.
        """
        path = Path(path)
        read_manifest(path, KIND, VERSION, verify=verify)
        config = ModelConfig.read(path)
        try:
            transformer = (
                empty_transformer(config.config_folder) if config.encoder.has_transformer else None
            )
            encoder = TextEncoder(config.encoder, transformer, config.num_tokens, config.width)
            placement = HERE if rows else Placement(num_rows=0)
            model = cls(
                config.encoder, config.settings, config.num_labels, encoder, placement, add=add
            )
            if not rows:
                model.table = model.bias = None
            model.encoder.unit_vectors = config.unit_vectors
            with open_tensors(path / WEIGHTS) as file:
                names = [name for name in file.names if rows or name not in BY_LABEL]
                copy_into(model.state_dict(), {name: file.shape(name) for name in names}, file.read)
        except (
            KeyError,
            ValueError,
            TypeError,
            RuntimeError,
            OSError,
            ConfigError,
            ArtifactError,
        ) as error:
            raise misfit(path, error) from error
        model.max_length = config.max_length
        model.params = config.params
        model.config_folder = config.config_folder
        model.tokenizer_folder = config.tokenizer_folder
        return model.to(device).eval()
