"""Makes the server follow an alias: when it moves, the new version is fetched, probed in a separate
process, then loaded.

One thread polls the registry and loads versions; requests never wait for it. A version that cannot
serve is refused and the old one keeps serving, whatever the cause: an unreachable registry, a
damaged or hostile bundle, too little memory. Returning to the previous version is a swap in memory.
The registry is only read."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unidec.addresses import without_credentials
from unidec.bundle.probe import Probe, probe_bundle
from unidec.config import Serve
from unidec.data.storage import folder_bytes
from unidec.data.temporary import remove_folder
from unidec.errors import ArtifactError, ConfigError, UnidecError
from unidec.machine import available_host, give_back
from unidec.serving.engine import Engine, Identity, Service
from unidec.tracking.fetch import (
    Address,
    RegistryAway,
    copy_of,
    fetch_bundle,
    last_known,
    note_known,
    on_a_line,
    parse_address,
    registered_version,
    words_of,
)
from unidec.tracking.store import quiet_mlflow, tracking_uri

# before a refused version is retried: by then memory or disk space may be free
RETRY_SECONDS = 600.0
KEEP_FREE = 256 << 20  # bytes of memory that loading leaves free
# a probe may allocate this multiple of the bundle's size, plus these bytes
PROBE_MEMORY = 2
PROBE_SPACE = 384 << 20
# time limit of a probe: a minute, more for a large bundle
PROBE_SECONDS = 60.0
PROBE_BYTES_A_SECOND = 20e6
_MAX_REASON = 600  # characters

log = logging.getLogger(__name__)


class Registry:
    """MLflow's registry; used by one thread. MLflow itself gives up after three attempts of 20 s
    (`tracking.store`).

    Args:
        address: the followed address. uri: tracking store.
    """

    def __init__(self, address: Address, uri: str) -> None:
        self.address = address
        self.uri = uri
        quiet_mlflow()  # before its first import, which takes seconds: in `find`, not here

    def find(self) -> Identity:
        """The version that the address names.

        Raises:
            ConfigError: there is no such model, alias or version; it lists those that exist.
            RegistryAway: no answer.
        """
        from unidec.tracking.registry import HASH_TAG

        found = registered_version(self.uri, self.address)
        return Identity(
            sha256=found.tags.get(HASH_TAG, ""),
            name=self.address.name,
            version=str(found.version),
            alias=self.address.alias,
            data=found.tags.get("dataset.sha256"),
        )

    def fetch(self, version: Identity) -> Path:
        """The folder of a version's bundle, after checking the hash of every file.

        Raises:
            ArtifactError: the bundle is damaged, or differs from the hash in the version's tag.
            RegistryAway: no answer.
        """
        address = f"models:/{self.address.name}/{version.version}"
        try:
            return fetch_bundle(address, self.uri).resolve()
        except UnidecError:
            raise
        except Exception as error:  # a damaged registry can make libraries raise anything
            with contextlib.suppress(ConfigError):
                self.find()  # raises if the registry is the cause, not this version
            raise ArtifactError(
                "the version cannot be fetched",
                where=address,
                got=_named(error),
                fix="check the network and the store's files",
            ) from error


def probe_as_served(folder: Path, settings: Serve) -> Probe:
    """Load a bundle and query it in a fresh process with bounded time and memory, as this server
    would.

    Raises:
        ArtifactError: it does not load, takes too much memory, crashes or does not answer in time.
    """
    size = folder_bytes(folder)
    return probe_bundle(
        folder,
        None,
        1,
        PROBE_SECONDS + size / PROBE_BYTES_A_SECOND,
        runtime=settings.runtime,
        threads=settings.threads,
        max_bytes=PROBE_MEMORY * size + PROBE_SPACE,
    )


class Follower:
    """Loads the engines of a server, and swaps them when the alias moves.

    Args:
        source: a folder, `models:/name@alias` or `models:/name/version`. Only an alias is polled.
        registry, probe, load: replace the real ones in tests.

    Attributes:
        found: a future that is done once it is known which bundle is loaded first; never done if
        there is none.
        first: a future with the first bundle that serves, or with the error if none can be loaded.

    Raises:
        ConfigError: `source` looks like an address but is not a valid one.
    """

    def __init__(
        self,
        service: Service,
        source: str,
        settings: Serve,
        *,
        registry: Registry | None = None,
        probe: Callable[[Path, Serve], Probe] = probe_as_served,
        load: Callable[[Path, Serve, Identity | None], Engine] = Engine.load,
    ) -> None:
        self.service = service
        self.source = source
        self.settings = settings
        self.address = parse_address(source)
        self.found: Future[None] = Future()
        self.first: Future[Identity] = Future()
        self._uri = tracking_uri() if self.address else ""
        if registry is None and self.address is not None:
            registry = Registry(self.address, self._uri)
        self._registry: Any = registry  # None if a folder is served
        self._probe = probe
        self._load = load
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="unidec-follow")
        self._fetched: set[Path] = set()  # copies that this server made and later removes
        self._clean_at = math.inf
        # times of the monotonic clock in seconds
        self._looked: float | None = None
        self._refused = -math.inf
        self._state: dict[str, Any] = {
            "source": source,
            "alias": self.address.alias if self.address else None,
            "registry": "not asked",
            "wanted": None,
            "refused": None,
            "problem": None,
            "swaps": 0,
            "refusals": 0,
        }

    def start(self) -> None:
        """Start the thread that loads the first engine (see `first`) and then polls."""
        self._thread.start()

    def stop(self, seconds: float = 2.0) -> None:
        """End the thread; waits at most this long, since loading cannot be interrupted."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def state(self) -> dict[str, Any]:
        """The followed source and its state, JSON-serialisable. Times are seconds ago."""
        looked = self._looked
        age = None if looked is None else round(time.monotonic() - looked, 1)
        return self._state | {"looked_seconds_ago": age}

    def _run(self) -> None:
        try:
            engine = self._first_engine()
            self._serve(engine)
        except Exception as error:
            self.first.set_exception(error)
            return
        self.first.set_result(engine.identity)
        del engine
        give_back()
        polls = self.settings.follow_seconds
        if not self._state["alias"]:
            return
        while polls and not self._ended.wait(polls):
            if time.monotonic() >= self._clean_at:
                self._clean()
            try:
                self._poll()
            except UnidecError as error:
                is_new = self._state["problem"] is None  # logged once, not at each poll
                self._problem(f"{on_a_line(error)}; still serving {self._current()}", is_new)
            except Exception:  # the thread survives any error; requests are not affected
                self._state["problem"] = "following failed: see the log"
                log.exception("following %s failed; the current model keeps serving", self.source)

    def _first_engine(self) -> Engine:
        """The registry's version; if it is not available, the version that was served before the
        restart.
        """
        if self.address is None:
            self.found.set_result(None)
            return self._load_engine(None, Path(self.source))
        noted = last_known(self._uri, self.source)
        version: Identity | None = None
        try:
            version = self._look()
            self.found.set_result(None)
            # the very first version does not replace any
            is_new = noted is not None and noted["sha256"] != version.sha256
            engine = self._new_engine(version, probed=is_new)
        except UnidecError as error:
            if noted is None or (version is not None and noted["sha256"] == version.sha256):
                raise
            if version is None:
                self.found.set_result(None)
            elif not isinstance(error, RegistryAway):
                self._refuse(version, error)
            self._problem(f"{on_a_line(error)}; serving {words_of(noted, self.source)}")
            folder = copy_of(noted["sha256"])
            noted.pop("at", None)
            return self._load_engine(Identity(**noted), folder)
        self._note_served(engine.identity)
        return engine

    def _problem(self, why: str, is_new: bool = True) -> None:
        self._state["problem"] = why[:_MAX_REASON]
        if is_new:
            log.warning("%s", why)

    def _look(self) -> Identity:
        """The version that the address names now.

        Raises:
            RegistryAway: no answer. ConfigError: there is no such version.
        """
        try:
            found: Identity = self._registry.find()
        except UnidecError as error:
            self._state["registry"] = "away" if isinstance(error, RegistryAway) else "up"
            raise
        finally:
            self._looked = time.monotonic()
        if self._state["problem"] is not None:
            log.info("%s answers again", self.source)
        self._state |= {"registry": "up", "problem": None, "wanted": found.shown}
        return found

    def _poll(self) -> None:
        version = self._look()
        # only their hashes: a reference would keep an engine from being freed
        current = _sha256_of(self.service.current)
        previous = _sha256_of(self.service.previous)
        if version.sha256 == current:
            self._state["refused"] = None
        elif version.sha256 == previous:
            self.service.swap_back()
            self._swapped(version)
        elif self._may_try(version):
            try:
                engine = self._new_engine(version, probed=True)
                if self._look() != version or self._ended.is_set():
                    return  # the next poll handles the version that it names now
                self._serve(engine)
            except RegistryAway:
                raise
            except Exception as error:  # a damaged bundle can make libraries raise anything
                if not self._ended.is_set():
                    self._refuse(version, error)
            else:
                self._swapped(version)

    def _may_try(self, version: Identity) -> bool:
        is_refused = version.shown.items() <= (self._state["refused"] or {}).items()
        return not is_refused or time.monotonic() > self._refused + RETRY_SECONDS

    def _serve(self, engine: Engine) -> None:
        self.service.swap(engine)
        # then its last request has ended
        self._clean_at = time.monotonic() + self.settings.timeout_seconds + 1

    def _swapped(self, version: Identity) -> None:
        self._note_served(version)
        self._state["swaps"] += 1
        self._state["refused"] = None
        log.info("now serving %s", self._current())

    def _note_served(self, identity: Identity) -> None:
        if self.address is not None:
            try:
                note_known(self._uri, self.source, asdict(identity))
            # a read-only folder: a restart then needs the registry
            except (ArtifactError, OSError) as error:
                log.warning("the served version could not be recorded for a restart: %s", error)

    def _new_engine(self, version: Identity, probed: bool) -> Engine:
        """Fetch a version, probe it in a fresh process if `probed`, and load it."""
        if not version.sha256:
            raise ArtifactError(
                "a version without its bundle's hash",
                where=self.source,
                got=version.version,
                fix="register it with `unidec models register`",
            )
        is_new = not copy_of(version.sha256).is_dir()
        folder: Path = self._registry.fetch(version)
        if is_new:
            self._fetched.add(folder.resolve())
        if probed:
            self._probe(folder, self.settings)
        return self._load_engine(version, folder)

    def _load_engine(self, version: Identity | None, folder: Path) -> Engine:
        """Load and warm up an engine. The previous one is freed if memory is low.

        Raises:
            ArtifactError: the bundle is damaged or not the given version, or there is still too
            little memory.
        """
        needed = folder_bytes(folder) + KEEP_FREE
        if needed > available_host() and self.service.previous is not None:
            log.warning("memory is low: the previous model is no longer kept")
            self.service.previous = None
            give_back()
        if needed > (free := available_host()):
            raise ArtifactError(
                "too little memory to load it",
                where=folder,
                got=f"{free / 1e6:,.0f} MB available",
                expected=f"{needed / 1e6:,.0f} MB",
                fix="more memory, or serve.keep_previous: false",
            )
        engine = self._load(folder, self.settings, version)
        engine.warm(self.settings.batch_queries)
        return engine

    def _refuse(self, version: Identity, error: Exception) -> None:
        why = str(error) if isinstance(error, UnidecError) else _named(error)
        why = without_credentials(why)[:_MAX_REASON]
        text = "version %s is refused, still serving %s: %s"
        log.warning(text, version.version, self._current(), on_a_line(why))
        self._state["refused"] = version.shown | {"why": why}
        self._state["refusals"] += 1
        self._refused = time.monotonic()
        self._clean_at = self._refused

    def _clean(self) -> None:
        """Return freed memory to the system; remove the copies that this server fetched and no
        longer serves.
        """
        self._clean_at = math.inf
        give_back()
        served: set[Path] = set()
        for engine in (self.service.current, self.service.previous):
            if engine is not None:
                served.add(engine.bundle.path.resolve())
        for folder in self._fetched - served:
            try:
                remove_folder(folder)
            except OSError as error:
                log.warning("%s could not be removed: %s", folder, error)
            self._fetched.discard(folder)

    def _current(self) -> str:
        if self.service.current is None:
            return "nothing"
        identity = self.service.current.identity
        if identity.version:
            return f"version {identity.version}"
        return f"bundle {identity.sha256[:16]}"


def _sha256_of(engine: Engine | None) -> str | None:
    return None if engine is None else engine.identity.sha256


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]
