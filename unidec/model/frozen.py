"""Outputs of a frozen transformer, or of a frozen encoder, for each text: computed once and kept on disk.

Legend: N texts, D width of the transformer, W of the encoder.

A transformer frozen as a whole: its pooled vector of each text, float16 [N, D]. An encoder frozen as a whole, bag of
tokens and all: its output for each text, float16 [N, W]. A cache is named by what decides its content: weights, tokens,
pooling, ... Of several processes the first one computes, the others wait.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from unidec.data.storage import load_array, read_manifest, verify_once, write_folder
from unidec.data.tokens import TokenCache, length_chunks
from unidec.errors import ArtifactError
from unidec.model.encoder import InputBuilder, TextEncoder, TransformerEncoder
from unidec.model.weights import output_settings
from unidec.progress import progress

KIND, VERSION = "encoder-cache", 2
What = Literal["vectors", "outputs"]
TEXTS_AT_ONCE = 16384  # sorted by length within such a slice: memory stays bounded for any N


class Together(Protocol):
    """Processes that all need the caches (`unidec.training.distributed.Ranks`)."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    def barrier(self) -> None:
        """Wait for all."""


def cached_inputs(
    encoder: TextEncoder,
    tokens: Mapping[str, TokenCache],
    folder: Path,
    device: torch.device,
    amp: torch.dtype | None,
    together: Together | None = None,
) -> InputBuilder:
    """An input builder that reads what is frozen from the caches; what is not there yet is computed.

    Training, index and evaluation share the caches: what is frozen has the same weights in all of them.

    Args:
        together: processes that all call this.
    """
    caches, transformer = FrozenCaches(folder, device, amp), encoder.transformer
    if not (encoder.frozen or encoder.takes_vectors):
        return InputBuilder(encoder, device)
    if together is not None and together.rank > 0:
        together.barrier()
    if encoder.frozen:
        outputs = {name: caches.outputs(encoder, name, cache) for name, cache in tokens.items()}
        build = InputBuilder(encoder, device, frozen_outputs=outputs)
    else:
        assert transformer is not None
        vectors = {name: caches.vectors(transformer, cache) for name, cache in tokens.items()}
        build = InputBuilder(encoder, device, vectors)
    if together is not None and together.rank == 0:
        together.barrier()
    return build


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
    """Outputs of what is frozen for all texts of a token cache, computed at the first call: float16, read-only,
    memory-mapped.

    Attributes:
        folder: where caches are kept, one folder each.
        device: where to compute. amp: autocast to this type, or None.
    """

    folder: Path
    device: torch.device
    amp: torch.dtype | None
    _hashes: dict[int, str] = field(default_factory=dict)  # of encoders' weights, by id

    def vectors(self, encoder: TransformerEncoder, tokens: TokenCache) -> np.ndarray:
        """A transformer's vectors [N, D]."""
        facts = {"pooling": encoder.pooling, "frozen_layers": encoder.num_frozen_layers, "what": "vectors"}

        def fill(values: np.ndarray) -> None:
            encoder.to(self.device).eval()
            for rows in self._shown(_chunks(tokens), tokens.num_texts, "vectors"):
                ids_BT, mask_BT = tokens.batch(rows)
                ids, mask = torch.from_numpy(ids_BT).to(self.device), torch.from_numpy(mask_BT).to(self.device)
                with self._autocast():
                    values[rows] = encoder(ids, mask).float().cpu().numpy()

        return self._kept("vectors", facts, encoder, tokens, fill)

    def outputs(self, encoder: TextEncoder, name: str, tokens: TokenCache) -> np.ndarray:
        """Outputs [N, W] of an encoder that is frozen as a whole, and on the device.

        Its transformer's vectors are kept too: they are the same beside other bags of tokens.

        Args:
            name: of the texts' source.
        """
        facts = {"settings": output_settings(encoder.settings), "unit": encoder.unit_vectors, "what": "outputs"}

        def fill(values: np.ndarray) -> None:
            vectors = {} if encoder.transformer is None else {name: self.vectors(encoder.transformer, tokens)}
            build, num_texts = InputBuilder(encoder, self.device, vectors), tokens.num_texts
            slices = (np.arange(i, min(i + TEXTS_AT_ONCE, num_texts)) for i in range(0, num_texts, TEXTS_AT_ONCE))
            for rows in self._shown(slices, num_texts, "outputs"):
                texts = build.texts([(name, tokens, rows)])
                with self._autocast():
                    values[rows] = encoder.frozen_output(texts).float().cpu().numpy()

        return self._kept("outputs", facts, encoder, tokens, fill)

    def _shown(self, chunks: Iterable[np.ndarray], num_texts: int, what: What) -> Iterator[np.ndarray]:
        with progress(total=num_texts, desc=f"encode once ({what})", unit="text") as bar:
            for rows in chunks:
                bar.update(len(rows))
                yield rows

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None)

    def _kept(
        self,
        what: What,
        facts: dict[str, Any],
        encoder: TransformerEncoder | TextEncoder,
        tokens: TokenCache,
        fill: Callable[[np.ndarray], None],
    ) -> np.ndarray:
        """The cache that is named by some facts, by the weights and by the tokens."""
        manifest = read_manifest(tokens.path, "tokens", 1, verify=False)
        if id(encoder) not in self._hashes:
            self._hashes[id(encoder)] = frozen_sha256(encoder)
        facts |= {"weights": self._hashes[id(encoder)], "tokens": manifest["files"], "amp": str(self.amp)}
        key = hashlib.sha256(json.dumps(facts | {"version": VERSION}, sort_keys=True).encode()).hexdigest()
        path, shape = self.folder / f"{what}-{key[:16]}", (tokens.num_texts, encoder.width)
        meta = {"key": key, "num_rows": shape[0], "width": shape[1]}
        if not path.is_dir():
            with write_folder(path, KIND, VERSION, meta) as out, torch.no_grad():
                mapped = np.lib.format.open_memmap(out.path / "values.npy", mode="w+", dtype=np.float16, shape=shape)
                fill(mapped)
                mapped.flush()
        with verify_once(path) as needed:
            found = read_manifest(path, KIND, VERSION, verify=needed)["meta"]
        values = load_array(path / "values.npy", np.float16, ndim=2)
        if found != meta or values.shape != shape:
            raise ArtifactError(
                "outputs of another encoder or of other texts", where=str(path), got=f"{found}, {values.shape}",
                expected=f"{meta}, {shape}", fix="delete the folder: it will be computed again",
            )  # fmt: skip
        return values


def _chunks(tokens: TokenCache) -> Iterator[np.ndarray]:
    """Rows of texts of similar length."""
    for start in range(0, tokens.num_texts, TEXTS_AT_ONCE):
        rows = np.arange(start, min(start + TEXTS_AT_ONCE, tokens.num_texts))
        yield from (rows[places] for places in length_chunks(tokens.lengths(rows)))
