"""What a frozen transformer, or a frozen encoder, says about each text, computed once and kept on disk.

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from unidec.data.storage import load_array, read_manifest, verify_once, write_folder
from unidec.data.tokens import TokenCache, Tokens, length_chunks
from unidec.errors import ArtifactError
from unidec.model.encoder import InputBuilder, TextEncoder, TransformerEncoder
from unidec.model.weights import output_settings
from unidec.progress import progress

KIND, VERSION = "encoder-cache", 2
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
    vectors: dict[str, np.ndarray] = {}
    hidden: dict[str, np.ndarray] = {}
    if encoder.frozen:
        weights = frozen_sha256(encoder)
        outputs = {
            name: frozen_outputs(encoder, weights, name, cache, folder, device, amp, together)
            for name, cache in tokens.items()
        }
        return InputBuilder(encoder, device, frozen_outputs=outputs)
    if encoder.transformer is not None and (encoder.takes_vectors or encoder.transformer.partly_frozen):
        weights = frozen_sha256(encoder.transformer)
        what, target = ("vectors", vectors) if encoder.takes_vectors else ("hidden", hidden)
        for name, cache in tokens.items():
            target[name] = cached_outputs(encoder.transformer, weights, cache, folder, what, device, amp, together)
    return InputBuilder(encoder, device, vectors, hidden)


def frozen_sha256(encoder: TransformerEncoder | TextEncoder) -> str:
    """Hash of the parameters that do not train, by content: the same before and after training, from any file."""
    digest = hashlib.sha256()
    module = encoder.transformer if isinstance(encoder, TransformerEncoder) else encoder
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cached_outputs(
    encoder: TransformerEncoder,
    weights_sha256: str,
    tokens: TokenCache,
    folder: Path,
    what: str,
    device: torch.device,
    amp: torch.dtype | None,
    together: Together | None = None,
) -> np.ndarray:
    """Frozen outputs for all texts of a token cache, memory-mapped; computed at the first call.

    Args:
        encoder: the transformer; its parameters decide the values.
        weights_sha256: of what is frozen (`frozen_sha256`): names the cache.
        tokens: N texts.
        folder: where caches are kept, one folder each.
        what: "vectors" [N, D] or "hidden" [F, D].
        device: where to compute.
        amp: autocast to this type, or None.
        together: processes that all call this, and share the work.

    Returns:
        float16, read-only.
    """
    facts = {
        "weights": weights_sha256, "tokens": read_manifest(tokens.path, "tokens", 1, verify=False)["files"],
        "pooling": encoder.pooling, "frozen_layers": encoder.num_frozen_layers, "what": what, "amp": str(amp),
    }  # fmt: skip
    num_rows = tokens.num_texts if what == "vectors" else int(tokens.offsets[-1])

    def fill(values: np.ndarray | None, together: Together) -> None:
        if values is not None:
            _fill(values, encoder.to(device).eval(), tokens, what, device, amp, together)

    return _kept(folder, what, facts, (num_rows, encoder.width), fill, together or _Alone())


def frozen_outputs(
    encoder: TextEncoder,
    weights_sha256: str,
    name: str,
    tokens: TokenCache,
    folder: Path,
    device: torch.device,
    amp: torch.dtype | None,
    together: Together | None = None,
) -> np.ndarray:
    """Outputs of a frozen encoder for all texts of a token cache, memory-mapped; computed at the first call.

    Where its transformer is computed for it, that is kept too: it is the same beside other bags of tokens.

    Args:
        encoder: frozen, on the device; its parameters decide the values.
        weights_sha256: of what is frozen (`frozen_sha256`): names the cache.
        name: of the texts' source.
        tokens: N texts.
        folder: where caches are kept, one folder each.
        device: where to compute.
        amp: autocast to this type, or None.
        together: processes that all call this, and share the work.

    Returns:
        float16 [N, W], read-only.
    """
    facts = {
        "weights": weights_sha256, "tokens": read_manifest(tokens.path, "tokens", 1, verify=False)["files"],
        "settings": output_settings(encoder.settings), "unit": encoder.unit_vectors, "what": "outputs",
        "amp": str(amp),
    }  # fmt: skip

    def fill(values: np.ndarray | None, together: Together) -> None:
        vectors = {}
        transformer = encoder.transformer
        if transformer is not None:
            weights = frozen_sha256(transformer)
            vectors[name] = cached_outputs(transformer, weights, tokens, folder, "vectors", device, amp, together)
        if values is not None:
            _fill_outputs(values, InputBuilder(encoder, device, vectors), name, tokens, amp, together)

    return _kept(folder, "outputs", facts, (tokens.num_texts, encoder.width), fill, together or _Alone())


def _kept(
    folder: Path,
    what: str,
    facts: dict[str, Any],
    shape: tuple[int, int],
    fill: Callable[[np.ndarray | None, Together], None],
    together: Together,
) -> np.ndarray:
    """The cache that is named by some facts, float16, read-only; filled by all processes where it is not there yet.

    Those that are not on the first one's machine are given no file to fill.
    """
    key = hashlib.sha256(json.dumps(facts | {"version": VERSION}, sort_keys=True).encode()).hexdigest()
    path = folder / f"{what}-{key[:16]}"
    meta = {"key": key, "num_rows": shape[0], "width": shape[1]}
    is_first = together.rank == 0

    def fill_file(file: str) -> None:
        local = together.rank < together.local_world
        values = np.load(file, mmap_mode="r+", allow_pickle=False) if local else None
        fill(values, together)
        if values is not None:
            values.flush()
        together.barrier()

    if not together.share(path.is_dir() if is_first else None):
        if is_first:
            with write_folder(path, KIND, VERSION, meta) as out:
                file = str(out.path / "values.npy")
                np.lib.format.open_memmap(file, mode="w+", dtype=np.float16, shape=shape).flush()
                fill_file(together.share(file))
        else:
            fill_file(together.share())
        together.barrier()
    with verify_once(path, verify=is_first) as needed:
        found = read_manifest(path, KIND, VERSION, verify=needed)["meta"]
    values = load_array(path / "values.npy", np.float16, ndim=2)
    if found != meta or values.shape != shape:
        raise ArtifactError(
            "outputs of another encoder or of other texts", where=str(path), got=f"{found}, {values.shape}",
            expected=f"{meta}, {shape}", fix="delete the folder: it will be computed again",
        )  # fmt: skip
    return values


def _fill_outputs(
    values: np.ndarray,
    build: InputBuilder,
    name: str,
    tokens: TokenCache,
    amp: torch.dtype | None,
    together: Together,
) -> None:
    encoder, device = build.encoder, build.device
    with progress(total=tokens.num_texts, desc="encode once (outputs)", unit="text") as bar:
        for number, start in enumerate(range(0, tokens.num_texts, TEXTS_AT_ONCE)):
            rows = np.arange(start, min(start + TEXTS_AT_ONCE, tokens.num_texts))
            bar.update(len(rows))
            if number % together.local_world != together.rank:
                continue
            texts = build.texts([(name, tokens, rows)])
            with torch.autocast(device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
                values[rows] = encoder.frozen_output(texts).float().cpu().numpy()


@torch.no_grad()
def _fill(
    values: np.ndarray,
    encoder: TransformerEncoder,
    tokens: Tokens,
    what: str,
    device: torch.device,
    amp: torch.dtype | None,
    together: Together,
) -> None:
    number = 0
    with progress(total=tokens.num_texts, desc=f"encode once ({what})", unit="text") as bar:
        for start in range(0, tokens.num_texts, TEXTS_AT_ONCE):
            slice_rows = np.arange(start, min(start + TEXTS_AT_ONCE, tokens.num_texts))
            for places in length_chunks(tokens.lengths(slice_rows)):
                rows = slice_rows[places]
                bar.update(len(rows))
                number += 1
                if number % together.local_world != together.rank:  # another's; the same chunks for any number of us
                    continue
                ids_BT, mask_BT = tokens.batch(rows)
                ids, mask = torch.from_numpy(ids_BT).to(device), torch.from_numpy(mask_BT).to(device)
                with torch.autocast(device.type, dtype=amp or torch.bfloat16, enabled=amp is not None):
                    output = encoder(ids, mask) if what == "vectors" else encoder.lower(ids, mask)
                if what == "vectors":
                    values[rows] = output.float().cpu().numpy()
                else:
                    _scatter(values, tokens, rows, output.float().cpu().numpy()[mask_BT])


def _scatter(values: np.ndarray, tokens: Tokens, rows: np.ndarray, state_FD: np.ndarray) -> None:
    length_B = tokens.lengths(rows)
    shift_B = tokens.offsets[rows] - (np.cumsum(length_B) - length_B)
    values[np.arange(length_B.sum()) + np.repeat(shift_B, length_B)] = state_FD
