"""`unidec encoders`: facts about known encoders, and the cost of one on this machine."""

from __future__ import annotations

import timeit
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unidec.config import Encoder, Params, packaged
from unidec.data.storage import read_json
from unidec.errors import UnidecError
from unidec.model.encoder_folder import (
    CONFIG,
    FROM_HERE,
    LENGTHS,
    MODULES,
    PROMPTS,
    EncoderFolder,
    read_encoder_folder,
)
from unidec.model.sources import PACKAGED, is_known_here, resolve_encoder
from unidec.pipeline import paths

NUM_TEXTS = 64
SAMPLE = ("a red bicycle with two wheels", "how to install a printer", "history of the river")
KNOWN: dict[str, Any] = packaged("pipeline/encoders.yaml")
ARCHITECTURES = [known["architecture"] for known in KNOWN["architectures"]]


@dataclass(frozen=True, kw_only=True)
class AboutEncoder:
    """Facts about an encoder from its folder, and measurements.

    Attributes:
        missing: files that define its use; without them: mean pooling, no prompts.
        memory_bytes: weights in float32; training_bytes: weights, gradients and optimiser state if
            all layers train, without activations.
        texts_per_second: encoding speed for 64 texts of the data, or of a sample, on `device`.
    """

    name: str
    folder: str
    architecture: str
    layers: int
    width: int
    pooling: str
    dense: list[dict[str, Any]]
    normalizes: bool
    query_prompt: str
    label_prompt: str
    max_length: int
    missing: list[str]
    parameters: int
    memory_bytes: int
    training_bytes: int
    texts_per_second: float
    tokens_per_text: float
    device: str


def known_encoders() -> dict[str, Any]:
    """Known architectures, poolings, prompts and packaged weights."""
    return {
        "architectures": KNOWN["architectures"],
        "poolings": list(FROM_HERE),
        "prompts": KNOWN["prompts"],
        "packaged": list(PACKAGED),
    }


def what_folder_says(params: Params) -> str:
    """One line with the settings in an encoder's folder; "" if it is not on this machine."""
    name = params.encoder.name
    if not (params.encoder.has_transformer and is_known_here(name)):
        return ""
    try:
        found = read_encoder_folder(resolve_encoder(name))
    except UnidecError as error:
        return str(error).replace("\n", ";")
    return ", ".join(f"{key} {value!r}" for key, value in _facts(found).items() if value)


def encoder_facts(bundle: Path) -> dict[str, str]:
    """How a bundle's transformer reads texts, for the model card; {} without a transformer."""
    encoder = read_json(bundle / "model" / CONFIG).get("encoder", {})
    if encoder.get("kind") not in ("transformer", "both"):
        return {}
    keys = ("pooling", "width", "query_prompt", "label_prompt")
    return {key.replace("_", " "): encoder[key] for key in keys if encoder.get(key)}


def about_encoder(params: Params, name: str) -> AboutEncoder:
    """Read an encoder's folder, and measure it on this machine as section `encoder` uses it.

    Raises:
        ArtifactError: there is no such encoder, or files of it are missing.
        ConfigError: it asks for something that is not supported.
    """
    import torch

    from unidec.data.tokens import encode_texts
    from unidec.model.dense import load_dense
    from unidec.model.encoder import TextEncoder, load_transformer
    from unidec.model.encoder_folder import resolved
    from unidec.model.encoder_inputs import InputBuilder
    from unidec.training.precision import choose_device

    folder = resolve_encoder(name)
    found = read_encoder_folder(folder)
    device = choose_device(params.device)
    transformer = load_transformer(folder)
    config: Any = transformer.config
    settings = resolved(Encoder(name=name, kind="transformer"), folder)
    encoder = TextEncoder(settings, transformer, 0, 0, dense=load_dense(folder)).to(device).eval()
    sizes = (folder, params.tokens.max_length, settings.query_prompt)
    tokens = encode_texts(_texts(params), *sizes)
    parts = [("queries", tokens, np.arange(len(tokens)))]
    with torch.no_grad():
        # the first repetition warms up
        seconds = timeit.repeat(
            lambda: encoder.transformer_vectors(InputBuilder(encoder, device)(parts)).cpu(),
            repeat=3,
            number=1,
        )
    parameters = sum(weight.numel() for weight in encoder.parameters())
    files = (MODULES, "1_Pooling/" + CONFIG, PROMPTS, LENGTHS)
    return AboutEncoder(
        name=name,
        folder=str(folder),
        architecture=str(read_json(folder / CONFIG).get("model_type")),
        layers=config.num_hidden_layers,
        missing=[file for file in files if not (folder / file).is_file()],
        parameters=parameters,
        memory_bytes=4 * parameters,
        training_bytes=16 * parameters,  # weight, gradient, and AdamW's two moments
        texts_per_second=len(tokens) / min(seconds[1:]),
        tokens_per_text=float(tokens.for_transformer.lengths().mean()),
        device=str(device),
        **_facts(found) | {"width": encoder.width},
    )


def _facts(found: EncoderFolder) -> dict[str, Any]:
    return asdict(found) | {"dense": [layer.model_dump() for layer in found.dense]}


def _texts(params: Params) -> list[str]:
    """The first texts of the data's queries, or of a sample."""
    if paths.DATASET.is_dir():
        dataset = paths.open_dataset()
        rows = np.arange(min(NUM_TEXTS, dataset.num_queries))
        return dataset.query_texts(rows, params.tokens.text)
    return list(SAMPLE * NUM_TEXTS)[:NUM_TEXTS]
