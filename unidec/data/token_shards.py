"""Tokenises the texts of a data set: in this process, or in shards that other processes write
(`unidec.data.shards`), with the same bytes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from unidec.data.dataset import XMCDataset
from unidec.data.shards import Job, Work, divided, is_dividing
from unidec.data.tokens import TokenCache, build_token_cache

TEXTS_A_SHARD = 1 << 18  # about ten seconds on one core
_CACHE = "tokens"  # the token cache in a shard's folder


def tokenise(
    dataset: XMCDataset, which: str, out: Path, tokenizer: Path, options: dict[str, Any]
) -> None:
    """Write the token cache of all queries or labels. Shards are beside the parent of `out`, which
    DVC tracks.

    Args:
        which: "queries" or "labels".
        tokenizer: its folder.
        options: max_length, meta with the "text" that is read, and prompt of `build_token_cache`.

    Raises:
        UnidecError: as `build_token_cache` and `shards.divided`.
    """
    num_texts = getattr(dataset, f"num_{which}")
    read = {"which": which} | options["meta"]
    if num_texts <= TEXTS_A_SHARD or not is_dividing():
        texts = dataset.text_batches(**read)
        build_token_cache(texts, tokenizer, out=out, num_texts=num_texts, **options)
        return

    def write_inputs(folder: Path) -> None:
        for file in tokenizer.glob("*.json"):
            shutil.copy(file, folder)

    place = str(dataset.path.absolute())
    settings = {"read": read, "options": options, "dataset": place, "sha256": dataset.sha256}
    job = Job("tokens", f"tokenise {which}", "text")
    beside = out.parent.with_name(f"{out.parent.name}-{which}")
    with divided(beside, job, settings, (num_texts, TEXTS_A_SHARD), write_inputs) as shards:
        caches = (TokenCache.open(shard / _CACHE, verify=False) for shard in shards)
        build_token_cache(caches, tokenizer, out=out, num_texts=num_texts, **options)


def write_shard(work: Work, number: int, threads: int = 0) -> None:
    """Tokenise the texts of one shard. `threads` is not used: the tokenizer has its own."""
    read, options, place, _ = work.settings.values()
    first, end = work.rows(number)
    texts = XMCDataset.open(place, verify=False).text_batches(**read, first=first, end=end)
    with work.write(number) as out:
        cache = out.path / _CACHE
        build_token_cache(texts, work.checked_inputs(), out=cache, num_texts=end - first, **options)
