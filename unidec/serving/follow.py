"""The server follows an alias: when it moves, the new version is fetched, tried and loaded beside, then it answers.

One thread does all of it; requests never wait for it. A version that cannot serve is refused and the old one stays,
whatever is wrong: a registry that is away, a damaged or hostile bundle, too little memory. Back to the version before
is a swap in memory. What happened is in `Follower.state`, the log and the metrics; the registry is only read.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from unidec.data.storage import folder_sha256, remove_folder, write_json
from unidec.errors import ArtifactError, ConfigError, UnidecError, without_credentials
from unidec.retrieval.probe import num_different
from unidec.sections import Serve
from unidec.serving.room import available_bytes, folder_bytes, give_back
from unidec.serving.service import Engine, Identity, Service
from unidec.serving.trial import Trial, Trials, ask, known_texts
from unidec.serving.watch import Found, RegistryAway, Watch
from unidec.tracking.fetch import COPIES, parse_address
from unidec.tracking.store import tracking_uri

AWAY_SECONDS = 120.0  # at most between two looks at a registry that is away
AGAIN_SECONDS, AGAIN_AT_MOST = 60.0, 3600.0  # before a refused version is tried again; doubled each time
IDLE_SECONDS = 120.0  # pauses so long are not worth a process that waits
SWEEP_SECONDS = 0.5  # between two looks whether a dropped engine is still in use
KEEP_FREE = 256 << 20  # bytes of memory that loading leaves
_STOP_SECONDS = 5.0
_SHOWN = 600  # characters of a reason

log = logging.getLogger(__name__)


class Registry(Protocol):
    """What `Watch` does; see there."""

    missing: str

    def prepare(self) -> None: ...
    def look(self) -> Found | None: ...
    def fetch(self, found: Found, max_bytes: int) -> tuple[Path, bool]: ...
    def close(self) -> None: ...


class Trier(Protocol):
    """What `Trials` does; see there."""

    def run(self, folder: Path, settings: Serve) -> Trial: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Refusal:
    """A version that was refused: why, when (monotonic seconds), and how often."""

    found: Found
    why: str
    at: float
    times: int

    def is_over(self) -> bool:
        return time.monotonic() - self.at >= min(AGAIN_SECONDS * 2 ** min(self.times - 1, 10), AGAIN_AT_MOST)


class Follower:
    """Loads what a server answers with, and swaps it when the alias moves.

    Args:
        service: gets the engines.
        source: a folder, `models:/name@alias` or `models:/name/version`. Only an alias is followed; a folder is looked
            at again when `look_soon` asks.
        settings: `follow_seconds` between two looks, `keep_previous`.
        root: the project; copies of bundles are kept in its `runs/bundles`.
        uri: tracking store; default: see `tracking_store.tracking_uri`.
        registry, trials, load: in place of the real ones, for tests.

    Attributes:
        exists: done when the registry, or a folder, has what `source` names; or when another version serves instead.
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
        uri: str | None = None,
        registry: Registry | None = None,
        trials: Trier | None = None,
        load: Callable[[Path, Serve, Identity], Engine] = Engine.load,
    ) -> None:
        self.service, self.source, self.settings = service, source, settings
        self.address = parse_address(source)
        self.exists: Future[None] = Future()
        self.first: Future[Identity] = Future()
        self._uri = (uri or tracking_uri(root)) if self.address else ""
        self._copies = Path(root) / COPIES
        self._registry = registry
        if registry is None and self.address is not None:
            self._registry = Watch(self.address, self._copies, self._uri)
        self._trials: Trier = trials or Trials()
        self._load = load
        self._wake, self._ended, self._asked = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True, name="unidec-follow")
        self._fetched: set[Path] = set()  # copies that are ours to remove
        self._served: list[Path] = []  # the last two
        self._dropped: list[tuple[weakref.ref[Engine], float]] = []  # engines on their way out, and since when
        self._wanted: Found | None = None
        self._refused: _Refusal | None = None
        self._problem: str | None = None
        self._away_since: float | None = None
        self._looked: float | None = None
        self._fails = 0
        self._busy = ""
        self._last_swap: float | None = None
        self.counts = {"swaps": 0, "swaps_back": 0, "refusals": 0, "looks": 0, "failed_looks": 0}

    def start(self) -> None:
        """Loads the first engine in a thread, and goes on following; `first` says when it serves."""
        self._thread.start()

    def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Ends the thread and its processes; waits at most so long, loading cannot be cut short."""
        self._ended.set()
        self._wake.set()
        self._close()
        if self._thread.is_alive():
            self._thread.join(seconds)
        self._close()  # what it started while it was told

    def look_soon(self) -> None:
        """Looks at once, and tries again what was refused; of a folder: loads it if it changed."""
        self._asked = True
        self._wake.set()

    def state(self) -> dict[str, Any]:
        """What is followed, and how it goes; JSON-able. Times are seconds ago."""
        now = time.monotonic()
        refused, looked, wanted = self._refused, self._looked, self._wanted
        return {
            "source": self.source,
            "alias": self.address.alias if self.address else None,
            "registry": self._registry_word(),
            "looked_seconds_ago": None if looked is None else round(now - looked, 1),
            "wanted": wanted and {"version": wanted.version, "sha256": wanted.sha256},
            "busy": self._busy,
            "refused": refused and {
                "version": refused.found.version, "sha256": refused.found.sha256, "why": refused.why,
                "seconds_ago": round(now - refused.at, 1),
            },
            "problem": self._problem,
            **self.counts,
            "last_swap_seconds": self._last_swap,
        }  # fmt: skip

    def _registry_word(self) -> str:
        if self.address is None or self._looked is None:
            return "not asked"
        return "up" if self._away_since is None else "away"

    # the thread

    def _run(self) -> None:
        try:
            identity = self._first()
        except Exception as error:
            self.first.set_exception(error)
            self._close()
            return
        self.first.set_result(identity)
        while not self._ended.is_set():
            self._wait()
            if self._ended.is_set():
                break
            try:
                self._look()
            except Exception:  # the thread goes on whatever happened; requests never see it
                self._problem = "following failed: see the log"
                log.exception("following %s failed; what serves goes on", self.source)
            finally:
                self._busy = ""
        self._close()

    def _wait(self) -> None:
        pause = self._pause()
        if pause is None or pause > IDLE_SECONDS:
            self._close()
        end = math.inf if pause is None else time.monotonic() + pause
        while (left := end - time.monotonic()) > 0:
            seconds = min(left, SWEEP_SECONDS) if self._dropped else left
            if self._wake.wait(None if seconds == math.inf else seconds):
                break
            self._sweep()
        self._wake.clear()

    def _pause(self) -> float | None:
        """Seconds until the next look, a little off so that many servers do not ask at once; None: when asked."""
        seconds = self.settings.follow_seconds
        if self.address is None or self.address.alias is None or not seconds:
            return None
        if self._fails:
            seconds = min(seconds * 2.0 ** min(self._fails, 10), max(seconds, AWAY_SECONDS))
        return seconds * random.uniform(0.9, 1.1)

    def _close(self) -> None:
        if self._registry is not None:
            self._registry.close()
        self._trials.close()

    def _first(self) -> Identity:
        """Puts the engine to begin with in place: what the registry says; where it is silent, the one of last time."""
        began = time.monotonic()
        if self.address is None or self._registry is None:
            self._source_exists()
            engine = self._loaded(Found(None, ""), Path(self.source), None)
        else:
            self._registry.prepare()
            ahead = self._last_time()  # loaded while the registry is asked: mostly it is the one
            engine = self._agreed(ahead)
        self._source_exists()
        self.service.swap(engine)
        self._busy = ""
        self._remember(engine)
        log.info("%s serves after %.1f s", _name(engine.identity), time.monotonic() - began)
        return engine.identity

    def _source_exists(self) -> None:
        if not self.exists.done():
            self.exists.set_result(None)

    def _agreed(self, ahead: Engine | None) -> Engine:
        """The engine of what the registry says, `ahead` where that is it, or where nothing better can be had.

        Raises:
            UnidecError: there is none.
        """
        try:
            found = self._find()
            if found is None:
                raise ConfigError(self._registry.missing if self._registry else "not in the registry")
            self._source_exists()
            if ahead is not None and ahead.bundle.sha256 == found.sha256:
                return ahead
            folder = self._fetch(found)
            trial = None
            if ahead is not None:  # there is something to lose
                self._busy = "checking"
                trial = self._trials.run(folder, self.settings)
            return self._loaded(found, folder, trial)
        except UnidecError as error:
            if ahead is None:
                raise
            if self._wanted is not None and not isinstance(error, RegistryAway):
                self._refuse(self._wanted, error)
            log.warning("%s serves, as the last time: %s", _name(ahead.identity), _on_a_line(error))
            return ahead

    def _last_time(self) -> Engine | None:
        """The engine that served last, from its copy here; None where there is none that loads."""
        try:
            found = Found(**json.loads(self._note.read_text(encoding="utf-8")))
            folder = self._copies / found.sha256[:16]
            if found.sha256 and folder.is_dir():
                return self._loaded(found, folder, None)
        except (OSError, ValueError, TypeError, UnidecError) as error:
            if not isinstance(error, FileNotFoundError):
                log.warning("what served last cannot be loaded: %s", error)
        return None

    @property
    def _note(self) -> Path:
        key = hashlib.sha256(f"{self._uri} {self.source}".encode()).hexdigest()[:12]
        return self._copies / f".served-{key}.json"

    def _remember(self, engine: Engine) -> None:
        identity = engine.identity
        self._served = [*self._served[-1:], engine.bundle.path.resolve()]
        if self.address is not None:
            try:
                write_json(self._note, asdict(Found(identity.version, identity.sha256, identity.data)))
            except (ArtifactError, OSError) as error:  # a folder that cannot be written: the next start asks
                log.warning("what serves is not noted: %s", error)

    def _find(self) -> Found | None:
        """What the source stands for now.

        Raises:
            RegistryAway, ArtifactError: nobody says.
        """
        if self._registry is None or self.address is None:
            self._wanted = Found(None, folder_sha256(self.source))
            return self._wanted
        self.counts["looks"] += 1
        try:
            found = self._registry.look()
        except RegistryAway as error:
            self.counts["failed_looks"] += 1
            self._fails += 1
            self._problem = str(error)[:_SHOWN]
            if self._away_since is None:
                self._away_since = time.monotonic()
                if not self._ended.is_set():
                    log.warning("%s; what serves goes on", _on_a_line(error))
            raise
        finally:
            self._looked = time.monotonic()
        if self._away_since is not None:
            log.info("the registry answers again after %.0f s", time.monotonic() - self._away_since)
        self._fails, self._away_since, self._problem = 0, None, None
        if found is not None or self._wanted is None:
            self._wanted = found
        return found

    def _look(self) -> None:
        """One look, and what follows from it."""
        asked, self._asked = self._asked, False
        try:
            found = self._find()
        except RegistryAway:
            return
        current, previous = self._identities()
        if found is None:
            self._problem = f"{self.source} is not in the registry any more; {_name(current)} goes on serving"
            return
        if current is not None and found.sha256 == current.sha256:
            self._refused = None
        elif previous is not None and found.sha256 == previous.sha256:
            self._swap_back()
        elif asked or self._refused is None or self._refused.found != found or self._refused.is_over():
            try:
                self._replace(found)
            except RegistryAway as error:
                self._fails += 1
                self._problem = str(error)[:_SHOWN]
            except Exception as error:  # whatever a bundle makes a library raise
                if not self._ended.is_set():
                    self._refuse(found, error)

    def _identities(self) -> tuple[Identity | None, Identity | None]:
        current, previous = self.service.current, self.service.previous
        return None if current is None else current.identity, None if previous is None else previous.identity

    def _swap_back(self) -> None:
        began = time.monotonic()
        self.service.swap_back()
        self.counts["swaps_back"] += 1
        self._swapped(began)
        log.info("back to %s", _name(self._identities()[0]))

    def _replace(self, found: Found) -> None:
        """Fetches, tries, loads and swaps; every error leaves what serves as it is.

        Raises:
            UnidecError: it is refused; RegistryAway: it could not be fetched.
        """
        began = time.monotonic()
        folder = self._fetch(found)
        self._busy = "checking"
        trial = self._trials.run(folder, self.settings)
        engine = self._loaded(found, folder, trial)
        if self._find() != found or self._ended.is_set():  # moved on meanwhile: the next look sees to it
            self._wake.set()
            return
        before = [self.service.current, self.service.previous]
        self.service.swap(engine)
        now = (self.service.current, self.service.previous)
        self._drop(*(one for one in before if one is not None and one not in now))
        self.counts["swaps"] += 1
        self._swapped(began)
        log.info("%s serves, %.1f s after it was seen", _name(engine.identity), time.monotonic() - began)

    def _drop(self, *engines: Engine) -> None:
        """Remembers, without holding them, engines that nobody is answered by from now on."""
        self._dropped += [(weakref.ref(engine), time.monotonic()) for engine in engines]

    def _swapped(self, began: float) -> None:
        self._refused, self._last_swap = None, round(time.monotonic() - began, 3)
        if (current := self.service.current) is not None:
            self._remember(current)

    def _fetch(self, found: Found) -> Path:
        """The bundle's folder, hashes checked."""
        if self._registry is None:
            return Path(self.source)
        self._busy = "fetching"
        if not found.sha256:
            fix = "register it with `unidec models register`"
            raise ArtifactError("a version without its bundle's hash", where=self._uri, got=found.version, fix=fix)
        self._make_room(0)
        folder, is_new = self._registry.fetch(found, available_bytes() - KEEP_FREE)
        if is_new:
            self._fetched.add(folder)
        return folder

    def _loaded(self, found: Found, folder: Path, trial: Trial | None) -> Engine:
        """An engine that answers as its trial did, warm.

        Raises:
            ArtifactError: damaged, another bundle, too little memory, or answers that differ.
        """
        self._busy = "loading"
        size = folder_bytes(folder)
        self._make_room(size)
        if size + KEEP_FREE > (free := available_bytes()):
            raise ArtifactError(
                "too little memory to load it", where=str(folder), got=f"{free / 1e6:,.0f} MB available",
                expected=f"{(size + KEEP_FREE) / 1e6:,.0f} MB", fix="more memory, or serve.keep_previous: false",
            )  # fmt: skip
        address, identity = self.address, None
        if address is not None:
            identity = Identity(found.sha256, address.name, found.version, address.alias, found.data)
        engine = self._load(folder, self.settings, identity)  # type: ignore[arg-type]
        wanted = found.sha256 or (trial.sha256 if trial else engine.bundle.sha256)
        if engine.bundle.sha256 != wanted:
            raise ArtifactError("another bundle", where=str(folder), got=engine.bundle.sha256, expected=wanted)
        labels, scores = ask(engine, trial.texts if trial else known_texts(engine.bundle))
        if trial is not None and (different := num_different(trial, labels, scores)):
            raise ArtifactError(
                "a fresh process answers otherwise than this one", where=str(folder),
                got=f"{different} of {len(labels)} answers differ",
            )  # fmt: skip
        engine.warm(self.settings.batch_queries)
        return engine

    def _make_room(self, size: int) -> None:
        """Lets go of the version before where the memory is too small for three."""
        if self.service.previous is None or size + KEEP_FREE <= available_bytes():
            return
        log.warning("little memory: %s is not kept any longer", _name(self._identities()[1]))
        self._drop(self.service.previous)
        self.service.drop_previous()
        end = time.monotonic() + self.settings.timeout_seconds + 2
        while self._dropped and time.monotonic() < end and not self._ended.wait(SWEEP_SECONDS / 10):
            self._sweep()

    def _refuse(self, found: Found, error: Exception) -> None:
        before = self._refused
        times = before.times + 1 if before is not None and before.found == found else 1
        why = without_credentials(f"{error}" if isinstance(error, UnidecError) else f"{type(error).__name__}: {error}")
        stays = _name(self._identities()[0])
        log.warning("version %s is refused, %s goes on serving: %s", found.version, stays, _on_a_line(why[:_SHOWN]))
        self._remove_copies()
        self._refused = _Refusal(found, why[:_SHOWN], time.monotonic(), times)
        self.counts["refusals"] += 1

    def _sweep(self) -> None:
        """Gives back what dropped engines leave, once nobody answers with them any more: memory, and copies on disk."""
        late = time.monotonic() - self.settings.timeout_seconds - 1
        held = [(one, at) for one, at in self._dropped if one() is not None]
        if any(at < late for _, at in held):
            gc.collect()  # every request of its time has ended: what holds it is a circle
            for one, at in held:
                if at < late and one() is not None:
                    log.warning("a bundle that is not used any more is still held: its memory is not freed")
            held = [(one, at) for one, at in held if at >= late]
        if len(held) < len(self._dropped):
            give_back()
        self._dropped = held
        if not held:
            self._remove_copies()

    def _remove_copies(self) -> None:
        """Of what this server fetched: all but the last two that served."""
        for folder in self._fetched - set(self._served):
            try:
                remove_folder(folder)
            except OSError as error:
                log.warning("%s is not removed: %s", folder, error)
            self._fetched.discard(folder)


def _on_a_line(error: object) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())


def _name(identity: Identity | None) -> str:
    if identity is None:
        return "nothing"
    return f"version {identity.version}" if identity.version else f"bundle {identity.sha256[:16]}"
