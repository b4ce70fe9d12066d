"""UniDEC: a shared text encoder, a dual-encoder head, a classifier head and the classifier table.

Legend: B texts of a batch, N all texts, L labels, D width of a head, W width of the encoder.

Source: UniDEC (thesis, chapter 2): Phi_D(t) = normalize(g1(Phi(t))) for queries and labels, Phi_C(x) = g2(Phi(x)) for
queries, Psi an L x D table. Options of section `model` change this:

- without `projection`: g1 and g2 are the identity (DPR, NGAME, DEXML);
- `clf_residual`: a row of Psi is the vector of its label's text plus a free vector (SiameseXML); with `clf_gates` both
  are multiplied by learnt gates (DECAF); with `clf_graph` the vectors of related labels' texts are added (ECLARE), with
  `clf_queries` those of the label's training queries (GraphSAGE);
- `auxiliary`: a label's Phi_D is normalize(g1(Phi(t)) + v), v learnt for each label cluster (DEXA: Dahiya et al. 2023);
- `surrogate`: the labels of a cluster share a row of Psi, trained with clusters as labels (Astec: Dahiya et al. 2021);
- `levels`: classifiers of label clusters train together with Psi (`unidec.model.label_tree`).
"""

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
from scipy.sparse import csr_matrix
from torch import Tensor, nn

from unidec.data.storage import Folder, read_manifest
from unidec.data.tensor_file import open_tensors, write_tensors
from unidec.data.tokens import Tokens
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import BY_LABEL, CONFIG, KIND, VERSION, WEIGHTS, ModelConfig, misfit
from unidec.model.encoder import InputBuilder, TextEncoder, empty_transformer, load_transformer
from unidec.model.label_tree import LabelTree, num_clusters
from unidec.model.pairs import all_to_host, rows_at, to_device
from unidec.model.row_table import HERE, Placement, RowTable
from unidec.model.weights import copy_into, take_start
from unidec.model.words import continuing_pieces
from unidec.progress import Progress, progress
from unidec.sections import Encoder, Model

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PROJECT_BLOCK = 1 << 13  # texts whose encoder outputs are in memory and pass the heads at once
START_BLOCK = 1 << 15  # rows of the table that are computed at once (a multiple of the encoder's batch size)
LabelInput = Callable[[np.ndarray], Tensor]  # from rows int64 [n] to encoder outputs [n, W]


