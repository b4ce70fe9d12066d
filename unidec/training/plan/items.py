"""What a plan is made of: named amounts of memory, where they lie and when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")
PLACE_NAMES = {"device": "GPU memory", "host": "host memory", "disk": "disk"}
GIB = 1 << 30

# what a run does one after the other, with what it holds meanwhile beside what is held always
PHASES = {
    "start": "the model is made",
    "forward": "a step goes forward",  # to the losses' own gradients
    "backward": "a step goes backward",  # through the encoder
    "update": "a step changes weights",
    "save": "a checkpoint is written",
    "refresh": "queries and labels are encoded",
    "cluster": "queries are clustered",
    "mine": "hard negatives are searched",
    "validate": "the validation split is ranked",
    "index": "the search index and the bundle are made",
}
STEP = ("forward", "backward", "update")


@dataclass(frozen=True)
class Item:
    """An amount of memory.

    Attributes:
        name: what it is. place: where it lies.
        num_bytes: how much; formula: how that is reckoned, in figures.
        phases: when it is held; none: always (disk: it stays).
        spare: training goes on without it, only slower: pages of files that the system may drop and read again, a
            snapshot that is written in the background. It counts as used, not as needed.
    """

    name: str
    place: Place
    num_bytes: int
    formula: str
    phases: tuple[str, ...] = ()
    spare: bool = False

    def held(self, phase: str) -> bool:
        """Whether it is held in a phase."""
        return not self.phases or phase in self.phases


@dataclass(frozen=True)
class Plan:
    """The memory that one training takes, on each of its devices and hosts.

    Attributes:
        items: all amounts; with a processor as device what would lie on the device lies in host memory.
        device: "cuda" or "cpu".
        facts: sizes behind the formulas, to be shown.
    """

    items: tuple[Item, ...]
    device: str
    facts: dict[str, Any] = field(default_factory=dict)

    def at(self, place: Place, phase: str, spare: bool = True) -> int:
        """Bytes held at a place in a phase, with or without what can be spared."""
        return sum(i.num_bytes for i in self.items if i.place == place and i.held(phase) and (spare or not i.spare))

    def peak(self, place: Place, spare: bool = False, phases: Iterable[str] = tuple(PHASES)) -> tuple[str, int]:
        """The phase that takes most at a place, and its bytes."""
        totals = {phase: self.at(place, phase, spare) for phase in phases}
        phase = max(totals, key=lambda name: totals[name])
        return phase, totals[phase]

    def named(self, name: str) -> int:
        """Bytes of the items of a name (0: there is none)."""
        return sum(item.num_bytes for item in self.items if item.name == name)

    @property
    def state_bytes(self) -> int:
        """What training keeps from step to step, wherever it lies: weights, tables, their optimisers' state."""
        return sum(item.num_bytes for item in self.items if item.name in STATE)


STATE = (
    "encoder weights", "encoder moments", "head weights", "head moments", "token table", "token table state",
    "classifier table", "classifier state",
)  # fmt: skip


def gib(num_bytes: float) -> str:
    """Bytes for people: "1.23 GiB", small amounts in MiB or KiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= 0.1 * size or unit == "KiB":
            return f"{num_bytes / size:,.2f} {unit}"
    raise AssertionError("every amount is said in KiB at last")


def times(*factors: float) -> str:
    """`times(1300000, 256, 4)` -> "1,300,000 x 256 x 4"."""
    return " x ".join(f"{factor:,}" for factor in factors)
