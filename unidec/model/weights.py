"""Copies weights from a file into a model: all of them, or those of an earlier model that a new one
starts from.

Legend: W width of the encoder, D width of a head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unidec.config import Encoder, Model
from unidec.data.storage import MANIFEST, file_sha256, read_manifest
from unidec.errors import ArtifactError, ConfigError
from unidec.model.arrays import KIND, VERSION, WEIGHTS

if TYPE_CHECKING:
    from torch import Tensor

COPY_BLOCK = 1 << 17  # rows copied at once
# keys of a transformer's config.json that do not affect its outputs
_NOTES = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"}

# keys of section `encoder` that say where weights come from and how they train, but do not affect
# outputs otherwise
_TRAINING = {"name", "start", "frozen", "trainable_layers", "dropout", "bag_dropout"}

Read = Callable[[str, int | None, int | None], "Tensor"]


def copy_into(
    targets: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], read: Read
) -> None:
    """Copy tensors into `targets` by name, a block of rows at a time.

    Args:
        shapes: of the tensors to copy.
        read: returns a tensor's rows from begin to end, or with None the whole tensor.

    Raises:
        RuntimeError: names or shapes differ from those of `targets`.
    """
    missing = targets.keys() - shapes.keys()
    unknown = shapes.keys() - targets.keys()
    if missing or unknown:
        raise RuntimeError(
            f"missing: {', '.join(sorted(missing)) or 'nothing'}; "
            f"unknown: {', '.join(sorted(unknown)) or 'nothing'}"
        )
    for name, tensor in targets.items():
        if shapes[name] != tuple(tensor.shape):
            raise RuntimeError(
                f"{name}: shape {list(shapes[name])} instead of {list(tensor.shape)}"
            )
        if tensor.dim() == 0:
            tensor.copy_(read(name, None, None))
            continue
        for begin in range(0, len(tensor), COPY_BLOCK):
            end = min(begin + COPY_BLOCK, len(tensor))
            tensor[begin:end].copy_(read(name, begin, end))


def output_settings(settings: Encoder) -> dict[str, Any]:
    """The settings that, besides the weights, decide an encoder's outputs: all keys except
    `_TRAINING`.
    """
    return settings.model_dump(exclude=_TRAINING)


def start_sha256(folder: str | Path) -> str:
    """sha256 of an exported model's manifest, which contains the hashes of its files. Raises
    ArtifactError: there is no such model.
    """
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
    folder = Path(folder)
    try:
        tokens_differ = _json(tokenizer / "tokenizer.json") != _json(
            folder / "tokenizer/tokenizer.json"
        )
        configs = [
            _json(parent / "config.json") for parent in (transformer, folder / "encoder_config")
        ]
        start_settings = Encoder(**_json(folder / "config.json")["encoder"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = "the model to start from cannot be read"
        fix = "restore it, or name another one"
        raise ArtifactError(what, where=str(folder), got=str(error)[:200], fix=fix) from error
    new = output_settings(settings)
    start = output_settings(start_settings)
    differing = ["tokenizer"] if tokens_differ else []
    differing += [f"encoder.{key}" for key in new if key != "residual" and new[key] != start[key]]
    if settings.has_transformer:
        keys = sorted((configs[0].keys() | configs[1].keys()) - _NOTES)
        differing += [key for key in keys if configs[0].get(key) != configs[1].get(key)]
    return differing


def take_start(
    model: Any,
    folder: str | Path,
    *,
    where: str = "encoder.start",
    fix: str = (
        "set section encoder and model.dim as the start was trained with; its config.json has them"
    ),
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
    differing = start_differences(
        model.encoder_settings, model.config_folder, model.tokenizer_folder, folder
    )
    if differing:
        raise ConfigError(
            "the encoder of the model to start from differs from this model's",
            where=where,
            got=f"{folder}: differs in {', '.join(differing[:5])}",
            fix=fix,
        )
    config = _json(folder / "config.json")
    start_projects = Model(**config["model"]).projection
    if start_projects != model.settings.projection:
        raise ConfigError(
            "model.projection differs from that of the model to start from",
            where=where,
            got=str(folder),
            fix=f"model.projection: {str(start_projects).lower()}",
        )
    model.encoder.unit_vectors = bool(
        config.get("unit_vectors", Encoder(**config["encoder"]).unit_vectors)
    )
    state = dict(model.state_dict())
    with torch.no_grad(), open_tensors(folder / WEIGHTS) as file:
        shapes = {name: file.shape(name) for name in file.names}
        # from new to start's name
        sources = {name: name for name in [*state, *shapes] if name.startswith("encoder.")}
        if not any(name.startswith("encoder.residual.") for name in shapes):
            sources = {name: name for name in sources if not name.startswith("encoder.residual.")}
        for head, other in (("head_de", "head_clf"), ("head_clf", "head_de")):
            source = head if f"{head}.0.weight" in shapes else other
            sources |= {
                f"{head}.0.{x}": f"{source}.0.{x}"
                for x in ("weight", "bias")
                if f"{head}.0.{x}" in state
            }
        start_shapes = {
            name: shapes[source] for name, source in sources.items() if source in shapes
        }

        def read(name: str, *rows: Any) -> Tensor:
            return file.read(sources[name], *rows)

        try:
            copy_into({name: state[name] for name in sources if name in state}, start_shapes, read)
        except RuntimeError as error:
            raise ConfigError(
                "the model to start from has an encoder or heads of other shapes",
                where=where,
                got=f"{folder}: {error}"[:300],
                fix=fix,
            ) from error


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
