"""Copies weights from a file into a model: all of them, or encoder and heads of the earlier model
from which a new one starts.

Legend: W width of the encoder, D width of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.config import Encoder
from unidec.data.chunks import blocks
from unidec.data.storage import MANIFEST, file_sha256, read_json, read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import KIND, VERSION, WEIGHTS, ModelConfig
from unidec.model.encoder_folder import read_encoder_folder

if TYPE_CHECKING:
    from torch import Tensor

    from unidec.data.tensor_file import TensorFile

COPY_BLOCK = 1 << 17  # rows copied at once
# keys of a transformer's config.json that do not affect its outputs
_NOTES = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}

# keys of section `encoder` that say where weights come from and how they train, but do not affect
# outputs otherwise
_TRAINING = {"name", "start", "frozen", "trainable_layers", "dropout", "bag_dropout", "lora"}
_FIX = (
    "set section encoder, model.dim and model.projection as the start was trained with; its "
    "config.json has them"
)


def copy_into(targets: Mapping[str, Tensor], file: TensorFile, sources: Mapping[str, str]) -> None:
    """Copy tensors of a file into `targets`, a block of rows at a time.

    Args:
        sources: for each name in `targets` the name in the file.

    Raises:
        RuntimeError: names or shapes differ from those of `targets`.
    """
    for what, names in (
        ("missing", targets.keys() - sources.keys()),
        ("unknown", sources.keys() - targets.keys()),
    ):
        if names:
            raise RuntimeError(f"{what}: {', '.join(sorted(names))}")
    for name, tensor in targets.items():
        source = sources[name]
        shape = file.shape(source)
        if shape != tuple(tensor.shape):
            raise RuntimeError(f"{name}: shape {list(shape)} instead of {list(tensor.shape)}")
        if tensor.dim() == 0:
            tensor.copy_(file.read(source))
            continue
        for some in blocks(len(tensor), COPY_BLOCK):
            tensor[some].copy_(file.read(source, some.start, some.stop))


def output_settings(settings: Encoder) -> dict[str, Any]:
    """Settings that, besides the weights, decide an encoder's outputs: all but `_TRAINING`."""
    return settings.model_dump(exclude=_TRAINING)


def start_sha256(folder: str | Path) -> str:
    """sha256 of an exported model's manifest. Raises ArtifactError: there is no such model."""
    read_manifest(folder, KIND, VERSION, verify=False)
    return file_sha256(Path(folder) / MANIFEST)


def start_differences(
    settings: Encoder, transformer: Path, tokenizer: Path, folder: str | Path
) -> list[str]:
    """Names of the settings in which an exported model's encoder (in `folder`) differs from section
    `encoder`; empty if it fits.

    Args:
        transformer, tokenizer: folders of the new model's config.json and tokenizer.json.

    Raises:
        ArtifactError: one of the files is not readable.
    """
    start = ModelConfig.read(Path(folder))
    differing = []
    if _json(tokenizer / "tokenizer.json") != _json(start.tokenizer_folder / "tokenizer.json"):
        differing.append("tokenizer")
    start_settings = output_settings(start.encoder)
    for key, value in output_settings(settings).items():
        # the start may lack the residual network
        if key != "residual" and value != start_settings[key]:
            differing.append(f"encoder.{key}")
    if settings.has_transformer:
        if read_encoder_folder(transformer).dense != start.dense:
            differing.append("layers behind the pooling")
        own = _json(transformer / "config.json")
        others = _json(start.config_folder / "config.json")
        keys = sorted((own.keys() | others.keys()) - _NOTES)
        differing += [key for key in keys if own.get(key) != others.get(key)]
    return differing


def take_start(
    model: Any, folder: str | Path, *, where: str = "encoder.start", fix: str = _FIX
) -> None:
    """Copy the encoder and heads of an exported model (of `encoder.start`, or of a warm start) into
    a new model.

    The encoders must be the same, except that the start may lack the residual network, which then
    stays the identity. A head that the start lacks gets the linear layer of the start's other head:
    a classifier after a dual encoder alone (NGAME's second stage) starts in the learnt space.
    Table, bias and temperatures are not copied.

    Args:
        model: a `UniDEC` whose `tokenizer_folder` and `config_folder` are set.
        where, fix: fields of the errors.

    Raises:
        ArtifactError: the folder has no exported model, or a damaged one.
        ConfigError: its encoder or one of its heads differs.
    """
    import torch

    from unidec.data.tensor_file import open_tensors

    folder = Path(folder)
    read_manifest(folder, KIND, VERSION)
    start = ModelConfig.read(folder)
    differing = start_differences(
        model.encoder_settings, model.config_folder, model.tokenizer_folder, folder
    )
    if start.settings.projection != model.settings.projection:
        differing.append("model.projection")
    if differing:
        raise ConfigError(
            "the encoder of the model to start from differs from this model's",
            where=where,
            got=f"{folder}: differs in {', '.join(differing[:5])}",
            fix=fix,
        )
    model.encoder.unit_vectors = start.unit_vectors
    state = model.state_dict()
    with torch.no_grad(), open_tensors(folder / WEIGHTS) as file:
        sources = _start_sources(state, file.names)
        targets = {name: state[name] for name in state if name in sources}
        stored = {name: source for name, source in sources.items() if source in file.names}
        try:
            copy_into(targets, file, stored)
        except RuntimeError as error:
            raise ConfigError(
                "the model to start from has an encoder or heads of other shapes",
                where=where,
                got=f"{folder}: {error}"[:300],
                fix=fix,
            ) from error


# the head as which a head begins that the start lacks
_OTHER_HEADS = {"head_de": "head_clf", "head_clf": "head_de", "head_query": "head_de"}


def _start_sources(state: Collection[str], start: Collection[str]) -> dict[str, str]:
    """For the name of each weight of encoder and heads, in a new model or in the start alone: the
    name of the start's weight that is copied to it.
    """
    sources = {name: name for name in [*state, *start] if name.startswith("encoder.")}
    residual = "encoder.residual."
    if not any(name.startswith(residual) for name in start):
        sources = {name: name for name in sources if not name.startswith(residual)}
    for head, other in _OTHER_HEADS.items():
        source = head if f"{head}.0.weight" in start else other
        for parameter in ("weight", "bias"):
            own = f"{head}.0.{parameter}"
            name = f"{source}.0.{parameter}"
            if own in state:
                sources[own] = sources.get(name, name)
    return sources


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(
            "the model to start from cannot be read",
            where=path,
            got=str(error)[:200],
            fix="restore it, or name another one",
        ) from error
