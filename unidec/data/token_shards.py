"""A token cache made in shards: contiguous ranges of a data set's texts, each a token cache of its own, then joined.

The joined cache has the bytes that `build_token_cache` writes of all texts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from unidec.data.dataset import Text, XMCDataset
from unidec.data.shards import Work, join_arrays
from unidec.data.storage import file_sha256, read_manifest, write_folder
from unidec.data.tokens import KIND, VERSION, build_token_cache

ROWS_A_SHARD = 1_000_000  # a minute of tokenising; fewer texts are not worth a process of their own
TEXTS_A_BATCH = 4096


def begin_tokens(
    dataset: XMCDataset,
    which: Literal["queries", "labels"],
    text: Text,
    tokenizer_folder: str | os.PathLike[str],
    max_length: int,
    out: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    shards: int | None = None,
) -> Work:
    """The plan of a token cache.

    Args:
        dataset: whose texts; workers open its folder.
        which: "queries" or "labels".
        text: "title" or "title+content".
        tokenizer_folder, max_length: see `build_token_cache`.
        out: where the cache shall be.
        folder: of plan and shards.
        shards: how many; None: one for each million texts.
    """
    tokenizer = Path(os.path.abspath(tokenizer_folder))
    facts = {
        "dataset": dataset.sha256,
        "which": which,
        "text": text,
        "tokenizer": [file_sha256(tokenizer / name) if (tokenizer / name).is_file() else None for name in _TOKENIZER],
        "max_length": max_length,
    }
    settings = {
        "dataset": os.path.abspath(dataset.path),
        "which": which,
        "text": text,
        "tokenizer": str(tokenizer),
        "max_length": max_length,
        "out": os.path.abspath(out),
    }
    num_texts = dataset.num_queries if which == "queries" else dataset.num_labels
    return Work.begin(folder, "tokens", facts, settings, num_texts, shards=shards, rows_a_shard=ROWS_A_SHARD)


def write_token_shard(work: Work, number: int, show: Callable[[int], object] | None = None) -> None:
    """Tokenises one shard's texts.

    Raises:
        DataError, ArtifactError: as `build_token_cache`.
    """
    told, (first, last) = work.settings, work.rows(number)
    dataset = XMCDataset.open(told["dataset"], verify=False)
    build_token_cache(
        dataset.text_batches(told["which"], told["text"], TEXTS_A_BATCH, (first, last)),
        told["tokenizer"],
        told["max_length"],
        work.path(number),
        last - first,
        {"text": told["text"], "work": work.stamp(number)},
    )
    if show is not None:
        show(last - first)


def merge_tokens(work: Work) -> Path:
    """Joins the shards, streamed, and removes them.

    Raises:
        ArtifactError: a shard is missing or damaged, or the cache cannot be written.
    """
    work.check_whole()
    shards = [work.path(number) for number in range(work.num_shards)]
    meta = read_manifest(shards[0], KIND, VERSION, verify=False)["meta"]
    del meta["work"]
    out = Path(work.settings["out"])
    size = sum((shard / name).stat().st_size for shard in shards for name in ("ids.npy", "offsets.npy"))
    with write_folder(out, KIND, VERSION, num_bytes=size) as folder:
        num_tokens = join_arrays([shard / "ids.npy" for shard in shards], folder.path / "ids.npy", ndim=1)
        join_arrays([shard / "offsets.npy" for shard in shards], folder.path / "offsets.npy", ndim=1, shifted=True)
        folder.meta |= meta | {"num_texts": work.num_rows, "num_tokens": num_tokens}
    work.remove()
    return out


_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
