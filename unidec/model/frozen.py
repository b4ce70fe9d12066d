"""Outputs of a frozen transformer, or of a frozen encoder, for each text: computed once and kept on disk.

Labels are often queries too (a product, an article): such a text is computed once.

Legend: N texts, D width of the transformer, W of the encoder.

A transformer frozen as a whole: its pooled vector of each text, float16 [N, D]. An encoder frozen as a whole, bag of
tokens and all: its output for each text, float16 [N, W]. A cache is named by what decides its content: weights, tokens,
pooling, ...
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

KIND, VERSION = "encoder-cache", 3
TEXTS_AT_ONCE = 16384  # sorted by length within such a slice: memory stays bounded for any N
What = Literal["vectors", "outputs"]


def cached_inputs(
    encoder: TextEncoder, tokens: Mapping[str, TokenCache], folder: Path, device: torch.device, amp: torch.dtype | None
) -> InputBuilder:
    """An input builder that reads what is frozen from the caches; what is not there yet is computed.

    Training, index and evaluation share the caches: what is frozen has the same weights in all of them.

    Args:
        folder: where caches are kept, one folder each.
        device: where to compute, and where the encoder is. amp: autocast to this type, or None.
    """
    caches = FrozenCaches(encoder, folder, device, amp)
    return InputBuilder(
        encoder, device,
        frozen_vectors=caches.read("vectors", tokens) if encoder.takes_vectors and not encoder.frozen else None,
        frozen_outputs=caches.read("outputs", tokens) if encoder.frozen else None,
    )  # fmt: skip


def frozen_sha256(encoder: TransformerEncoder | TextEncoder) -> str:
    """Hash of the parameters that do not train, by content: the same before and after training, from any file."""
    digest = hashlib.sha256()
    module = encoder.transformer if isinstance(encoder, TransformerEncoder) else encoder
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class FrozenCaches:
    """Outputs of what is frozen for all texts of token caches, computed at the first call: float16, read-only,
    memory-mapped. The fields are the arguments of `cached_inputs`."""

    encoder: TextEncoder
    folder: Path
    device: torch.device
    amp: torch.dtype | None

    def read(self, what: What, tokens: Mapping[str, TokenCache]) -> dict[str, np.ndarray]:
        """Of each source "vectors" [N, D], the transformer's, or "outputs" [N, W] of an encoder that is frozen as a
        whole; its transformer's vectors are kept too: they are the same beside other bags of tokens."""
        encoder, facts = self.encoder, dict[str, Any](what=what)
        part: TransformerEncoder | TextEncoder = encoder
        if what == "outputs":
            facts |= {"settings": output_settings(encoder.settings), "unit": encoder.unit_vectors}
        elif encoder.transformer is not None:
            part = encoder.transformer
            facts |= {"pooling": part.pooling, "frozen_layers": part.num_frozen_layers}
            facts |= {"tokens_read": encoder.settings.transformer_tokens}
        facts |= {"weights": frozen_sha256(part), "amp": str(self.amp), "version": VERSION}
        kept, first = dict[str, np.ndarray](), next(iter(tokens))
        for name in tokens:
            sources = {first: tokens[first], name: tokens[name]}
            kept[name] = self._kept(facts, part.width, sources, kept.get(first))
        return kept

    def _kept(
        self, facts: dict[str, Any], width: int, sources: Mapping[str, TokenCache], known: np.ndarray | None
    ) -> np.ndarray:
        """The cache of the last of some sources, named by some facts and by the tokens.

        Args:
            sources: it alone, or the one whose values are `known` before it.
        """
        manifests = [read_manifest(cache.path, "tokens", 1, verify=False) for cache in sources.values()]
        facts = facts | {"tokens": [manifest["files"] for manifest in manifests]}
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        path, shape = self.folder / f"{facts['what']}-{key[:16]}", (len([*sources.values()][-1]), width)
        if not path.is_dir():
            with write_folder(path, KIND, VERSION, {"key": key}) as out, torch.no_grad():
                mapped = np.lib.format.open_memmap(out.path / "values.npy", mode="w+", dtype=np.float16, shape=shape)
                self._fill(mapped, facts["what"], sources, known)
                mapped.flush()
        with verify_once(path) as needed:
            if read_manifest(path, KIND, VERSION, verify=needed)["meta"].get("key") != key:
                what = "outputs of another encoder or of other texts"
                raise ArtifactError(what, where=str(path), fix="delete the folder: it will be computed again")
        return load_array(path / "values.npy", np.float16, ndim=2)

    def _fill(
        self, values: np.ndarray, what: What, sources: Mapping[str, TokenCache], known: np.ndarray | None
    ) -> None:
        *_, (name, tokens) = sources.items()
        encoder, vectors, compute = self.encoder, {}, self.encoder.transformer_vectors
        if what == "outputs":
            compute = encoder.frozen_output
            if encoder.transformer is not None:
                vectors = self.read("vectors", sources)
        rows = np.arange(len(tokens))
        if known is not None:
            first = next(iter(sources.values()))
            same_N = same_texts(tokens, first, encoder.settings.transformer_tokens if what == "vectors" else 0)
            for start in range(0, len(tokens), TEXTS_AT_ONCE):
                own = start + np.flatnonzero(same_N[start : start + TEXTS_AT_ONCE] >= 0)
                values[own] = known[same_N[own]]
            rows = np.flatnonzero(same_N < 0)
        build = InputBuilder(encoder, self.device, vectors)
        with progress(total=len(rows), desc=f"encode once ({what})", unit="text") as bar:
            for start in range(0, len(rows), TEXTS_AT_ONCE):
                some = rows[start : start + TEXTS_AT_ONCE]
                for places in length_chunks(tokens.lengths(some)):
                    texts = build.texts([(name, tokens, some[places])])
                    with torch.autocast(
                        self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None
                    ):
                        values[some[places]] = compute(texts).float().cpu().numpy()
                    bar.update(len(places))
