"""An engine is one loaded bundle, which never changes; the service knows which engine is current.

A request takes the current engine once and is answered by it, even if another one becomes current
meanwhile. Nothing else holds an engine: when it is neither current nor previous and its last
request is answered, it is freed."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from unidec.errors import ArtifactError
from unidec.serving.prometheus import Metrics
from unidec.serving.schemas import card

if TYPE_CHECKING:
    from unidec.bundle.answer import Answerer, LabelQuery
    from unidec.bundle.bundle import Bundle
    from unidec.config import Serve
    from unidec.ranking.ranker import Prediction


# of each file that /readyz compares; takes a fraction of a millisecond per bundle
_NUM_BLOCKS = 4
_BLOCK = 1024


@dataclass(frozen=True)
class Identity:
    """Identity of a bundle.

    Attributes:
        sha256: hash of the bundle. data: hash of its data set; None if unknown.
        name, version, alias: in the registry; None for a folder.
    """

    sha256: str
    name: str | None = None
    version: str | None = None
    alias: str | None = None
    data: str | None = None

    @property
    def shown(self) -> dict[str, str | None]:
        """The bundle as in answers."""
        return {"sha256": self.sha256, "version": self.version}


class Engine:
    """One loaded bundle with its encoder; thread-safe.

    Attributes:
        identity, bundle: its parts. files: the bundle's files, which are mapped into
        memory.
        runtime: runtime of the query encoder.
        model_json: {"sha256", "version"} as in answers. card: the answer to GET /card.
    """

    def __init__(self, identity: Identity, answerer: Answerer, settings: Serve) -> None:
        self.identity = identity
        self.bundle: Bundle = answerer.bundle
        self.files = MappedFiles(self.bundle.path)
        self.runtime: str = answerer.encoder.name
        self.model_json = orjson.dumps(identity.shown)
        self.card: dict[str, Any] = {"model": asdict(identity), "runtime": self.runtime}
        self.card |= card(self.bundle, settings)
        self.answer: Callable[[Sequence[LabelQuery]], list[Prediction]] = answerer.answer
        self.explain = answerer.explain
        self.check = answerer.check

    @classmethod
    def load(cls, folder: str | Path, settings: Serve, identity: Identity | None = None) -> Engine:
        """Open a bundle; hashes of all its files are checked before any file is parsed.

        Raises:
            ArtifactError: the bundle is damaged, or differs from `identity` (None: not compared).
            ConfigError: `serve.runtime` is not available.
        """
        from unidec.bundle.answer import Answerer
        from unidec.bundle.bundle import Bundle
        from unidec.ranking.query_encoder import open_encoder

        bundle = Bundle.load(folder, lazy=True)
        bundle.index.threads = settings.threads
        if identity is None:
            identity = Identity(bundle.sha256, data=bundle.info.dataset.get("sha256"))
        elif identity.sha256 != bundle.sha256:
            raise ArtifactError(
                "the folder holds another bundle than the registry's",
                where=folder,
                got=bundle.sha256,
                expected=identity.sha256,
            )
        encoder = open_encoder(bundle, settings.runtime, settings.threads)
        return cls(identity, Answerer(bundle, encoder), settings)

    def warm(self, batch: int) -> None:
        """Answer one query, then a batch, so that no client waits for one-time initialisation."""
        from unidec.bundle.answer import LabelQuery

        texts = [f"a text to begin with {i}" for i in range(batch)]
        for size in (1, batch, 1):
            self.answer([LabelQuery(text) for text in texts[:size]])

    @functools.cached_property
    def labels(self) -> LabelSearch:
        """Search over uids and titles, created on first use."""
        return LabelSearch(self.bundle.uids, self.bundle.titles)


class Service:
    """The current engine and the previous one; one thread swaps them.

    Attributes:
        settings: section `serve`. metrics: the server's counters.
        current: answers new requests; None until the first engine is loaded.
        previous: kept if `settings.keep_previous`, to swap back at once.
        follower: the `Follower` that swaps; None if there is none.
    """

    def __init__(self, settings: Serve) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.current: Engine | None = None
        self.previous: Engine | None = None
        self.follower: Any = None

    def swap(self, engine: Engine) -> None:
        """Make this engine current; the replaced one becomes previous or is freed."""
        self.previous = self.current if self.settings.keep_previous else None
        self.current = engine

    def swap_back(self) -> None:
        """Exchange current and previous."""
        self.current, self.previous = self.previous, self.current


class LabelSearch:
    """Finds labels by a prefix of their uid, their title, or a word in the title;
    case-insensitive.
    """

    def __init__(self, uids: pa.Array, titles: pa.Array) -> None:
        self.uids = uids
        self.titles = titles
        self._uids = pc.utf8_lower(uids)
        self._titles = pc.utf8_lower(titles)

    def find(self, prefix: str, limit: int) -> tuple[list[dict[str, str]], bool]:
        """At most `limit` labels {"uid", "title"}, and whether there are more: first those whose
        uid or title has the prefix, then those with such a word in the title, each in the order of
        rows.
        """
        wanted = prefix.lower()
        in_uid = pc.starts_with(self._uids, wanted)
        begins = pc.or_(in_uid, pc.starts_with(self._titles, wanted))
        rows = pc.indices_nonzero(begins)
        if wanted:
            has_word = pc.match_substring(self._titles, f" {wanted}")
            rows = pa.concat_arrays([rows, pc.indices_nonzero(pc.and_not(has_word, begins))])
        shown = rows[:limit]
        columns = {"uid": self.uids.take(shown), "title": self.titles.take(shown)}
        return pa.table(columns).to_pylist(), len(rows) > limit


class MappedFiles:
    """All files of a bundle, held open, with their sizes, modification times and a hash of some of
    their blocks.

    Editing a file in place changes answers; truncating it ends the process with SIGBUS. Replacing a
    file or folder by renaming is harmless: the old one stays mapped, and is the one compared
    here."""

    def __init__(self, folder: Path) -> None:
        opened = contextlib.ExitStack()
        weakref.finalize(self, opened.close)
        self._files: dict[str, tuple[BinaryIO, object]] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                file = opened.enter_context(path.open("rb"))
                self._files[path.relative_to(folder).as_posix()] = (file, _facts(file))

    def changed(self) -> str:
        """Name of a file that changed since it was loaded; "" if none did."""
        for name, (file, seen) in self._files.items():
            if _facts(file) != seen:
                return name
        return ""


def _facts(file: BinaryIO) -> tuple[int, int, bytes]:
    found = os.fstat(file.fileno())
    last = max(0, found.st_size - _BLOCK)
    sample = hashlib.blake2b()
    for block in range(_NUM_BLOCKS):
        sample.update(os.pread(file.fileno(), _BLOCK, last * block // (_NUM_BLOCKS - 1)))
    return found.st_size, found.st_mtime_ns, sample.digest()
