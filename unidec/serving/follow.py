"""The server follows an alias: when it moves, the new version is fetched, probed in a process of its own, then loaded.

One thread polls the registry and does all of it; requests never wait for it. A version that cannot serve is refused and
the old one stays, whatever the cause: a registry that is away, a damaged or hostile bundle, too little memory. A return
to the previous version is a swap in memory. The registry is only read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

from unidec.data.storage import folder_sha256, remove_folder, write_json
from unidec.errors import ArtifactError, ConfigError, UnidecError, without_credentials
from unidec.machine import available_host
from unidec.retrieval.probe import Probe, known_texts, num_different, probe_bundle
from unidec.sections import Serve
from unidec.serving.engine import Engine, Identity, Service
from unidec.serving.memory import give_back
from unidec.serving.registry import Registry, RegistryAway
from unidec.tracking.fetch import COPIES, parse_address
from unidec.tracking.store import tracking_uri

RETRY_SECONDS = 600.0  # before a refused version is tried again: memory or disk space may be free by then
KEEP_FREE = 256 << 20  # bytes of memory that loading leaves
PROBE_MEMORY, PROBE_SPACE = 2, 384 << 20  # times the bundle's size, and bytes: what a probe may allocate
PROBE_SECONDS, PROBE_BYTES_A_SECOND = 60.0, 20e6  # time limit: a minute, and more for a large bundle
PROBE_K = 10
_MAX_REASON = 600  # characters

log = logging.getLogger(__name__)


def probe_as_served(folder: Path, settings: Serve) -> Probe:
    """Load and ask a bundle in a fresh process with bounded time and memory, as this server would.

    Raises:
        ArtifactError: it does not load, takes too much memory, crashes or does not answer in time.
    """
    size = _num_bytes(folder)
    return probe_bundle(
        folder, None, PROBE_K, PROBE_SECONDS + size / PROBE_BYTES_A_SECOND, runtime=settings.runtime,
        threads=settings.threads, max_bytes=PROBE_MEMORY * size + PROBE_SPACE,
    )  # fmt: skip


def _num_bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())


def ask(engine: Engine, texts: Sequence[str]) -> tuple[list[list[str]], list[list[float]]]:
    """uids and scores of each text's answer, one at a time, as `Probe` has them.

    Raises:
        ArtifactError: an answer without labels, with a label twice, with a score that is no number, or out of order.
    """
    from unidec.retrieval.answer import Request

    answers = [engine.answer([Request(text, k=PROBE_K)])[0] for text in texts]
    for text, found in zip(texts, answers, strict=True):
        in_order = all(a >= b for a, b in itertools.pairwise(found.scores))
        unique = 0 < len(found.labels) == len(set(found.labels))
        if not (in_order and unique and all(map(math.isfinite, found.scores))):
            raise ArtifactError(
                "an answer that no good bundle gives", where=str(engine.bundle.path),
                got=f"labels {found.labels}, scores {found.scores} for {text[:80]!r}"[:_MAX_REASON],
                expected="different labels, finite scores that fall",
            )  # fmt: skip
    return [list(found.labels) for found in answers], [[float(score) for score in found.scores] for found in answers]


class Follower:
    """Loads what a server answers with, and swaps it when the alias moves.

    Args:
        source: a folder, `models:/name@alias` or `models:/name/version`. Only an alias is polled; a folder is checked
            again on `look_soon`.
        root: the project; copies of bundles are kept in its `runs/bundles`.
        registry, probe, load: replace the real ones in tests.

    Attributes:
        exists: done when the registry, or a folder, has what `source` names; or when the last served version does.
        first: which bundle serves first, once it does, or the error for which none does.

    Raises:
        ConfigError: `source` begins like an address and is none.
    """

    def __init__(
        self,
        service: Service,
        source: str,
        settings: Serve,
        *,
        root: Path | str = ".",
        registry: Registry | None = None,
        probe: Callable[[Path, Serve], Probe] = probe_as_served,
        load: Callable[[Path, Serve, Identity | None], Engine] = Engine.load,
    ) -> None:
        self.service, self.source, self.settings = service, source, settings
        self.address = parse_address(source)
        self.exists: Future[None] = Future()
        self.first: Future[Identity] = Future()
        self._copies = Path(root) / COPIES
        uri = tracking_uri(root) if self.address else ""
        self._note = self._copies / f".served-{hashlib.sha256(f'{uri} {source}'.encode()).hexdigest()[:12]}.json"
        if registry is None and self.address is not None:
            registry = Registry(self.address, self._copies, uri)
        self._registry, self._probe, self._load = registry, probe, load
        self._wake, self._ended, self._asked = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="unidec-follow")
        self._fetched: set[Path] = set()  # copies that this server made, and removes
        self._clean_at = math.inf
        self._looked = self._refused = -math.inf  # when; seconds of the monotonic clock
        self._state: dict[str, Any] = {
            "source": source, "alias": self.address.alias if self.address else None, "registry": "not asked",
            "wanted": None, "busy": "", "refused": None, "problem": None, "swaps": 0, "swaps_back": 0, "refusals": 0,
            "last_swap_seconds": None,
        }  # fmt: skip

    def start(self) -> None:
        """Loads the first engine in a thread, which then polls; see `first`."""
        self._thread.start()

    def stop(self, seconds: float = 2.0) -> None:
        """Ends the thread; waits at most this long, since loading cannot be cut short."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def look_soon(self) -> None:
        """Polls at once, and retries what was refused; a folder is loaded if it changed."""
        self._asked = True
        self._wake.set()

    def state(self) -> dict[str, Any]:
        """What is followed, and its state; JSON-able. Times are seconds ago."""
        age = time.monotonic() - self._looked
        return self._state | {"looked_seconds_ago": round(age, 1) if math.isfinite(age) else None}

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            engine = self._first_engine()
            self._serve(engine)
        except Exception as error:
            self.first.set_exception(error)
            return
        self.first.set_result(engine.identity)
        del engine
        while self._sleep():
            try:
                self._poll()
            except Exception:  # the thread survives whatever happened; requests are not affected
                self._state["problem"] = "following failed: see the log"
                log.exception("following %s failed; the current model stays", self.source)
            finally:
                self._state["busy"] = ""

    def _sleep(self) -> bool:
        """Until the next poll; whether there is one."""
        seconds = self.settings.follow_seconds if self.address and self.address.alias else 0
        # jitter, so that many servers do not ask at once
        end = time.monotonic() + seconds * random.uniform(0.9, 1.1) if seconds else math.inf
        while (now := time.monotonic()) < end:
            if now >= self._clean_at:
                self._clean()
            until = min(end, self._clean_at)
            if self._wake.wait(None if until == math.inf else until - now):
                break
        self._wake.clear()
        return not self._ended.is_set()

    def _first_engine(self) -> Engine:
        """What the registry names; where that cannot be had, the version that served before the restart."""
        if self._registry is None:
            self._set_exists()
            return self._load_engine(Identity(""), Path(self.source), None)
        noted, version = self._last_served(), None
        try:
            version = self._look()
            self._set_exists()
            # the first version ever has nothing to replace
            return self._new_engine(version, probed=noted is not None and noted.sha256 != version.sha256)
        except UnidecError as error:
            if noted is None or (version is not None and noted.sha256 == version.sha256):
                raise
            if version is not None and not isinstance(error, RegistryAway):
                self._refuse(version, error)
            log.warning("version %s serves, as before the restart: %s", noted.version, _on_a_line(error))
            self._set_exists()
            return self._load_engine(noted, self._copies / noted.sha256[:16], None)

    def _set_exists(self) -> None:
        if not self.exists.done():
            self.exists.set_result(None)

    def _last_served(self) -> Identity | None:
        try:
            noted = Identity(**json.loads(self._note.read_text(encoding="utf-8")))
            is_there = re.fullmatch("[0-9a-f]+", noted.sha256) and (self._copies / noted.sha256[:16]).is_dir()
            return noted if is_there else None
        except (OSError, ValueError, TypeError):
            return None

    def _look(self) -> Identity:
        """What the source names now.

        Raises:
            RegistryAway: no answer. ConfigError: there is none. ArtifactError: a folder that is damaged.
        """
        try:
            found = self._registry.find() if self._registry is not None else Identity(folder_sha256(self.source))
        except RegistryAway as error:
            if self._state["registry"] != "away":
                log.warning("%s; the current model stays", _on_a_line(error))
            self._state |= {"registry": "away", "problem": str(error)[:_MAX_REASON]}
            raise
        finally:
            self._looked = time.monotonic()
        if self._state["registry"] == "away":
            log.info("the registry answers again")
        self._state |= {
            "registry": "not asked" if self._registry is None else "up", "problem": None, "wanted": _shown(found),
        }  # fmt: skip
        return found

    def _poll(self) -> None:
        asked, self._asked = self._asked, False
        try:
            version = self._look()
        except RegistryAway:
            return
        except ConfigError as error:
            self._state |= {"registry": "up", "problem": f"{_on_a_line(error)}; {self._current()} stays"[:_MAX_REASON]}
            return
        # their hashes only: a reference would keep an engine from being freed
        current, previous = (
            engine and engine.identity.sha256 for engine in (self.service.current, self.service.previous)
        )
        if version.sha256 == current:
            self._state["refused"] = None
        elif version.sha256 == previous:
            began = time.monotonic()
            self.service.swap_back()
            self._note_served(version)
            self._swapped("swaps_back", began)
        elif asked or self._may_try(version):
            try:
                self._replace(version)
            except RegistryAway as error:
                self._state["problem"] = str(error)[:_MAX_REASON]
            except Exception as error:  # whatever a bundle makes a library raise
                if not self._ended.is_set():
                    self._refuse(version, error)

    def _may_try(self, version: Identity) -> bool:
        is_refused = _shown(version).items() <= (self._state["refused"] or {}).items()
        return not is_refused or time.monotonic() > self._refused + RETRY_SECONDS

    def _replace(self, version: Identity) -> None:
        """Fetch, probe, load and swap; every error leaves the current engine as it is."""
        began = time.monotonic()
        engine = self._new_engine(version, probed=True)
        if self._look() != version or self._ended.is_set():  # the alias moved meanwhile: the next poll handles it
            self._wake.set()
            return
        self._serve(engine)
        self._swapped("swaps", began)

    def _serve(self, engine: Engine) -> None:
        self.service.swap(engine)
        self._state["busy"] = ""
        self._clean_at = time.monotonic() + self.settings.timeout_seconds + 1  # then its last request has ended
        self._note_served(engine.identity)

    def _swapped(self, kind: str, began: float) -> None:
        seconds = round(time.monotonic() - began, 3)
        self._state |= {kind: self._state[kind] + 1, "refused": None, "last_swap_seconds": seconds}
        log.info("%s serves, %.1f s after it was seen", self._current(), seconds)

    def _note_served(self, identity: Identity) -> None:
        if self.address is not None:
            try:
                write_json(self._note, asdict(identity))
            except (ArtifactError, OSError) as error:  # a read-only folder: a restart then needs the registry
                log.warning("the served version is not noted for a restart: %s", error)

    def _new_engine(self, version: Identity, probed: bool) -> Engine:
        """Fetch a version, have a fresh process answer with it where `probed`, and load it."""
        folder = Path(self.source)
        if self._registry is not None:
            self._state["busy"] = "fetching"
            if not version.sha256:
                fix = "register it with `unidec models register`"
                raise ArtifactError(
                    "a version without its bundle's hash", where=self.source, got=version.version, fix=fix
                )
            is_new = not (self._copies / version.sha256[:16]).is_dir()
            folder = self._registry.fetch(version, available_host() - KEEP_FREE)
            if is_new:
                self._fetched.add(folder.resolve())
        self._state["busy"] = "checking"
        return self._load_engine(version, folder, self._probe(folder, self.settings) if probed else None)

    def _load_engine(self, version: Identity, folder: Path, probe: Probe | None) -> Engine:
        """A warm engine that answers as its probe did.

        Raises:
            ArtifactError: damaged, another bundle, too little memory, or answers that differ.
        """
        self._state["busy"] = "loading"
        self._need_memory(folder)
        engine = self._load(folder, self.settings, None if self.address is None else version)
        wanted = version.sha256 or (probe.sha256 if probe else engine.bundle.sha256)
        if engine.bundle.sha256 != wanted:
            raise ArtifactError("another bundle", where=str(folder), got=engine.bundle.sha256, expected=wanted)
        labels, scores = ask(engine, probe.texts if probe else known_texts(engine.bundle))
        if probe is not None and (different := num_different(probe, labels, scores)):
            raise ArtifactError(
                "a fresh process answers differently from this one", where=str(folder),
                got=f"{different} of {len(labels)} answers differ",
            )  # fmt: skip
        engine.warm(self.settings.batch_queries)
        return engine

    def _need_memory(self, folder: Path) -> None:
        """Frees the previous engine where there is too little memory.

        Raises:
            ArtifactError: that is not enough.
        """
        needed = _num_bytes(folder) + KEEP_FREE
        if needed > available_host() and self.service.previous is not None:
            log.warning("little memory: %s is no longer kept", _name(self.service.previous.identity))
            self.service.previous = None
            give_back()
        if needed > (free := available_host()):
            raise ArtifactError(
                "too little memory to load it", where=str(folder), got=f"{free / 1e6:,.0f} MB available",
                expected=f"{needed / 1e6:,.0f} MB", fix="more memory, or serve.keep_previous: false",
            )  # fmt: skip

    def _refuse(self, version: Identity, error: Exception) -> None:
        text = str(error) if isinstance(error, UnidecError) else f"{type(error).__name__}: {error}"
        why = without_credentials(text)[:_MAX_REASON]
        log.warning("version %s is refused, %s stays: %s", version.version, self._current(), _on_a_line(why))
        self._state |= {"refused": _shown(version) | {"why": why}, "refusals": self._state["refusals"] + 1}
        self._refused = self._clean_at = time.monotonic()

    def _clean(self) -> None:
        """Give back freed memory; remove the copies that this server fetched and no longer serves."""
        self._clean_at = math.inf
        give_back()
        engines = (self.service.current, self.service.previous)
        served = {engine.bundle.path.resolve() for engine in engines if engine is not None}
        for folder in self._fetched - served:
            try:
                remove_folder(folder)
            except OSError as error:
                log.warning("%s is not removed: %s", folder, error)
            self._fetched.discard(folder)

    def _current(self) -> str:
        return "nothing" if self.service.current is None else _name(self.service.current.identity)


def _on_a_line(error: object) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())


def _name(identity: Identity) -> str:
    return f"version {identity.version}" if identity.version else f"bundle {identity.sha256[:16]}"


def _shown(identity: Identity) -> dict[str, str | None]:
    return {"version": identity.version, "sha256": identity.sha256}
