"""Reads an encoder's intended use from the files that sentence-transformers writes beside a
transformer: pooling, layers after it, prompts and maximum length.

A folder without these files has mean pooling and no prompts. Nothing in a folder is run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from unidec.config import Encoder
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

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    in_features: Width
    out_features: Width
    bias: bool = True
    activation: Annotated[
        Literal["Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"],
        BeforeValidator(lambda name: str(name).rpartition(".")[2]),  # without "torch.nn."
        Field(validation_alias="activation_function"),
    ] = "Tanh"
    path: str = ""


class _File(BaseModel):
    """What is read of config.json and of sentence-transformers' files."""

    architectures: list[str] | None = None
    truncate_dim: int | None = None
    prompts: dict[str, Any] | None = None
    max_seq_length: int | None = None
    do_lower_case: bool | None = None


class _Module(BaseModel):
    type: str
    path: str


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
    file = folder / CONFIG
    config = _read(file, _File)
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("ForSequenceClassification"):
        raise _unsupported(file, architecture, "a cross-encoder")
    pooling = "mean"
    dense = []
    normalizes = False
    file = folder / MODULES
    for place, module in enumerate(_read(file, list[_Module], b"[]")):
        name = _name(file, place, module, normalizes)
        about = folder / module.path / CONFIG
        if name == "Pooling":
            pooling = _pooling(about)
        elif name == "Dense":
            dense.append(_dense(about, module.path))
        normalizes = name == "Normalize"
    use = _read(folder / PROMPTS, _File)
    prompts = use.prompts or {}
    chosen = {}
    for side, names in _SIDES.items():
        chosen[side] = next((prompts[name] for name in names if prompts.get(name)), "")
    file = folder / LENGTHS
    lengths = _read(file, _File)
    if lengths.do_lower_case and not _lowers(folder):
        raise _unsupported(file, "do_lower_case", "a tokenizer that keeps capitals")
    return EncoderFolder(
        pooling=pooling,
        dense=tuple(dense),
        normalizes=normalizes,
        max_length=lengths.max_seq_length or 0,
        width=use.truncate_dim or config.truncate_dim or 0,
        **chosen,
    )


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


def _name(file: Path, place: int, module: _Module, is_over: bool) -> str:
    """The name of a module, if it is allowed at this position; `is_over`: none is."""
    path = PurePosixPath(module.path)
    name = module.type.rpartition(".")[2]
    may_be = name in _ORDER[min(place, 2)] and not is_over
    is_inside = not path.is_absolute() and ".." not in path.parts
    has_root = name == "Transformer" and module.path != ""
    if may_be and is_inside and not has_root and module.type.startswith("sentence_transformers."):
        return name
    got = f"module {place}: {module.type} in {str(path)!r}"
    raise _unsupported(file, got, _WHY.get(name, "a module"))


def _pooling(file: Path) -> str:
    config = _read(file, dict[str, Any])
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
    config = _read(file, dict[str, Any])
    reads = config.get("module_input_name", "sentence_embedding")
    if config.get("use_residual") or reads != "sentence_embedding":
        raise _unsupported(file, config, "a residual layer, or one of single tokens")
    weights = file.with_name("model.safetensors")
    if not weights.is_file():
        raise ConfigError(
            "the weights of a layer are missing; a pickle (pytorch_model.bin) is never loaded",
            where=weights,
            fix="save the model again with sentence-transformers, which writes safetensors",
        )
    return _read(file, DenseLayer).model_copy(update={"path": path})


def _lowers(folder: Path) -> bool:
    """Whether the tokenizer lower-cases texts."""
    from tokenizers import Tokenizer

    normalizer = Tokenizer.from_file(str(folder / "tokenizer.json")).normalizer
    return normalizer is not None and normalizer.normalize_str("A") == "a"


def _read(file: Path, kind: Any, missing: bytes = b"{}") -> Any:
    """The content of a JSON file as a type; of `missing` if there is no file."""
    try:
        if not file.is_file():
            return TypeAdapter(kind).validate_json(missing)
        size = file.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"{size} bytes, of at most {MOST_BYTES}")
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except ValueError as error:
        raise ConfigError(
            "the description of the encoder is damaged",
            where=file,
            got=str(error)[:300],
            fix="restore the file, or name another encoder.name",
        ) from error


def _unsupported(file: Path, got: object, what: str) -> ConfigError:
    return ConfigError(
        f"unidec does not run this encoder: it has {what}", where=file, got=got, fix=_FIX
    )
