"""On-disk caches of the output of a frozen transformer, or of a frozen encoder, for each text.

A cache holds the pooled vectors of a frozen transformer, float16 [N, D], or the outputs of an
encoder that is frozen as a whole (also its bag), float16 [N, W]. Its folder's name is a hash of
everything that decides its content: weights, tokens, pooling, ... A label is often a query too (a
product, an article): a text that is both is computed once.

Legend: N texts, D width of the transformer, W width of the encoder.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from unidec.config import Encoder
from unidec.data.chunks import blocks, length_chunks
from unidec.data.shards import Job, Work, divided, is_dividing
from unidec.data.storage import load_array, read_manifest, text_sha256, verify_once, write_folder
from unidec.data.tensor_file import read_tensors, write_tensors
from unidec.data.tokens import TokenCache, same_texts
from unidec.errors import ArtifactError
from unidec.model.dense import Dense
from unidec.model.encoder import TextEncoder, TransformerEncoder, empty_transformer, write_config
from unidec.model.encoder_folder import DenseLayer
from unidec.model.encoder_inputs import InputBuilder
from unidec.model.packed import can_pack
from unidec.model.sources import STATIC
from unidec.model.weights import output_settings
from unidec.progress import progress

KIND = "encoder-cache"
VERSION = 3
# texts are sorted by length within slices of this size, which bounds memory for any N
TEXTS_AT_ONCE = 16384
What = Literal["vectors", "outputs"]
_VALUES = "values.npy"
_ROWS = "rows.npy"
_WEIGHTS = "weights.safetensors"
# of the threads of a process: transformers changes torch's default type while it makes a model
_loading = threading.Lock()


def autocast(device: torch.device, amp: torch.dtype | None) -> torch.autocast:
    """The autocast context in which the model computes on a device; `amp` None: float32."""
    return torch.autocast(device.type, dtype=amp or torch.bfloat16, enabled=amp is not None)


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
        device: the encoder's device, where missing caches are computed.
        amp: autocast to this type, or None.
    """
    caches = FrozenCaches(encoder, folder, device, amp)
    if encoder.frozen:
        return InputBuilder(encoder, device, frozen_outputs=caches.read("outputs", tokens))
    if encoder.takes_vectors:
        return InputBuilder(encoder, device, frozen_vectors=caches.read("vectors", tokens))
    transformer = encoder.transformer
    packs = transformer is not None and can_pack(transformer.transformer.config, device, amp)
    return InputBuilder(encoder, device, packs=packs)


