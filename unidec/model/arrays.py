"""A trained model's encoder and heads as numpy arrays, of a model in memory or read from its folder without torch.

torch and the library transformers take seconds to import and hundreds of MB; what answers queries by other means needs
neither.

Legend: V tokens of the vocabulary, D width of a part of the encoder, W width of all parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unidec.errors import ArtifactError
from unidec.model.transformer_parts import Linear, TransformerParts, UnsupportedModel, transformer_parts
from unidec.sections import Encoder, Model

KIND, VERSION = "model", 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
CLASSIFIER = ("table.weight", "bias.weight")  # rows and biases, in a model's file
Floats = NDArray[np.float32]
_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "I64": np.int64, "BOOL": np.bool_}
_TRANSFORMER = "encoder.transformer.transformer."


@dataclass(frozen=True)
class ModelConfig:
    """config.json of a trained model's folder.

    Attributes:
        encoder, settings: sections `encoder` and `model` as it was trained with.
        num_labels: L. max_length: tokens of a text. params: all parameters.
        unit_vectors: the transformer's vectors are brought to unit length.
        num_tokens: V of the bag, 0 without one. width: D.
    """

    folder: Path
    encoder: Encoder
    settings: Model
    num_labels: int
    max_length: int
    params: dict[str, Any]
    unit_vectors: bool
    num_tokens: int
    width: int

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Raises ArtifactError where it is missing or not as it must be."""
        try:
            found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            encoder = Encoder(**found["encoder"])
            unit = bool(found.get("unit_vectors", encoder.unit_vectors))  # older versions did not write it
            return cls(
                folder, encoder, Model(**found["model"]), int(found["num_labels"]), int(found["max_length"]),
                found["params"], unit, int(found["num_tokens"]), int(found["encoder_width"]),
            )  # fmt: skip
        except (KeyError, ValueError, TypeError, AttributeError, OSError) as error:
            raise misfit(folder, error) from error

    @property
    def heads(self) -> str:
        """ "both", "de" or "clf"."""
        return self.settings.heads

    @property
    def config_folder(self) -> Path:
        """Of the transformer's config.json."""
        return self.folder / "encoder_config"

    @property
    def tokenizer_folder(self) -> Path:
        """Of tokenizer.json."""
        return self.folder / "tokenizer"


@dataclass(frozen=True)
class Bag:
    """`model.encoder.BagEncoder`: embedding_VD float32, weight_V float32 (not its logarithm), head, num_words,
    continues_V bool (None without whole words)."""

    embedding_VD: Floats
    weight_V: Floats
    head: int
    num_words: int
    continues_V: NDArray[np.bool_] | None


