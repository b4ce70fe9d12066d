"""What answers: an engine is one loaded bundle that never changes; the service knows which one is current.

A request takes the current engine once and is answered by it, also where another is put in its place meanwhile. Nothing
else keeps an engine: when it is neither current nor previous and its last request is answered, it is freed.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from unidec.errors import DataError
from unidec.serving.answers import Answer, answer_of, card, explain_body
from unidec.serving.labels import LabelSearch
from unidec.serving.mapped_files import MappedFiles
from unidec.serving.metrics import Metrics

if TYPE_CHECKING:
    from unidec.retrieval.answer import Answerer, Explanation, Request
    from unidec.retrieval.bundle import Bundle, Prediction
    from unidec.sections import Serve

WARM_TEXT = "a text to begin with"


@dataclass(frozen=True)
class Identity:
    """Which bundle it is.

    Attributes:
        sha256: of the bundle. data: of its data set; None where the bundle does not say.
        name, version, alias: in the registry; None for a folder.
    """

    sha256: str
    name: str | None = None
    version: str | None = None
    alias: str | None = None
    data: str | None = None


class Engine:
    """One loaded bundle with its encoder; several threads may ask it.

    Attributes:
        identity, bundle, answerer: what it was made of. files: what is mapped of the bundle.
        runtime: what encodes queries.
        model_json: {"sha256", "version"} as answers show it.
    """

    def __init__(self, identity: Identity, answerer: Answerer, settings: Serve) -> None:
        self.identity, self.answerer = identity, answerer
        self.bundle: Bundle = answerer.bundle
        self.files = MappedFiles(self.bundle.path)
        self.runtime: str = answerer.encoder.name
        self.model_json = orjson.dumps({"sha256": identity.sha256, "version": identity.version})
        self._card = {"model": asdict(identity), "runtime": self.runtime} | card(self.bundle, settings)
        self._settings = settings

    @classmethod
    def load(cls, folder: str | Path, settings: Serve, identity: Identity | None = None) -> Engine:
        """Open a bundle: hashes of all its files are checked before anything in it is parsed.

        Args:
            identity: where it comes from; None: a folder.

        Raises:
            ArtifactError: damaged, or not the bundle that `identity` names.
            ConfigError: `serve.runtime` cannot be had.
        """
        from unidec.errors import ArtifactError
        from unidec.retrieval.answer import Answerer
        from unidec.retrieval.bundle import Bundle
        from unidec.retrieval.query_encoder import open_encoder

        bundle = Bundle.load(folder, lazy=True)
        bundle.index.threads = settings.threads
        if identity is None:
            data = bundle.info.dataset.get("sha256")
            identity = Identity(bundle.sha256, data=data if isinstance(data, str) else None)
        elif identity.sha256 != bundle.sha256:
            raise ArtifactError(
                "another bundle than the registry says", where=str(folder), got=bundle.sha256, expected=identity.sha256
            )
        return cls(identity, Answerer(bundle, open_encoder(bundle, settings.runtime, settings.threads)), settings)

    def answer(self, requests: Sequence[Request]) -> list[Prediction]:
        """The labels of each request.

        Raises:
            DataError: a request that this bundle cannot answer (`check`).
        """
        return self.answerer.answer(requests)

    def explain(self, request: Request) -> Explanation:
        """The labels of one request, and where they come from."""
        return self.answerer.explain(request)

    def check(self, request: Request) -> None:
        """Raise what `answer` would about the request itself, without encoding anything.

        Raises:
            DataError: e.g. a head that the bundle does not have.
        """
        self.answerer.check(request)

    def warm(self, batch: int | None = None) -> None:
        """Answer one query, then a batch, so that no client waits for what happens once."""
        from unidec.retrieval.answer import Request

        num = batch or self._settings.batch_queries
        for size in (1, num, 1):
            self.answer([Request(f"{WARM_TEXT} {i}" if i else WARM_TEXT) for i in range(size)])

    @functools.cached_property
    def labels(self) -> LabelSearch:
        """Made on first use."""
        return LabelSearch(self.bundle)

    def facts(self) -> dict[str, Any]:
        """Of /card: what is known of the bundle."""
        return self._card


class Follower(Protocol):
    """What keeps the service at what an alias names; see `follow.py`."""

    def state(self) -> dict[str, Any]:
        """How it goes, for people; quick."""
        ...

    def look_soon(self) -> None:
        """Look at the registry now; returns at once."""
        ...


class Service:
    """Which engine answers, and the one before.

    Attributes:
        settings: section `serve`. metrics: what is counted.
        current: what new requests are answered by; None until the first was loaded.
        previous: kept where `settings.keep_previous`, to swap back at once.
        follower: what swaps; None where nothing does.
    """

    def __init__(self, settings: Serve) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.current: Engine | None = None
        self.previous: Engine | None = None
        self.follower: Follower | None = None
        self._lock = threading.Lock()

    def swap(self, engine: Engine) -> None:
        """New requests are answered by this engine; the one before is kept or freed. From any thread."""
        with self._lock:
            if engine is not self.current:
                self.previous = self.current if self.settings.keep_previous else None
                self.current = engine

    def swap_back(self) -> None:
        """Current and previous change places.

        Raises:
            DataError: there is no previous one.
        """
        with self._lock:
            if self.previous is None:
                raise DataError("no model before this one is kept", where="serve.keep_previous")
            self.current, self.previous = self.previous, self.current

    def drop_previous(self) -> None:
        """Free the memory of the one before."""
        with self._lock:
            self.previous = None


def work(engine: Engine, queries: Sequence[Request | Explain]) -> list[Answer]:
    """What the batcher's thread does: a batch of requests, or one explanation alone."""
    first = queries[0]
    if isinstance(first, Explain):
        explanation = engine.explain(first.request)
        prediction = explanation.prediction
        best = prediction.scores[0] if prediction.scores else None
        body = explain_body(engine.model_json, explanation)
        return [Answer(body, best, prediction.num_tokens, prediction.unknown_tokens)]
    return [answer_of(prediction) for prediction in engine.answer(queries)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Explain:
    """A request whose labels are to be explained."""

    request: Request
