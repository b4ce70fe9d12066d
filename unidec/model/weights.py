"""A model's weights from a file: all of another model's, or those that a new model starts from.

Legend: W width of the encoder, D width of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.data.storage import MANIFEST, file_sha256, read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import KIND, VERSION, WEIGHTS
from unidec.sections import Encoder, Model

if TYPE_CHECKING:
    from torch import Tensor

COPY_BLOCK = 1 << 17  # rows copied at once
# keys of a transformer's config.json that do not change what it computes
_NOTES = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}

# of section `encoder`: where the weights come from and how they train, not what they compute
_TRAINING = {"name", "start", "frozen", "trainable_layers", "dropout", "bag_dropout"}

Read = Callable[[str, int | None, int | None], "Tensor"]


def copy_into(own: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], read: Read) -> None:
    """Copy tensors of the same names and shapes into `own`, a block of rows at a time; `read` gives rows from begin to
    end of a tensor, or with None all of it. Raises RuntimeError: other names or shapes."""
    missing, unknown = own.keys() - shapes.keys(), shapes.keys() - own.keys()
    if missing or unknown:
        raise RuntimeError(f"missing: {', '.join(sorted(missing)) or 'nothing'}; "
                           f"unknown: {', '.join(sorted(unknown)) or 'nothing'}")  # fmt: skip
    for name, tensor in own.items():
        if shapes[name] != tuple(tensor.shape):
            raise RuntimeError(f"{name}: shape {list(shapes[name])} instead of {list(tensor.shape)}")
        if tensor.dim() == 0:
            tensor.copy_(read(name, None, None))
            continue
        for begin in range(0, len(tensor), COPY_BLOCK):
            end = min(begin + COPY_BLOCK, len(tensor))
            tensor[begin:end].copy_(read(name, begin, end))


def output_settings(settings: Encoder) -> dict[str, Any]:
    """What decides an encoder's outputs beside its weights: all keys but those that say how it trains."""
    return settings.model_dump(exclude=_TRAINING)


def start_sha256(folder: str | Path) -> str:
    """Hash of an exported model: of its manifest, which has those of its files. Raises ArtifactError: no such model."""
    read_manifest(folder, KIND, VERSION, verify=False)
    return file_sha256(Path(folder) / MANIFEST)


def start_differences(settings: Encoder, transformer: Path, tokenizer: Path, folder: str | Path) -> list[str]:
    """What makes an exported model's encoder (folder) another one than section `encoder` asks for; [] where it fits.

    `transformer` and `tokenizer` are the folders of config.json and tokenizer.json. Raises ArtifactError: one of the
    files is not readable.
    """
    folder = Path(folder)
    try:
        tokens_differ = _json(tokenizer / "tokenizer.json") != _json(folder / "tokenizer/tokenizer.json")
        configs = [_json(place / "config.json") for place in (transformer, folder / "encoder_config")]
        given = Encoder(**_json(folder / "config.json")["encoder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError("no readable model to start from", where=str(folder), got=str(error)[:200]) from error
    own, theirs = output_settings(settings), output_settings(given)
    differing = ["tokenizer"] if tokens_differ else []
    differing += [f"encoder.{key}" for key in own if key != "residual" and own[key] != theirs[key]]
    if settings.has_transformer:
        keys = sorted((configs[0].keys() | configs[1].keys()) - _NOTES)
        differing += [key for key in keys if configs[0].get(key) != configs[1].get(key)]
    return differing


def take_start(
    model: Any, folder: str | Path, *, where: str = "encoder.start",
    fix: str = "set section encoder and model.dim as the start was trained with; its config.json has them",
) -> None:  # fmt: skip
    """Give a new model the encoder and heads of an exported one (`encoder.start`, or a warm start's).

    The encoder must be the same, but for a residual network that the start does not have: it begins as the identity. A
    head that the start does not have begins as its other head's linear layer: a classifier that follows a dual encoder
    alone (NGAME's second stage) begins in the space that was learnt. Table, bias and temperatures are not taken.

    Args:
        model: a `UniDEC` whose `tokenizer_folder` and `config_folder` are set.
        where, fix: what an error names.

    Raises:
        ArtifactError: no exported model in the folder, or a damaged one.
        ConfigError: its encoder or a head is another one.
    """
    import torch

    from unidec.data.tensor_file import open_tensors

    folder = Path(folder)
    read_manifest(folder, KIND, VERSION)
    differing = start_differences(model.encoder_settings, model.config_folder, model.tokenizer_folder, folder)
    if differing:
        raise ConfigError(
            "the model to start from is on another transformer, or has another encoder", where=where,
            got=f"{folder}: another {', '.join(differing[:5])}", fix=fix,
        )  # fmt: skip
    config = _json(folder / "config.json")
    if Model(**config["model"]).projection != model.settings.projection:
        raise ConfigError(
            "the model to start from differs in whether its heads are layers over the encoder", where=where,
            got=str(folder), fix=f"model.projection: {str(not model.settings.projection).lower()}",
        )  # fmt: skip
    model.encoder.unit_vectors = bool(config.get("unit_vectors", Encoder(**config["encoder"]).unit_vectors))
    own = dict(model.state_dict())
    with torch.no_grad(), open_tensors(folder / WEIGHTS) as file:
        shapes = {name: file.shape(name) for name in file.names}
        sources = {name: name for name in [*own, *shapes] if name.startswith("encoder.")}
        if not any(name.startswith("encoder.residual.") for name in shapes):
            sources = {name: name for name in sources if not name.startswith("encoder.residual.")}
        for head, other in (("head_de", "head_clf"), ("head_clf", "head_de")):
            given = head if f"{head}.0.weight" in shapes else other
            sources |= {f"{head}.0.{x}": f"{given}.0.{x}" for x in ("weight", "bias") if f"{head}.0.{x}" in own}
        there = {name: shapes[source] for name, source in sources.items() if source in shapes}

        def read(name: str, *rows: Any) -> Tensor:
            return file.read(sources[name], *rows)

        try:
            copy_into({name: own[name] for name in sources if name in own}, there, read)
        except RuntimeError as error:
            raise ConfigError(
                "the model to start from has another encoder or another width of its heads", where=where,
                got=f"{folder}: {error}"[:300], fix=fix,
            ) from error  # fmt: skip


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
