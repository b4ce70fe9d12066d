"""Tokenises the texts of a data set: in this process, or in shards that other processes write
(`unidec.data.shards`), with the same bytes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from unidec.data.dataset import Text, XMCDataset
from unidec.data.shards import INPUTS, Job, Work, cuts, divided, is_dividing
from unidec.data.storage import folder_sha256, write_folder
from unidec.data.tokens import TokenCache, Tokens, build_token_cache

TEXTS_A_BATCH = 4096
TEXTS_A_SHARD = 1 << 18  # seconds on one core
_CACHE = "tokens"  # the token cache in a shard's folder


@dataclass(frozen=True)
class TokenRequest:
    """The texts of a data set that are tokenised, and how.

    Attributes:
        which, text: as for `XMCDataset.text_batches`.
        tokenizer, max_length, prompt: as for `build_token_cache`.
    """

    which: Literal["queries", "labels"]
    text: Text
    tokenizer: str
    max_length: int
    prompt: str

    def write(
        self,
        texts: Iterable[list[str] | Tokens],
        out: Path,
        num_texts: int = 0,
        desc: str | None = None,
    ) -> None:
        """Write the token cache of these texts."""
        build_token_cache(
            texts,
            self.tokenizer,
            self.max_length,
            out,
            num_texts=num_texts,
            meta={"text": self.text},
            prompt=self.prompt,
            desc=desc,
        )


def tokenise(dataset: XMCDataset, request: TokenRequest, out: Path) -> None:
    """Write the token cache of all queries or labels. Its shards, if there are any, are beside the
    parent of `out`, which DVC tracks.

    Raises:
        UnidecError: as `build_token_cache` and `shards.divided`.
    """
    num_texts = getattr(dataset, f"num_{request.which}")
    if num_texts <= TEXTS_A_SHARD or not is_dividing():
        texts = dataset.text_batches(request.which, request.text, TEXTS_A_BATCH)
        request.write(texts, out, num_texts, desc="tokenise")
        return

    def begin(folder: Path) -> Work:
        tokenizer = folder / INPUTS
        with write_folder(tokenizer, INPUTS, 1) as inputs:
            for file in Path(request.tokenizer).glob("*.json"):
                shutil.copyfile(file, inputs.path / file.name)
        settings = asdict(replace(request, tokenizer=str(tokenizer)))
        facts = asdict(request) | {"tokenizer": folder_sha256(tokenizer), "dataset": dataset.sha256}
        job = Job("tokens", f"tokenise {request.which}", "text")
        bounds = cuts(num_texts, -(-num_texts // TEXTS_A_SHARD), TEXTS_A_SHARD)
        place = {"dataset": str(dataset.path.absolute())}
        return Work.begin(folder, job, facts, {"request": settings} | place, bounds)

    with divided(out.parent.with_name(f"{out.parent.name}-{out.name}"), begin) as shards:
        request.write((TokenCache.open(shard / _CACHE, verify=False) for shard in shards), out)


def write_shard(work: Work, number: int, threads: int = 0) -> None:
    """Tokenise the texts of one shard. `threads` is not used: the tokenizer has its own."""
    request = TokenRequest(**work.settings["request"])
    dataset = XMCDataset.open(work.settings["dataset"], verify=False)
    rows = work.rows(number)
    with work.write(number) as out:
        texts = dataset.text_batches(request.which, request.text, TEXTS_A_BATCH, *rows)
        request.write(texts, out.path / _CACHE)
