"""Vectors of millions of texts by a trained model, in shards: for an index, for another vector database.

Legend: N texts, D width of a head.

Both heads' vectors of queries, or the label embeddings, of a token cache or of a text file, as `de.npy` and `clf.npy`
[N, D]. They have the bits of `UniDEC.encode_queries` and `encode_labels` over all texts at once: shards begin where
those begin a block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from unidec.data.shards import Work, join_arrays
from unidec.data.storage import MANIFEST, folder_sha256, read_manifest, write_folder
from unidec.data.tokens import KIND as TOKENS
from unidec.data.tokens import VERSION as TOKENS_VERSION
from unidec.data.tokens import TokenCache, Tokens, encode_texts
from unidec.errors import ArtifactError, ConfigError
from unidec.retrieval.sources import Opened, prepare_texts, read_rows
from unidec.retrieval.text_file import in_batches

if TYPE_CHECKING:
    from unidec.model.unidec import UniDEC

KIND, VERSION = "vectors", 1
BATCH, BLOCK = 1024, 8192  # as `UniDEC.encode` and `UniDEC.project` take them (a test says so)
ROWS_A_SHARD = 8 * BLOCK
_model = Opened()


def begin_vectors(
    model_path: str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    side: Literal["queries", "labels"],
    *,
    dtype: Literal["float32", "float16"] = "float32",
    column: str | None = None,
    shards: int | None = None,
    device: str = "cpu",
) -> Work:
    """The plan of an encoding.

    Args:
        model_path: a bundle's folder, or a model's; its hashes are checked here.
        source: a token cache's folder (of the model's own tokenizer and length), or a file of texts (`predict_file`).
        out: the folder to write: de.npy, clf.npy (those heads that there are; labels have no clf), manifest.
        folder: of plan and shards.
        side: "queries": both heads; "labels": the dual encoder's.
        dtype: of the arrays; float16 halves them, with an error up to 2^-11 of each number.

    Raises:
        ConfigError: labels of a model without a dual-encoder head.
        ArtifactError: model or token cache are damaged.
        DataError: a text file that cannot be read.
    """
    model = _model_folder(Path(os.path.abspath(model_path)))
    heads = json.loads((model / "config.json").read_bytes())["model"]["heads"]
    if side == "labels" and heads == "clf":
        raise ConfigError("this model embeds no label texts", where="side", got="labels", expected="queries")
    facts: dict[str, Any] = {"model": folder_sha256(model), "side": side, "dtype": dtype}
    settings: dict[str, Any]
    if Path(source).is_dir():
        tokens = Path(os.path.abspath(source))
        meta = read_manifest(tokens, TOKENS, TOKENS_VERSION)["meta"]
        facts["tokens"] = folder_sha256(tokens)
        settings, num_rows = {"tokens": str(tokens)}, int(meta["num_texts"])
    else:
        settings, text_facts, num_rows = prepare_texts(Path(source), column, Path(folder))
        facts |= text_facts
    settings |= {
        "model": str(model), "model_sha256": facts["model"], "side": side, "dtype": dtype, "device": device,
        "heads": ["de"] if side == "labels" else {"both": ["de", "clf"]}.get(heads, [heads]),
        "out": os.path.abspath(out),
    }  # fmt: skip
    return Work.begin(
        folder, "vectors", facts, settings, num_rows, shards=shards, rows_a_shard=ROWS_A_SHARD, multiple=BLOCK
    )


def write_vector_shard(work: Work, number: int, show: Callable[[int], object] | None = None) -> None:
    """Encodes one shard's texts.

    Raises:
        ArtifactError: the model is another one than when the plan was made.
        DataError: the input changed, or holds a row that is no text.
    """
    told, (first, last) = work.settings, work.rows(number)
    model = _model.get((told["model"], told["model_sha256"], told["device"]), lambda: _load(told))
    dtype = np.dtype(told["dtype"])
    with work.write(number) as out:
        arrays = {
            head: np.lib.format.open_memmap(
                out.path / f"{head}.npy", mode="w+", dtype=dtype, shape=(last - first, model.settings.dim)
            )
            for head in told["heads"]
        }
        start = 0
        for tokens, rows in _blocks(work, (first, last), model):
            x_NW = model.encode(told["side"], tokens, rows, batch_size=BATCH)
            found = model.project(x_NW, block=BLOCK, only="de" if told["side"] == "labels" else None)
            for head, vectors in zip(("de", "clf"), found, strict=True):
                if head in arrays and vectors is not None:
                    arrays[head][start : start + len(rows)] = vectors
            start += len(rows)
            if show is not None:
                show(len(rows))
        for array in arrays.values():
            array.flush()


def merge_vectors(work: Work) -> Path:
    """Joins the shards, streamed, and removes them.

    Raises:
        ArtifactError: a shard is missing or damaged, or the folder cannot be written.
    """
    work.check_whole()
    told = work.settings
    names = [f"{head}.npy" for head in told["heads"]]
    size = sum((work.path(number) / name).stat().st_size for number in range(work.num_shards) for name in names)
    meta = {"model_sha256": told["model_sha256"], "side": told["side"], "dtype": told["dtype"]}
    with write_folder(told["out"], KIND, VERSION, meta, num_bytes=size) as out:
        for name in names:
            parts = [work.path(number) / name for number in range(work.num_shards)]
            out.meta["num_rows"] = join_arrays(parts, out.path / name, ndim=2)
    work.remove()
    return Path(told["out"])


def _blocks(work: Work, rows: tuple[int, int], model: UniDEC) -> Iterator[tuple[Tokens, np.ndarray]]:
    """Tokens and their rows, a block at a time."""
    told, (first, last) = work.settings, rows
    if "tokens" in told:
        cache = TokenCache.open(told["tokens"], verify=False)
        for start in range(first, last, BLOCK):
            yield cache, np.arange(start, min(start + BLOCK, last))
    else:
        for texts in in_batches(read_rows(told, rows), BLOCK):
            yield encode_texts(texts, model.tokenizer_folder, model.max_length), np.arange(len(texts))


def _model_folder(path: Path) -> Path:
    """The model in a bundle's folder, or the folder itself; every hash is checked."""
    model = path / "model" if (path / "model" / MANIFEST).is_file() else path
    try:
        about = json.loads((model / MANIFEST).read_bytes())
        read_manifest(model, "model", int(about["version"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError("no model here", where=str(path), fix="name a bundle, or the folder of a model") from error
    return model


def _load(told: Any) -> UniDEC:
    from unidec.model.unidec import UniDEC
    from unidec.training.precision import choose_device

    path = Path(told["model"])
    if folder_sha256(path) != told["model_sha256"]:
        fix = "run the same command again: the shards are then made anew"
        raise ArtifactError("another model than the one that the shards were begun with", where=str(path), fix=fix)
    return UniDEC.load(path, str(choose_device(told["device"])), verify=False)
