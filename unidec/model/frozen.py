"""Caches on disk of what a frozen transformer, or a frozen encoder, computes for each text.

A cache holds the pooled vectors of a frozen transformer, float16 [N, D], or the outputs of an
encoder that is frozen as a whole (also its bag), float16 [N, W]. Its folder's name is a hash of
everything that decides its content: weights, tokens, pooling, ... A label is often a query too (a
product, an article): a text that both have is computed once.

Legend: N texts, D width of the transformer, W width of the encoder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unidec.data.storage import load_array, read_manifest, verify_once, write_folder
from unidec.data.tokens import TokenCache, length_chunks, same_texts
from unidec.errors import ArtifactError
from unidec.model.encoder import InputBuilder, TextEncoder, TransformerEncoder
from unidec.model.weights import output_settings
from unidec.progress import progress

KIND = "encoder-cache"
VERSION = 3
# texts are sorted by length within slices of this size, which bounds memory for any N
TEXTS_AT_ONCE = 16384
What = Literal["vectors", "outputs"]


def cached_inputs(
    encoder: TextEncoder,
    tokens: Mapping[str, TokenCache],
    folder: Path,
    device: torch.device,
    amp: torch.dtype | None,
) -> InputBuilder:
    """An input builder that reads frozen results from the caches; missing caches are computed
    first.

    Training, index and evaluation share the caches, since frozen weights are the same in all of
    them.

    Args:
        folder: parent of the caches' folders.
        device: the encoder's device, where missing caches are computed. amp: autocast to this type,
        or None.
    """
    caches = FrozenCaches(encoder, folder, device, amp)
    return InputBuilder(
        encoder,
        device,
        frozen_vectors=caches.read("vectors", tokens)
        if encoder.takes_vectors and not encoder.frozen
        else None,
        frozen_outputs=caches.read("outputs", tokens) if encoder.frozen else None,
    )


def frozen_sha256(encoder: TransformerEncoder | TextEncoder) -> str:
    """sha256 of the values of the frozen parameters: the same before and after training, from
    whichever file.
    """
    digest = hashlib.sha256()
    module = encoder.transformer if isinstance(encoder, TransformerEncoder) else encoder
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class FrozenCaches:
    """Reads caches of frozen results as read-only memory-mapped float16 arrays; computes those that
    are missing. The fields are the arguments of `cached_inputs`.
    """

    encoder: TextEncoder
    folder: Path
    device: torch.device
    amp: torch.dtype | None

    def read(self, what: What, tokens: Mapping[str, TokenCache]) -> dict[str, np.ndarray]:
        """Values by source: "vectors", of the transformer, [N, D], or "outputs", of an encoder that
        is frozen as a whole, [N, W]. For the outputs the transformer's vectors are cached too:
        encoders with other bags share them."""
        encoder = self.encoder
        facts = dict[str, Any](what=what)
        part: TransformerEncoder | TextEncoder = encoder
        if what == "outputs":
            facts |= {"settings": output_settings(encoder.settings), "unit": encoder.unit_vectors}
        elif encoder.transformer is not None:
            part = encoder.transformer
            facts |= {"pooling": part.pooling, "frozen_layers": part.num_frozen_layers}
            facts |= {"tokens_read": encoder.settings.transformer_tokens}
        facts |= {"weights": frozen_sha256(part), "amp": str(self.amp), "version": VERSION}
        values = dict[str, np.ndarray]()
        first = next(iter(tokens))
        for name in tokens:
            sources = {first: tokens[first], name: tokens[name]}
            values[name] = self._read_one(facts, part.width, sources, values.get(first))
        return values

    def _read_one(
        self,
        facts: dict[str, Any],
        width: int,
        sources: Mapping[str, TokenCache],
        known: np.ndarray | None,
    ) -> np.ndarray:
        """The cached values of the last of `sources`.

        Args:
            facts: with the tokens, they decide the values and so the cache's name.
            sources: either this source alone, or before it the source whose values are `known`.
        """
        manifests = [
            read_manifest(cache.path, "tokens", 1, verify=False) for cache in sources.values()
        ]
        facts = facts | {"tokens": [manifest["files"] for manifest in manifests]}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{facts['what']}-{key[:16]}"
        shape = (len([*sources.values()][-1]), width)
        if not path.is_dir():
            with write_folder(path, KIND, VERSION, {"key": key}) as out, torch.no_grad():
                mapped = np.lib.format.open_memmap(
                    out.path / "values.npy", mode="w+", dtype=np.float16, shape=shape
                )
                self._compute(mapped, facts["what"], sources, known)
                mapped.flush()
        with verify_once(path) as needed:
            if read_manifest(path, KIND, VERSION, verify=needed)["meta"].get("key") != key:
                what = "the cache belongs to another encoder or to other texts"
                raise ArtifactError(
                    what, where=str(path), fix="delete the folder: it will be computed again"
                )
        return load_array(path / "values.npy", np.float16, ndim=2)

    def _compute(
        self,
        values: np.ndarray,
        what: What,
        sources: Mapping[str, TokenCache],
        known: np.ndarray | None,
    ) -> None:
        """Fill `values` [N, D or W]: copied from `known` for texts that the first source has too,
        else computed.
        """
        *_, (name, tokens) = sources.items()
        encoder = self.encoder
        vectors = {}
        compute = self.encoder.transformer_vectors
        if what == "outputs":
            compute = encoder.frozen_output
            if encoder.transformer is not None:
                vectors = self.read("vectors", sources)
        rows = np.arange(len(tokens))
        if known is not None:
            first = next(iter(sources.values()))
            same_N = same_texts(
                tokens, first, encoder.settings.transformer_tokens if what == "vectors" else 0
            )
            for start in range(0, len(tokens), TEXTS_AT_ONCE):
                shared = start + np.flatnonzero(same_N[start : start + TEXTS_AT_ONCE] >= 0)
                values[shared] = known[same_N[shared]]
            rows = np.flatnonzero(same_N < 0)
        build = InputBuilder(encoder, self.device, vectors)
        with progress(total=len(rows), desc=f"encode {name}, cached", unit="text") as bar:
            for start in range(0, len(rows), TEXTS_AT_ONCE):
                some = rows[start : start + TEXTS_AT_ONCE]
                for places in length_chunks(tokens.lengths(some), tokens=build.chunk_tokens):
                    texts = build.texts([(name, tokens, some[places])])
                    with torch.autocast(
                        self.device.type,
                        dtype=self.amp or torch.bfloat16,
                        enabled=self.amp is not None,
                    ):
                        values[some[places]] = compute(texts).float().cpu().numpy()
                    bar.update(len(places))