def frozen_sha256(encoder: TransformerEncoder | TextEncoder) -> str:
    """sha256 of the frozen parameters: the same before and after training, from any file."""
    digest = hashlib.sha256()
    module = encoder.transformer if isinstance(encoder, TransformerEncoder) else encoder
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
            values = parameter.detach().cpu().contiguous()
            digest.update(values.view(torch.uint8).numpy().tobytes())
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
        part: TransformerEncoder | TextEncoder = encoder
        facts: dict[str, Any] = {"what": what}
        if what == "outputs":
            settings = output_settings(encoder.settings)
            facts |= {"settings": settings, "unit": encoder.unit_vectors}
        elif encoder.transformer is not None:
            part = encoder.transformer
            facts |= {
                "pooling": part.pooling,
                "frozen_layers": part.num_frozen_layers,
                "tokens_read": encoder.settings.transformer_tokens,
            }
            if part.dense_facts:
                facts["dense"] = part.dense_facts
            if part.width != part.full_width:
                facts["width"] = part.width
        facts |= {"weights": frozen_sha256(part), "amp": str(self.amp), "version": VERSION}
        values: dict[str, np.ndarray] = {}
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
        paths = [cache.path for cache in sources.values()]
        files = [read_manifest(path, "tokens", 1, verify=False)["files"] for path in paths]
        text = json.dumps(facts | {"tokens": files}, sort_keys=True)
        key = text_sha256(text)
        path = self.folder / f"{facts['what']}-{key[:16]}"
        if not path.is_dir():
            *_, tokens = sources.values()
            shape = (len(tokens), width)
            with write_folder(path, KIND, VERSION, {"key": key}) as out:
                file = out.path / _VALUES
                values = np.lib.format.open_memmap(file, "w+", dtype=np.float16, shape=shape)
                for some, found in self._compute(facts["what"], sources, known, path):
                    values[some] = found
                values.flush()
        with verify_once(path) as needed:
            stored = read_manifest(path, KIND, VERSION, verify=needed)["meta"].get("key")
        if stored != key:
            raise ArtifactError(
                "the cache belongs to another encoder or to other texts",
                where=path,
                fix="delete the folder: it will be computed again",
            )
        return load_array(path / _VALUES, np.float16, ndim=2)

    def _compute(
        self,
        what: What,
        sources: Mapping[str, TokenCache],
        known: np.ndarray | None,
        path: Path,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows and their values [rows, D or W]: from `known` for texts of the first source, else
        computed, by other processes inside of `shards.dividing` (`path`: of the cache).
        """
        *_, (name, tokens) = sources.items()
        is_outputs = what == "outputs"
        rows = np.arange(len(tokens))
        first = next(iter(sources.values()))
        # a text has two outputs where queries and labels have their own prompts
        if known is not None and (not is_outputs or first.prompted is tokens.prompted is None):
            most = 0 if is_outputs else self.encoder.settings.transformer_tokens
            same_N = same_texts(tokens.for_transformer, first.for_transformer, most)
            rows = np.flatnonzero(same_N < 0)
            shared = np.flatnonzero(same_N >= 0)
            for block in blocks(len(shared), TEXTS_AT_ONCE):
                some = shared[block]
                yield some, known[same_N[some]]
        transformer: Any = self.encoder.transformer
        vectors: Mapping[str, np.ndarray] = {}
        if is_outputs and transformer is not None:
            vectors = self.read("vectors", sources)
        desc = f"encode {name}, cached"
        is_quick = is_outputs or transformer.transformer.config.model_type == STATIC
        if len(rows) > TEXTS_AT_ONCE and is_dividing() and not is_quick:
            yield from self._from_shards(Job("frozen", desc, "text"), tokens, rows, path)
            return
        with progress(total=len(rows), desc=desc, unit="text") as bar:
            for block in blocks(len(rows), TEXTS_AT_ONCE):
                some = rows[block]
                for places, found in self.encoded(what, name, tokens, some, vectors):
                    yield some[places], found
                    bar.update(len(places))

    def encoded(
        self,
        what: What,
        name: str,
        tokens: TokenCache,
        rows: np.ndarray,
        vectors: Mapping[str, np.ndarray],
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Vectors or outputs of some texts, in chunks of similar length: places in `rows`, and
        float32 [chunk, D or W].

        Args:
            vectors: by source, cached vectors of the transformer; empty: they are computed.
        """
        encoder = self.encoder
        compute = encoder.transformer_vectors if what == "vectors" else encoder.frozen_output
        build = InputBuilder(encoder, self.device, vectors)
        for places in length_chunks(build.read_lengths(tokens, rows), tokens=build.chunk_tokens):
            texts = build.texts([(name, tokens, rows[places])])
            with torch.no_grad(), autocast(self.device, self.amp):
                outputs = compute(texts)
            yield places, outputs.float().cpu().numpy()

    def _from_shards(
        self, job: Job, tokens: TokenCache, rows: np.ndarray, path: Path
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Rows and their vectors [rows, D], which other processes compute. A shard is a block of
        `_compute`, so that chunks have the same texts.
        """
        transformer: Any = self.encoder.transformer
        settings = {
            "encoder": self.encoder.settings.model_dump() | {"kind": "transformer"},
            "dense": transformer.dense_facts,
            "device": self.device.type,
            "amp": str(self.amp).removeprefix("torch."),
            "tokens": str(tokens.path.absolute()),
        }

        def write_inputs(folder: Path) -> None:
            np.save(folder / _ROWS, rows)
            write_config(transformer.transformer, folder)
            write_tensors(folder / _WEIGHTS, transformer.state_dict())

        with divided(path, job, settings, (len(rows), TEXTS_AT_ONCE), write_inputs) as shards:
            for block, shard in zip(blocks(len(rows), TEXTS_AT_ONCE), shards, strict=True):
                yield rows[block], load_array(shard / _VALUES, np.float16, ndim=2)


def write_shard(work: Work, number: int, threads: int = 0) -> None:
    """Compute the vectors of one shard's texts.

    Args:
        threads: not used; torch has as many as OMP_NUM_THREADS says.

    Raises:
        ArtifactError: the inputs are missing or damaged, or the shard cannot be written.
    """
    settings, dense, device, amp, tokens = work.settings.values()
    with _loading:
        inputs = work.checked_inputs()
        layers = [Dense(DenseLayer(**layer)) for layer in dense]
        transformer = empty_transformer(inputs)
        encoder = TextEncoder(Encoder(**settings), transformer, 0, 0, dense=layers)
    weights = read_tensors(inputs / _WEIGHTS)
    encoder.get_submodule("transformer").load_state_dict(weights)
    encoder.to(device).eval()
    caches = FrozenCaches(encoder, work.folder, torch.device(device), getattr(torch, amp, None))
    rows = load_array(inputs / _ROWS, np.int64)[slice(*work.rows(number))]
    values = np.empty((len(rows), encoder.width), dtype=np.float16)
    cache = TokenCache.open(tokens, verify=False)
    for places, vectors in caches.encoded("vectors", "", cache, rows, {}):
        values[places] = vectors
    with work.write(number) as out:
        np.save(out.path / _VALUES, values)
