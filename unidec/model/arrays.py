"""A trained model's folder, read without torch: its configuration, and the weights of all but the transformer.

torch and the library transformers take seconds to import and hundreds of MB; what answers queries by onnxruntime and
numpy needs neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unidec.errors import ArtifactError
from unidec.sections import Encoder, Model

KIND, VERSION = "model", 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
GRAPH, INT8_GRAPH = "encoder.onnx", "encoder-int8.onnx"  # the transformer's, in a bundle's model (`onnx_export`)
CLASSIFIER = ("table.weight", "bias.weight")  # rows and biases, in a model's file
BY_LABEL = (
    *CLASSIFIER,
    "auxiliary",
    "label_cluster",
)  # of a training's labels: no part of a bundle's model
_TRANSFORMER = "encoder.transformer."


@dataclass(frozen=True)
class ModelConfig:
    """config.json of a trained model's folder: sections `encoder` and `model` as it was trained with, L, tokens of a
    text, all parameters, whether the transformer's vectors have unit length, V of the bag (0 without one), D."""

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


def read_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """The weights of the bag, the residual network and the heads by name, float32.

    Raises:
        ArtifactError: missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / WEIGHTS), framework="numpy") as file:
            names = [name for name in file.keys() if not name.startswith(_TRANSFORMER) and name not in BY_LABEL]  # noqa: SIM118
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise misfit(folder, error) from error


def misfit(folder: Path, error: Exception) -> ArtifactError:
    """Weights and configuration of a model's folder that do not fit together."""
    return ArtifactError(
        "weights and configuration of the model do not fit together", where=str(folder), got=str(error)[:300]
    )
