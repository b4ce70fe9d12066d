"""Reads a trained model's folder without torch: its configuration, and all weights except the
transformer's.

torch and transformers take seconds to import and hundreds of MB; serving with onnxruntime and numpy
needs neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from unidec.config import Encoder, Model
from unidec.data.storage import read_json
from unidec.errors import ArtifactError
from unidec.model.encoder_folder import DenseLayer

KIND = "model"
VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# the transformer of a bundle's model (`onnx_export`)
GRAPH = "encoder.onnx"
INT8_GRAPH = "encoder-int8.onnx"
MAX_BYTES = (1 << 31) - (1 << 20)  # of a graph: protobuf's limit, with a margin
# names of the classifier's rows and biases in `WEIGHTS`
CLASSIFIER = ("table.weight", "bias.weight")
# tensors that depend on the labels of the training data: a bundle's model does not contain them
BY_LABEL = (*CLASSIFIER, "auxiliary", "label_cluster")
_TRANSFORMER = "encoder.transformer."
_OLD = {"pooling": "mean", "query_prompt": "", "label_prompt": ""}  # of versions without the keys


class ModelConfig(BaseModel):
    """config.json of a trained model's folder.

    Attributes:
        encoder, settings: sections `encoder` and `model` that the model was trained with; no key
            of the encoder is "auto".
        max_length: maximum tokens of a text.
        params: all parameters of the training.
        unit_vectors: whether the transformer's vectors are scaled to unit length.
        num_tokens: size of the bag's vocabulary, 0 without a bag.
        width: width of the token embeddings.
        dense: layers after the transformer's pooling. transformer_width: width of its vectors.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    encoder: Encoder
    settings: Model = Field(validation_alias="model")
    num_labels: int
    max_length: int
    params: dict[str, Any]
    unit_vectors: bool
    num_tokens: int
    width: int = Field(validation_alias="encoder_width")
    dense: tuple[DenseLayer, ...] = ()
    transformer_width: int

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read config.json. Raises ArtifactError: missing or invalid."""
        try:
            stored = read_json(folder / CONFIG)
            config = {"transformer_width": stored["encoder_width"]} | stored
            config |= {"folder": folder, "encoder": _OLD | stored["encoder"]}
            return cls.model_validate(config)
        except (KeyError, ValueError, TypeError, OSError) as error:
            raise misfit(folder, error) from error

    @property
    def heads(self) -> str:
        """ "both", "de" or "clf"."""
        return self.settings.heads

    @property
    def config_folder(self) -> Path:
        """Folder of the transformer's config.json."""
        return self.folder / "encoder_config"

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of tokenizer.json."""
        return self.folder / "tokenizer"


def heads_of(space: str) -> tuple[str, ...]:
    """The heads of a model or a space: "de" and "clf" of "both", otherwise itself."""
    return ("de", "clf") if space == "both" else (space,)


def read_arrays(folder: Path) -> dict[str, NDArray[Any]]:
    """Weights of the bag, the residual network and the heads by name, float32.

    Raises:
        ArtifactError: the file is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(folder / WEIGHTS), framework="numpy") as file:
            stored = list(file.keys())
            own = [name for name in stored if not name.startswith(_TRANSFORMER)]
            return {name: file.get_tensor(name) for name in own if name not in BY_LABEL}
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise misfit(folder, error) from error


def misfit(folder: Path, error: Exception) -> ArtifactError:
    """The error for a model's folder whose weights and configuration do not fit together."""
    what = "weights and configuration of the model do not fit together"
    fix = "restore the folder, or write it again: unidec train, or unidec index build for a bundle"
    return ArtifactError(what, where=str(folder), got=str(error)[:300], fix=fix)
