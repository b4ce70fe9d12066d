"""Outputs of a frozen transformer, or of a frozen encoder, for each text: computed once and kept on disk.

Legend: N texts, F tokens in all, D width of the transformer, W of the encoder.

A transformer frozen as a whole: its pooled vector of each text, float16 [N, D]. Frozen in its lower layers: the hidden
state of each token below the layers that train, float16 [F, D]. An encoder frozen as a whole, bag of tokens and all:
its output for each text, float16 [N, W]. A cache is named by what decides its content: weights, tokens, pooling, ...

Several processes fill one memory-mapped file, each its share of the chunks of texts, and the first one seals it. Only
those of the first machine do: pages that two machines map and write over a network file system can be lost.
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
What = Literal["vectors", "hidden", "outputs"]
TEXTS_AT_ONCE = 16384  # sorted by length within such a slice: memory stays bounded for any N


class Together(Protocol):
    """Processes that fill a cache together (`unidec.training.distributed.Ranks`)."""

    @property
    def rank(self) -> int:
        """Number of this process, from 0."""

    @property
    def local_world(self) -> int:
        """How many of them are on the first one's machine; their numbers come first."""

    def share(self, value: Any = None) -> Any:
        """The first one's value."""

    def barrier(self) -> None:
        """Wait for all."""


class _Alone:
    rank, local_world = 0, 1

    def share(self, value: Any = None) -> Any:
        return value

    def barrier(self) -> None:
        pass


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
        together: processes that all call this, and share the work.
    """
    caches, transformer = FrozenCaches(folder, device, amp, together or _Alone()), encoder.transformer
    if encoder.frozen:
        outputs = {name: caches.outputs(encoder, name, cache) for name, cache in tokens.items()}
        return InputBuilder(encoder, device, frozen_outputs=outputs)
    if transformer is not None and encoder.takes_vectors:
        vectors = {name: caches.states(transformer, cache, "vectors") for name, cache in tokens.items()}
        return InputBuilder(encoder, device, vectors)
    if transformer is not None and transformer.partly_frozen:
        hidden = {name: caches.states(transformer, cache, "hidden") for name, cache in tokens.items()}
        return InputBuilder(encoder, device, frozen_hidden=hidden)
    return InputBuilder(encoder, device)


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
        together: processes that all make the same calls, and share the work.
    """

    folder: Path
    device: torch.device
    amp: torch.dtype | None
    together: Together = field(default_factory=_Alone)
    _hashes: dict[int, str] = field(default_factory=dict)  # of encoders' weights, by id

    def states(self, encoder: TransformerEncoder, tokens: TokenCache, what: What) -> np.ndarray:
        """A transformer's "vectors" [N, D], or "hidden" states [F, D] below the layers that train."""
        facts = {"pooling": encoder.pooling, "frozen_layers": encoder.num_frozen_layers, "what": what}
        num_rows = tokens.num_texts if what == "vectors" else int(tokens.offsets[-1])

        def fill(values: np.ndarray) -> None:
            encoder.to(self.device).eval()
            for rows in self._own_share(_chunks(tokens), tokens.num_texts, what):
                ids_BT, mask_BT = tokens.batch(rows)
                ids, mask = torch.from_numpy(ids_BT).to(self.device), torch.from_numpy(mask_BT).to(self.device)
                with self._autocast():
                    output = encoder(ids, mask) if what == "vectors" else encoder.lower(ids, mask)
                if what == "vectors":
                    values[rows] = output.float().cpu().numpy()
                else:
                    values[tokens.places(rows)] = output.float().cpu().numpy()[mask_BT]

        return self._kept(what, facts, encoder, tokens, (num_rows, encoder.width), fill)

    def outputs(self, encoder: TextEncoder, name: str, tokens: TokenCache) -> np.ndarray:
        """Outputs [N, W] of an encoder that is frozen as a whole, and on the device.

        Its transformer's vectors are kept too: they are the same beside other bags of tokens.

        Args:
            name: of the texts' source.
        """
        facts = {"settings": output_settings(encoder.settings), "unit": encoder.unit_vectors, "what": "outputs"}
        num_texts = tokens.num_texts
        vectors: dict[str, np.ndarray] = {}

        def prepare() -> None:
            if encoder.transformer is not None:
                vectors[name] = self.states(encoder.transformer, tokens, "vectors")

        def fill(values: np.ndarray) -> None:
            build = InputBuilder(encoder, self.device, vectors)
            slices = (np.arange(i, min(i + TEXTS_AT_ONCE, num_texts)) for i in range(0, num_texts, TEXTS_AT_ONCE))
            for rows in self._own_share(slices, num_texts, "outputs"):
                texts = build.texts([(name, tokens, rows)])
                with self._autocast():
                    values[rows] = encoder.frozen_output(texts).float().cpu().numpy()

        return self._kept("outputs", facts, encoder, tokens, (num_texts, encoder.width), fill, prepare)

    def _own_share(self, chunks: Iterable[np.ndarray], num_texts: int, what: What) -> Iterator[np.ndarray]:
        """This process's chunks of rows; the chunks are the same for any number of processes."""
        with progress(total=num_texts, desc=f"encode once ({what})", unit="text") as bar:
            for number, rows in enumerate(chunks):
                bar.update(len(rows))
                if number % self.together.local_world == self.together.rank:
                    yield rows

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.amp or torch.bfloat16, enabled=self.amp is not None)

    def _kept(
        self,
        what: What,
        facts: dict[str, Any],
        encoder: TransformerEncoder | TextEncoder,
        tokens: TokenCache,
        shape: tuple[int, int],
        fill: Callable[[np.ndarray], None],
        prepare: Callable[[], None] = lambda: None,
    ) -> np.ndarray:
        """The cache that is named by some facts, by the weights and by the tokens.

        Where it is not there yet, all processes prepare, and those on the first one's machine fill it.
        """
        manifest = read_manifest(tokens.path, "tokens", 1, verify=False)
        if id(encoder) not in self._hashes:
            self._hashes[id(encoder)] = frozen_sha256(encoder)
        facts |= {"weights": self._hashes[id(encoder)], "tokens": manifest["files"], "amp": str(self.amp)}
        key = hashlib.sha256(json.dumps(facts | {"version": VERSION}, sort_keys=True).encode()).hexdigest()
        path = self.folder / f"{what}-{key[:16]}"
        meta = {"key": key, "num_rows": shape[0], "width": shape[1]}
        is_first = self.together.rank == 0

        def fill_file(file: str) -> None:
            prepare()
            if self.together.rank < self.together.local_world:
                values = np.load(file, mmap_mode="r+", allow_pickle=False)
                with torch.no_grad():
                    fill(values)
                values.flush()
            self.together.barrier()

        if not self.together.share(path.is_dir() if is_first else None):
            if is_first:
                with write_folder(path, KIND, VERSION, meta) as out:
                    file = str(out.path / "values.npy")
                    np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape).flush()
                    fill_file(self.together.share(file))
            else:
                fill_file(self.together.share())
            self.together.barrier()
        with verify_once(path, verify=is_first) as needed:
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