class UniDEC(nn.Module):
    """Encoder, heads and classifier table.

    Args:
        encoder_settings, settings: sections `encoder` and `model`.
        placement: where the classifier's rows live, and which of them are held here.

    Attributes:
        heads: "both", "de" or "clf".
        table: Psi, `RowTable` [L, D] (with `clf_residual` the free vectors); bias: `RowTable` [L, 1] or None.
        log_scale: float [2], log(1 / tau) of the two heads.
        label_cluster: int64 [L], cluster of each label with `auxiliary`, `surrogate` or `levels`, else None.
        label_input: returns the encoder outputs [n, W] of label rows, int64 [n], from which a residual classifier's
            complete rows are computed; related_input: with `clf_queries` the same for training queries.
        related_LN: csr [L, N], how much each label is related to labels (`clf_graph`) or training queries
            (`clf_queries`). The trainer sets these three.

    Raises:
        ConfigError: without `projection`, `dim` is not the encoder's width.
    """

    label_cluster: Tensor | None

    def __init__(
        self,
        encoder_settings: Encoder,
        settings: Model,
        num_labels: int,
        encoder: TextEncoder,
        placement: Placement = HERE,
    ):
        super().__init__()
        self.encoder_settings, self.settings, self.num_labels = encoder_settings, settings, num_labels
        self.heads = settings.heads
        self.encoder = encoder
        self.head_de: nn.Sequential | None = None
        self.head_clf: nn.Sequential | None = None
        self.table: RowTable | None = None
        self.bias: RowTable | None = None
        self.gates: nn.Parameter | None = None
        self.related_gate: nn.Parameter | None = None
        self.auxiliary: nn.Parameter | None = None
        self.register_buffer("label_cluster", None)
        if not settings.projection and settings.dim != encoder.width:
            raise ConfigError(
                "without a projection the heads have the encoder's width", where="model.dim", got=settings.dim,
                expected=str(encoder.width), fix=f"model.dim: {encoder.width}, or model.projection: true",
            )  # fmt: skip
        if size := settings.labels_a_cluster:
            clusters = num_clusters(num_labels, size)
            self.label_cluster = torch.zeros(num_labels, dtype=torch.int64)
        if settings.surrogate and placement.num_rows:
            placement = replace(placement, num_rows=clusters)  # surrogate trains on one rank only
        self.tree: LabelTree | None = None
        if settings.levels:
            counts = [num_clusters(num_labels, cluster_size) for cluster_size in settings.levels]
            self.tree = LabelTree(counts, encoder.width, settings.dropout)
        if self.heads != "clf":
            layers = [nn.Linear(encoder.width, settings.dim), nn.Tanh()] if settings.projection else [nn.Identity()]
            self.head_de = nn.Sequential(*layers, nn.Dropout(settings.dropout))
            if settings.auxiliary:
                self.auxiliary = nn.Parameter(torch.zeros(clusters, settings.dim))
        if self.heads != "de":
            layer = nn.Linear(encoder.width, settings.dim) if settings.projection else nn.Identity()
            self.head_clf = nn.Sequential(layer, nn.Dropout(settings.dropout))
            rows = clusters if settings.surrogate else num_labels
            self.table = RowTable(rows, settings.dim, DTYPES[settings.clf_dtype], placement)
            self.bias = RowTable(rows, 1, torch.float32, placement) if settings.clf_bias else None
            self.gates = nn.Parameter(torch.zeros(2 * settings.dim)) if settings.clf_gates else None
            if settings.clf_graph or settings.clf_queries:
                self.related_gate = nn.Parameter(torch.full((settings.dim,), float(settings.clf_queries > 0)))
        self.log_scale = nn.Parameter(
            torch.full((2,), -float(np.log(settings.temperature))), requires_grad=settings.learn_temperature
        )
        self.label_input: LabelInput | None = None
        self.related_input: LabelInput | None = None
        self.related_LN: csr_matrix | None = None
        # set by `create` and `load`
        self.config_folder: Path | None = None
        self.tokenizer_folder: Path = Path()
        self.max_length: int = 0
        self.params: dict[str, Any] = {}

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
    ) -> UniDEC:
        """A new model on a pretrained transformer; the caller seeds torch's random numbers.

        Args:
            folder: from `resolve_encoder`; a bag alone uses the transformer's token embeddings and tokenizer only.
            num_tokens: size of the tokenizer's vocabulary.
            params: all parameters, saved with the model.
        """
        transformer = load_transformer(folder)
        start_VD = transformer.get_input_embeddings().weight.detach()  # type: ignore[operator]
        num_tokens = max(num_tokens, start_VD.shape[0])
        encoder = TextEncoder(
            encoder_settings, transformer if encoder_settings.has_transformer else None, num_tokens, start_VD.shape[1]
        )
        if encoder.bag is not None:
            with torch.no_grad():
                encoder.bag.embedding.weight[: start_VD.shape[0]].copy_(start_VD)
                if encoder.bag.num_words:
                    encoder.bag.continues.copy_(torch.from_numpy(continuing_pieces(folder, encoder.bag.num_tokens)))
        model = cls(encoder_settings, settings, num_labels, encoder, placement)
        model.config_folder = model.tokenizer_folder = folder
        model.max_length, model.params = int(params["tokens"]["max_length"]), params
        if model.head_clf is not None and settings.projection:
            nn.init.orthogonal_(model.head_clf[0].get_parameter("weight"))  # keeps the angles of the encoder's space
        if encoder_settings.start:
            take_start(model, encoder_settings.start)
        return model

    @torch.no_grad()
    def start_table(self, label_input: LabelInput | None = None) -> None:
        """Initialise Psi as `model.clf_init` says: from label embeddings, by Xavier, or from N(0, 0.02) (Renee).

        Label embeddings are texts through the classifier head, scaled to unit length. If the encoder's vectors have no
        unit length (a transformer that trains alone), they are scaled to the inverse of their length, so that scores
        start as cosines: unit rows would give logits of several tens, and a softmax without a gradient. The free
        vectors of a residual classifier start at 0.

        Works in blocks, so that no second table is in memory. Random rows are drawn for all labels from the default
        generator of the model's device: they are the same wherever the table lives and whichever rows are held here.

        Args:
            label_input: needed for "label_embedding" only: returns encoder outputs [n, W] of label rows.
        """
        if self.table is None or self.head_clf is None or self.settings.clf_residual:
            return
        first, last = self.table.first_row, self.table.first_row + self.table.own_rows
        embeds = self.settings.clf_init == "label_embedding"
        stop = last if embeds else self.table.num_rows
        for start in range(first if embeds else 0, stop, START_BLOCK):
            end = min(start + START_BLOCK, stop)
            if embeds:
                assert label_input is not None
                x_BW = label_input(np.arange(start, end))
                rows_BD = self._text_rows(x_BW)
                if not self.encoder.unit_vectors:
                    rows_BD = rows_BD / self.head_clf[0](x_BW).norm(dim=-1, keepdim=True).clamp_min(1.0)
            else:
                rows_BD = self._random_rows(end - start)
            begin, until = max(start, first), min(end, last)
            if begin < until:
                self.table.weight[begin - first : until - first] = rows_BD[begin - start : until - start]

    def _random_rows(self, count: int) -> Tensor:
        """Random rows float32 [count, D], by Xavier or from N(0, 0.02)."""
        rows_BD = torch.empty(count, self.settings.dim, device=self.device)
        if self.settings.clf_init == "normal":
            return rows_BD.normal_(std=0.02)
        rows = self.table.num_rows if self.table is not None else count
        bound = math.sqrt(3.0) * math.sqrt(2.0 / (rows + self.settings.dim))  # Xavier's, for the whole table
        return rows_BD.uniform_(-bound, bound)

    def text_rows(self, x_SW: Tensor) -> Tensor:
        """The text part of a residual classifier's rows: Phi_C of labels' texts, scaled to unit length, float32 [S, D].

        Args:
            x_SW: encoder outputs of the texts; in training the head's dropout applies, as for queries.
        """
        return F.normalize(self.clf(x_SW), dim=-1)

    def residual_rows(self, text_SD: Tensor, free_SD: Tensor, related_SD: Tensor | None) -> Tensor:
        """Rows of a residual classifier, [S, D]: text vector plus free vector, each times a gate per dimension with
        `clf_gates` (DECAF: Mittal et al. 2021), plus gated vectors of `related_texts` (ECLARE: Mittal et al. 2021;
        GraphSAGE: Hamilton et al. 2017, whose aggregators are matrices instead of gates).

        The first two gates are 2 sigmoid(g), and g starts at 0 (the paper: sigmoid(g)). The third gate starts at 0 (the
        paper: a softmax over the parts), with `clf_queries` at 1. So a row starts as a plain sum.
        """
        if self.gates is not None:
            text_gate_D, free_gate_D = (2 * torch.sigmoid(self.gates)).chunk(2)
            text_SD, free_SD = text_gate_D * text_SD, free_gate_D * free_SD
        row_SD = free_SD + text_SD
        if related_SD is not None and self.related_gate is not None:
            row_SD = row_SD + self.related_gate * related_SD
        return row_SD

    def _text_rows(self, x_BW: Tensor) -> Tensor:
        """`text_rows` without dropout, of the head's dtype."""
        assert self.head_clf is not None
        return F.normalize(self.head_clf[0](x_BW), dim=-1)

    def de(self, x_BW: Tensor, labels_S: Tensor | None = None) -> Tensor:
        """Phi_D, float32 [B, D], of unit length unless `normalize` is off.

        Args:
            x_BW: encoder outputs.
            labels_S: int64, the labels whose texts are the last S rows of `x_BW`; with `auxiliary` the vectors of their
                clusters are added.
        """
        assert self.head_de is not None
        de_BD = self.head_de(x_BW).float()
        if labels_S is not None and self.auxiliary is not None and self.label_cluster is not None:
            num_queries = len(de_BD) - len(labels_S)
            vector_SD = F.embedding(self.label_cluster[labels_S], self.auxiliary)
            de_BD = torch.cat([de_BD[:num_queries], de_BD[num_queries:] + vector_SD])
        return F.normalize(de_BD, dim=-1) if self.settings.normalize else de_BD

    def clf(self, x_BW: Tensor) -> Tensor:
        """Phi_C, float32 [B, D]."""
        assert self.head_clf is not None
        return self.head_clf(x_BW).float()

    def tables(self) -> dict[str, RowTable]:
        """All row tables by name."""
        return {name: module for name, module in self.named_modules() if isinstance(module, RowTable)}

    @property
    def device(self) -> torch.device:
        return self.log_scale.device

    @torch.no_grad()
    def encode(
        self, name: str, tokens: Tokens, rows: np.ndarray | None = None, build: InputBuilder | None = None,
        batch_size: int = 1024, bar: Progress[Any] | None = None,
    ) -> np.ndarray:  # fmt: skip
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
        self, name: str, tokens: Tokens, rows: np.ndarray, build: InputBuilder | None, batch_size: int,
        bar: Progress[Any] | None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yields the encoder's outputs of each batch, float32 on the device."""
        build = build or InputBuilder(self.encoder, self.device)
        for start in range(0, len(rows), batch_size):
            batch = build([(name, tokens, rows[start : start + batch_size])])
            yield self.encoder(batch).float()
            if bar is not None:
                bar.update(batch.num_texts)

    @torch.no_grad()
    def vectors(
        self, name: str, tokens: Tokens, rows: np.ndarray | None = None, build: InputBuilder | None = None,
        batch_size: int = 1024, desc: str | None = None, only: Literal["de", "clf"] | None = None,
    ) -> tuple[np.ndarray | None, np.ndarray | None]:  # fmt: skip
        """(Phi_D, Phi_C) float32 [n, D] of texts; None for a head that the model does not have or `only` excludes.

        Encoder outputs are in memory for a block of texts at a time. Heads compute in float32 also under autocast, as
        in serving.

        Args:
            desc: title of a progress bar; None: no progress bar. The other arguments are those of `encode`.
            only: compute this head only.
        """
        rows = np.arange(len(tokens)) if rows is None else np.asarray(rows, dtype=np.int64)
        block = max(PROJECT_BLOCK // batch_size, 1) * batch_size
        heads = [key for key in ("de", "clf") if self.heads in ("both", key) and only in (None, key)]
        if not heads:
            return None, None
        out = {key: np.empty((len(rows), self.settings.dim), dtype=np.float32) for key in heads}
        was_training = self.training
        self.eval()
        with progress(total=len(rows), desc=desc, unit="text") if desc else contextlib.nullcontext() as bar:

            def projected() -> Iterator[Tensor]:
                for start in range(0, len(rows), block):
                    outputs = self._outputs(name, tokens, rows[start : start + block], build, batch_size, bar)
                    x_BW = torch.cat(list(outputs))
                    labels = to_device(rows[start : start + block], self.device) if name == "labels" else None
                    with torch.autocast(self.device.type, enabled=False):
                        vectors = [self.de(x_BW, labels) if key == "de" else self.clf(x_BW) for key in heads]
                        heads_BD = torch.cat(vectors, dim=-1)
                    yield heads_BD

            for start, heads_BD in zip(range(0, len(rows), block), all_to_host(projected()), strict=True):
                for key, vectors_BD in zip(heads, np.split(heads_BD, len(heads), axis=1), strict=True):
                    out[key][start : start + block] = vectors_BD
        self.train(was_training)
        return out.get("de"), out.get("clf")

    def encode_queries(
        self, tokens: Tokens, rows: np.ndarray | None = None, build: InputBuilder | None = None, batch_size: int = 1024
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Phi_D, Phi_C) float32 [n, D] of query texts; None for a head that the model does not have."""
        return self.vectors("queries", tokens, rows, build, batch_size)

    def encode_labels(
        self, tokens: Tokens, build: InputBuilder | None = None, batch_size: int = 1024
    ) -> np.ndarray | None:
        """Phi_D of label texts, float32 [L, D]; None without a dual-encoder head."""
        return self.vectors("labels", tokens, None, build, batch_size, only="de")[0]

    def classifier_table(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """(Psi float32 [L, D], bias float32 [L]) of the rows held here; None for what the model does not have.

        Rows of a residual classifier are complete: text and free vector. With `surrogate` each label has the row of its
        cluster.
        """
        weight = None if self.table is None else self.table.numpy()
        if weight is not None and self.settings.clf_residual:
            weight = self._complete_rows(weight)
        bias = None if self.bias is None else self.bias.numpy()[:, 0]
        if weight is not None and self.settings.surrogate and self.label_cluster is not None:
            cluster_L = self.label_cluster.cpu().numpy()
            weight, bias = weight[cluster_L], None if bias is None else bias[cluster_L]
        return weight, bias

    @torch.no_grad()
    def _complete_rows(self, free_LD: np.ndarray) -> np.ndarray:
        """Rows of a residual classifier, given its free vectors, float32 [n, D]."""
        assert self.table is not None and self.label_input is not None, "a residual classifier needs its labels' texts"
        first, rows_LD, text_ND = self.table.first_row, np.empty_like(free_LD), None
        label_input, related_input = self.label_input, self.related_input or self.label_input
        if self.related_LN is not None:  # vectors of all N texts: any of them may be related to a label
            num_texts = self.related_LN.shape[1]
            blocks = (range(at, min(at + START_BLOCK, num_texts)) for at in range(0, num_texts, START_BLOCK))
            text_ND = torch.cat([self._text_part(block, related_input).cpu() for block in blocks]).numpy()
        for begin in range(0, len(free_LD), START_BLOCK):
            end, related_BD = min(begin + START_BLOCK, len(free_LD)), None
            if self.related_LN is not None:
                sums_BD = (self.related_LN[first + begin : first + end] @ text_ND).astype(np.float32)
                related_BD = F.normalize(torch.from_numpy(sums_BD).to(self.device), dim=-1)
            text_BD = self._text_part(range(first + begin, first + end), label_input)
            free_BD = torch.from_numpy(free_LD[begin:end]).to(self.device)
            rows_LD[begin:end] = self.residual_rows(text_BD, free_BD, related_BD).cpu().numpy()
        return rows_LD

    def _text_part(self, block: range, text_input: LabelInput) -> Tensor:
        """The text part of rows without dropout, float32 [n, D], for a block of the texts that `text_input` encodes."""
        return self._text_rows(text_input(np.arange(block.start, block.stop)).to(self.device)).float()

    def dense_state(self) -> dict[str, Tensor]:
        """The state dict without the tables' weights."""
        tables = {f"{name}.weight" for name in self.tables()}
        return {name: value for name, value in self.state_dict().items() if name not in tables}

    def load_dense_state(self, tensors: dict[str, Tensor]) -> None:
        """Copy the tensors of a `dense_state` into this model. Raises RuntimeError: names or shapes differ."""

        def read(name: str, *rows: int | None) -> Tensor:
            return tensors[name] if rows[0] is None else tensors[name][slice(*rows)]

        copy_into(self.dense_state(), {name: tuple(value.shape) for name, value in tensors.items()}, read)

    def save_into(self, folder: Folder, extra: dict[str, Any] | None = None) -> None:
        """Write weights, configuration and tokenizer into a folder that `storage.write_folder` opened.

        A residual classifier, or one of clusters, is saved as an ordinary one, which needs memory for a second table. A
        label tree is not saved, since only training uses it.

        Args:
            extra: further entries of config.json.
        """
        assert self.config_folder is not None
        state, settings = self.state_dict(), self.settings
        rows_LD, bias_L = self.classifier_table() if settings.clf_residual or settings.surrogate else (None, None)
        if rows_LD is not None:
            state["table.weight"] = torch.from_numpy(rows_LD).to(DTYPES[settings.clf_dtype])
            if bias_L is not None:
                state["bias.weight"] = torch.from_numpy(bias_L)[:, None]
        if rows_LD is not None or settings.levels:
            plain = {"clf_residual": False, "clf_gates": False, "clf_graph": False, "clf_queries": 0, "surrogate": 0}
            settings = settings.model_copy(update=plain | {"levels": []})
            parts = ("gates", "related_gate", "tree", *(() if settings.auxiliary else ("label_cluster",)))
            state = {name: tensor for name, tensor in state.items() if name.split(".")[0] not in parts}
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
            "encoder": self.encoder_settings.model_dump(), "model": settings.model_dump(),
            "num_labels": self.num_labels, "max_length": self.max_length, "params": self.params,
            "unit_vectors": self.encoder.unit_vectors,
            "num_tokens": bag.num_tokens if bag else 0,
            "encoder_width": self.encoder.part_width,
        } | (extra or {})  # fmt: skip
        (folder.path / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu", verify: bool = True, rows: bool = True) -> UniDEC:
        """A model from its folder, ready to encode.

        Args:
            verify: check the hashes of the files.
            rows: also load the classifier's rows and biases and the auxiliary vectors; otherwise these are None, and
                the file need not have them (a bundle stores label vectors outside the model).

        Raises:
            ArtifactError: missing, damaged, of a newer version, or weights that do not fit the configuration.
        """
        path = Path(path)
        read_manifest(path, KIND, VERSION, verify=verify)
        config = ModelConfig.read(path)
        try:
            transformer = empty_transformer(config.config_folder) if config.encoder.has_transformer else None
            encoder = TextEncoder(config.encoder, transformer, config.num_tokens, config.width)
            placement = HERE if rows else Placement(num_rows=0)
            model = cls(config.encoder, config.settings, config.num_labels, encoder, placement)
            if not rows:
                model.table = model.bias = model.auxiliary = model.label_cluster = None
            model.encoder.unit_vectors = config.unit_vectors
            with open_tensors(path / WEIGHTS) as file:
                names = [name for name in file.names if rows or name not in BY_LABEL]
                copy_into(model.state_dict(), {name: file.shape(name) for name in names}, file.read)
        except (KeyError, ValueError, TypeError, RuntimeError, OSError, ConfigError, ArtifactError) as error:
            raise misfit(path, error) from error
        model.max_length, model.params = config.max_length, config.params
        model.config_folder, model.tokenizer_folder = config.config_folder, config.tokenizer_folder
        return model.to(device).eval()


def related_texts(text_ND: Tensor, row_E: Tensor, col_E: Tensor, weight_E: Tensor, *, num_labels: int) -> Tensor:
    """For each label the weighted sum of its related texts' vectors, scaled to unit length (0 without any), [S, D].

    Args:
        text_ND: vectors of texts.
        row_E, col_E: int64 [E], positions of a label and of a text that is related to it; weight_E: how much it is.
        num_labels: S.
    """
    weighted_ED = rows_at(text_ND, col_E) * weight_E.unsqueeze(1)
    sums_SD = text_ND.new_zeros(num_labels, text_ND.shape[1]).index_add(0, row_E, weighted_ED)
    return F.normalize(sums_SD, dim=-1)