@dataclass(frozen=True)
class ModelArrays:
    """Encoder and heads.

    Attributes:
        encoder: its section. unit_vectors: as in `ModelConfig`. width: D.
        transformer_config: of the library transformers; None without a transformer.
        arrays: by the names of the model's file.
        tokenizer_folder, max_length: how texts become tokens.
    """

    encoder: Encoder
    unit_vectors: bool
    width: int
    transformer_config: Mapping[str, Any] | None
    arrays: Mapping[str, NDArray[Any]]
    tokenizer_folder: Path
    max_length: int

    @classmethod
    def of(cls, model: Any) -> ModelArrays:
        """Of `UniDEC` on the CPU (views of its weights), or mapped from the folder of a `ModelConfig`.

        Raises:
            UnsupportedModel: another model, on another device, or weights of a type that numpy has not.
            ArtifactError: a folder whose weights are missing, damaged, or do not fit its configuration.
        """
        if isinstance(model, ModelConfig):
            return cls._read(model)
        settings = getattr(model, "encoder_settings", None)
        if not isinstance(settings, Encoder) or model.device.type != "cpu":
            raise UnsupportedModel("this model is not encoded without torch", got=type(model).__name__)
        state = {name: value.detach() for name, value in model.state_dict().items() if name not in CLASSIFIER}
        arrays = {
            name: (value.float() if value.is_floating_point() else value).numpy() for name, value in state.items()
        }
        inside = model.encoder.transformer
        config = None if inside is None else inside.transformer.config.to_dict()
        return cls(
            settings, model.encoder.unit_vectors, model.encoder.part_width, config, arrays, model.tokenizer_folder,
            model.max_length,
        )  # fmt: skip

    @classmethod
    def _read(cls, about: ModelConfig) -> ModelArrays:
        from safetensors import SafetensorError

        folder, config = about.folder, None
        try:
            arrays = _mapped(folder / WEIGHTS)
            if about.encoder.kind != "bag":
                config = json.loads((about.config_folder / CONFIG).read_text(encoding="utf-8"))
        except (SafetensorError, OSError, ValueError) as error:
            raise misfit(folder, error) from error
        found = cls(
            about.encoder, about.unit_vectors, about.width, config, arrays, about.tokenizer_folder, about.max_length
        )
        try:
            found._check(about)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise misfit(folder, error) from error
        return found

    @functools.cached_property
    def transformer(self) -> TransformerParts | None:
        """The transformer's weights; None without one.

        Raises:
            UnsupportedModel: an architecture that is not known there.
        """
        if self.transformer_config is None:
            return None
        inside = (name for name in self.arrays if name.startswith(_TRANSFORMER))
        state = {name.removeprefix(_TRANSFORMER): self.arrays[name] for name in inside}
        return transformer_parts(self.transformer_config, state)

    def bag(self) -> Bag | None:
        """The bag's weights; None without one."""
        if self.encoder.kind == "transformer":
            return None
        weight_V = np.exp(self.arrays["encoder.bag.log_weight.weight"][:, 0])
        continues_V = self.arrays["encoder.bag.continues"] if self.encoder.bag_words else None
        embedding_VD = self.arrays["encoder.bag.embedding.weight"]
        return Bag(embedding_VD, weight_V, self.encoder.bag_head, self.encoder.bag_words, continues_V)

    def residual(self) -> tuple[Linear, Linear] | None:
        """The residual network's two layers; None without one."""
        if not self.encoder.residual:
            return None
        return self._linear("encoder.residual.0"), self._linear("encoder.residual.3")

    def heads(self) -> dict[str, Linear]:
        """The heads there are: "de", "clf"."""
        return {
            head: self._linear(f"head_{head}.0") for head in ("de", "clf") if f"head_{head}.0.weight" in self.arrays
        }

    def _linear(self, name: str) -> Linear:
        return Linear(self.arrays[f"{name}.weight"].T, self.arrays[f"{name}.bias"])

    def _check(self, about: ModelConfig) -> None:
        """Shapes against the configuration: all but the transformer's, which are checked where they are taken apart.

        Raises:
            KeyError, ValueError: they do not fit.
        """
        kind, dim = about.encoder.kind, about.settings.dim
        parts = (kind != "bag") + (0 if kind == "transformer" else 2 if about.encoder.bag_head else 1)
        width = parts * self.width
        shapes: dict[str, tuple[int, ...]] = {}
        for head in ("de", "clf"):
            if about.heads in ("both", head):
                shapes |= {f"head_{head}.0.weight": (dim, width), f"head_{head}.0.bias": (dim,)}
        for layer in (0, 3) if about.encoder.residual else ():
            shapes |= {f"encoder.residual.{layer}.weight": (width, width), f"encoder.residual.{layer}.bias": (width,)}
        if kind != "transformer":
            rows = about.num_tokens + about.encoder.bag_words
            shapes |= {"encoder.bag.embedding.weight": (rows, self.width), "encoder.bag.log_weight.weight": (rows, 1)}
            if about.encoder.bag_words:
                shapes["encoder.bag.continues"] = (about.num_tokens,)
        for name, shape in shapes.items():
            if self.arrays[name].shape != shape:
                raise ValueError(f"{name}: shape {list(self.arrays[name].shape)} instead of {list(shape)}")
        transformer = self.transformer
        if transformer is not None and transformer.words_VD.shape[1] != self.width:
            raise ValueError(f"a transformer of width {transformer.words_VD.shape[1]} instead of {self.width}")


def _mapped(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file by name, without the classifier's, mapped into memory: nothing is copied, and
    nothing holds up a server that loads another model beside the one that answers. 16 bits become float32.

    Raises:
        SafetensorError, OSError, ValueError: missing or damaged. UnsupportedModel: numbers that numpy has not.
    """
    from safetensors import safe_open

    # the library checks the header: types, and that the bytes are all there, each once
    with safe_open(str(path), framework="numpy") as file:
        names = sorted(set(file.keys()) - set(CLASSIFIER))
    byte_N = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    begin = 8 + int.from_bytes(byte_N[:8].tobytes(), "little")
    header, found = json.loads(byte_N[8:begin].tobytes()), {}
    for name in names:
        entry = header[name]
        if (dtype := _DTYPES.get(entry["dtype"])) is None:
            raise UnsupportedModel("weights of a type that numpy has not", where=name, got=entry["dtype"])
        first, last = entry["data_offsets"]
        array = byte_N[begin + first : begin + last].view(dtype).reshape(entry["shape"])
        found[name] = array.astype(np.float32) if entry["dtype"] == "F16" else array
    return found


def misfit(folder: Path, error: Exception) -> ArtifactError:
    """Weights and configuration of a model's folder that do not fit together."""
    return ArtifactError(
        "weights and configuration of the model do not fit together", where=str(folder), got=str(error)[:300]
    )
