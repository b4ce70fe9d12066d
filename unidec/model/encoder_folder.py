"""Reads an encoder's intended use from the files that sentence-transformers writes beside a
transformer: pooling, layers after it, prompts and maximum length.

A folder without these files has mean pooling and no prompts. Nothing in a folder is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from unidec.config import Encoder
from unidec.data.storage import read_json
from unidec.errors import ConfigError
from unidec.model.sources import is_static

MOST_BYTES = 1 << 24  # of a JSON file
CONFIG = "config.json"
MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
LENGTHS = "sentence_bert_config.json"
# names of poolings in sentence-transformers -> ours
POOLINGS = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "lasttoken": "last",
    "weightedmean": "weighted_mean",
}
FROM_HERE = {here: there for there, here in POOLINGS.items()}
_FLAGS = "pooling_mode_"  # older files have a key of true or false for each pooling
# names of the prompts of both sides; the first one that exists is used
_SIDES = {"query_prompt": ("query",), "label_prompt": ("document", "passage", "corpus")}
_ORDER = (("Transformer",), ("Pooling",), ("Dense", "Normalize"))
_WHY = {
    "CLIPModel": "a CLIP, for images",
    "MLMTransformer": "a sparse encoder (SPLADE)",
    "Router": "a router of several encoders",
    "Asym": "a router of several encoders",
    "WordEmbeddings": "word vectors without a transformer",
    "BoW": "a bag of words without a transformer",
}
_FIX = "name an encoder whose modules are Transformer, Pooling, Dense and Normalize, in this order"
Width = Annotated[int, Field(ge=1, le=1 << 16)]


class DenseLayer(BaseModel):
    """A linear layer after the pooling, and its activation.

    Attributes:
        path: its folder, relative to the encoder's.
    """

    model_config = ConfigDict(frozen=True)

    in_features: Width
    out_features: Width
    bias: bool = True
    activation: Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"] = "Tanh"
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class EncoderFolder:
    """An encoder's intended use, as its folder states it.

    Attributes:
        pooling: as `encoder.pooling`. dense: layers after it.
        normalizes: whether its vectors are scaled to unit length at the end.
        query_prompt, label_prompt: read before a text; "": nothing.
        max_length: maximum tokens of a text for which it was made; 0: not stated.
        width: number of first dimensions of its vector that should be used; 0: not stated.
    """

    pooling: Any = "mean"
    dense: tuple[DenseLayer, ...] = ()
    normalizes: bool = False
    query_prompt: str = ""
    label_prompt: str = ""
    max_length: int = 0
    width: int = 0


def read_encoder_folder(folder: Path) -> EncoderFolder:
    """Read a transformer's intended use from the files of its folder.

    Raises:
        ConfigError: a file is damaged, or asks for something that is not supported, such as other
            modules.
    """
    if is_static(folder):
        return EncoderFolder()
    found: dict[str, Any] = {}
    dense = []
    file = folder / CONFIG
    try:
        architecture = (_read(file).get("architectures") or [""])[0]
        if architecture.endswith("ForSequenceClassification"):
            raise _unsupported(file, architecture, "a cross-encoder")
        file = folder / MODULES
        for place, module in enumerate(_read(file, [])):
            file = folder / MODULES
            name = _module(file, place, module, "normalizes" in found)
            file = folder / module["path"] / CONFIG
            if name == "Pooling":
                found["pooling"] = _pooling(file)
            elif name == "Dense":
                dense.append(_dense(file, module["path"]))
            elif name == "Normalize":
                found["normalizes"] = True
        file = folder / CONFIG
        width = int(_read(file).get("truncate_dim") or 0)
        file = folder / PROMPTS
        about = _read(file)
        width = int(about.get("truncate_dim") or width)
        prompts = about.get("prompts") or {}
        for side, names in _SIDES.items():
            found[side] = next((prompts[name] for name in names if prompts.get(name)), "")
        file = folder / LENGTHS
        lengths = _read(file)
        if lengths.get("do_lower_case") and not _lowers(folder):
            raise _unsupported(file, "do_lower_case", "a tokenizer that keeps capitals")
        max_length = int(lengths.get("max_seq_length") or 0)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ConfigError(
            "the description of the encoder is damaged",
            where=file,
            got=str(error)[:300],
            fix="restore the file, or name another encoder.name",
        ) from error
    return EncoderFolder(dense=tuple(dense), max_length=max_length, width=width, **found)


def resolved(settings: Encoder, folder: Path) -> Encoder:
    """Section `encoder` with the pooling and prompts of its folder instead of "auto", and with its
    width instead of 0.
    """
    if not settings.has_transformer:
        changes = {"pooling": "mean", "query_prompt": "", "label_prompt": ""}
        return settings.model_copy(update=changes)
    keys = ("pooling", "width", "query_prompt", "label_prompt")
    auto = [key for key in keys if getattr(settings, key) in ("auto", 0)]
    found = read_encoder_folder(folder)
    return settings.model_copy(update={key: getattr(found, key) for key in auto})


def _module(file: Path, place: int, module: dict[str, Any], is_over: bool) -> str:
    """The name of a module, if it is allowed at this position; `is_over`: none is."""
    kind = str(module["type"])
    path = PurePosixPath(module["path"])
    name = kind.rpartition(".")[2]
    may_be = name in _ORDER[min(place, 2)] and not is_over
    is_inside = not path.is_absolute() and ".." not in path.parts
    has_root = name == "Transformer" and module["path"] != ""
    if may_be and is_inside and not has_root and kind.startswith("sentence_transformers."):
        return name
    raise _unsupported(file, f"module {place}: {kind} in {str(path)!r}", _WHY.get(name, "a module"))


def _pooling(file: Path) -> str:
    config = _read(file)
    if not config.get("include_prompt", True):
        raise _unsupported(file, "include_prompt: false", "pooling without the prompt's tokens")
    chosen = config.get("pooling_mode")
    if chosen is None:
        flags = [key.removeprefix(_FLAGS) for key in config if key.startswith(_FLAGS)]
        on = [name for name in flags if config[_FLAGS + name]]
        chosen = [name.removesuffix("_token").removesuffix("_tokens") for name in on] or "mean"
    if isinstance(chosen, list) and len(chosen) == 1:
        (chosen,) = chosen
    if not isinstance(chosen, str) or chosen not in POOLINGS:
        raise _unsupported(file, chosen, "this pooling")
    return POOLINGS[chosen]


def _dense(file: Path, path: str) -> DenseLayer:
    config = _read(file)
    reads = config.get("module_input_name", "sentence_embedding")
    if config.get("use_residual") or reads != "sentence_embedding":
        raise _unsupported(file, config, "a residual layer, or one of single tokens")
    activation = str(config.get("activation_function", "Tanh"))
    if activation.startswith("torch.nn."):
        activation = activation.rpartition(".")[2]
    weights = file.with_name("model.safetensors")
    if not weights.is_file():
        raise ConfigError(
            "the weights of a layer are missing; a pickle (pytorch_model.bin) is never loaded",
            where=weights,
            fix="save the model again with sentence-transformers, which writes safetensors",
        )
    return DenseLayer(**config | {"activation": activation, "path": path})


def _lowers(folder: Path) -> bool:
    """Whether the tokenizer lower-cases texts."""
    from tokenizers import Tokenizer

    normalizer = Tokenizer.from_file(str(folder / "tokenizer.json")).normalizer
    return normalizer is not None and normalizer.normalize_str("A") == "a"


def _read(file: Path, missing: Any = None) -> Any:
    """The content of a JSON file; `missing`, or {}, if there is none."""
    if not file.is_file():
        return {} if missing is None else missing
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"{file.stat().st_size} bytes, of at most {MOST_BYTES}")
    return read_json(file)


def _unsupported(file: Path, got: object, what: str) -> ConfigError:
    return ConfigError(
        f"unidec does not run this encoder: it has {what}", where=file, got=got, fix=_FIX
    )
