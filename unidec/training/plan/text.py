"""A plan in words: a table on a terminal, plain lines otherwise, and a dictionary for JSON."""

from __future__ import annotations

from typing import Any

from unidec.training.plan.advice import Advice, Shortage
from unidec.training.plan.items import GIB, PHASES, PLACE_NAMES, PLACES, Place, Plan, gib
from unidec.training.plan.machine import Machine


def as_dict(plan: Plan, machine: Machine, short: list[Shortage], advised: Advice | None) -> dict[str, Any]:
    """Everything about a plan, for JSON; bytes are whole numbers, GiB rounded."""
    peaks = {}
    for place in PLACES:
        phase, needed = plan.peak(place)
        if place == "device" and plan.device == "cpu":
            continue
        peaks[place] = {
            "phase": phase, "needed_bytes": needed, "needed_gib": round(needed / GIB, 3),
            "with_spare_gib": round(plan.peak(place, spare=True)[1] / GIB, 3), "free_bytes": machine.free(place),
            "phases_gib": {name: round(plan.at(place, name, False) / GIB, 3) for name in PHASES},
        }  # fmt: skip
    return {
        "device": plan.device, "fits": not short, "state_bytes": plan.state_bytes,
        "state_gib": round(plan.state_bytes / GIB, 3), "peaks": peaks, "facts": plan.facts,
        "items": [{"name": i.name, "place": i.place, "bytes": i.num_bytes, "formula": i.formula,
                   "phases": list(i.phases) or ["always"], "spare": i.spare} for i in plan.items],
        "short": [str(shortage) for shortage in short],
        "advice": None if advised is None else {"settings": advised.settings, "fits": advised.fits,
            "needed_gib": {p: round(advised.plan.peak(p)[1] / GIB, 3) for p in peaks}},
    }  # fmt: skip


def rows_of(plan: Plan, place: Place) -> list[tuple[str, str, str, str, str]]:
    """A place's items, largest first: name, amount, share of the peak, when, formula."""
    phase, total = plan.peak(place)
    rows = []
    for item in sorted((i for i in plan.items if i.place == place), key=lambda i: -i.num_bytes):
        counts = item.held(phase) and not item.spare
        share = f"{item.num_bytes / max(total, 1):.1%}" if counts else "-"
        when = ("spare: " if item.spare else "") + (", ".join(item.phases) or "always")
        rows.append((item.name, gib(item.num_bytes), share, when, item.formula))
    return rows


def heading(plan: Plan, machine: Machine, place: Place) -> str:
    """ "GPU memory: 4.7 GiB at most, while clustering; 15 GiB free"."""
    phase, needed = plan.peak(place)
    free = machine.free(place)
    during = "" if place == "disk" else f" while {PHASES[phase]}"
    there = "" if free is None else f"; {gib(free)} free"
    return f"{PLACE_NAMES[place]}: {gib(needed)} at most{during}{there}"


def verdict(short: list[Shortage], advised: Advice | None) -> list[str]:
    """The last lines: whether it fits, and what would."""
    if not short:
        return ["fits"]
    lines = [f"does not fit: {'; '.join(map(str, short))}"]
    if advised is not None and advised.fits:
        lines.append(f"would fit:  {advised}    ({_needs(advised.plan)})")
    elif advised is not None:
        lines.append(f"the smallest known here does not fit either: {advised}    ({_needs(advised.plan)})")
    return lines


def _needs(plan: Plan) -> str:
    places = [place for place in PLACES if plan.peak(place)[1] and (place != "device" or plan.device == "cuda")]
    return ", ".join(f"{PLACE_NAMES[place]} {gib(plan.peak(place)[1])}" for place in places)


def show(plan: Plan, machine: Machine, last: list[str], times: list[tuple[str, str]]) -> None:
    """Print it: tables on a terminal, one line for each item otherwise."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    places = [place for place in PLACES if place != "device" or plan.device == "cuda"]
    facts = ", ".join(f"{key.replace('_', ' ')} {value:,}" if isinstance(value, int) else f"{key} {value}"
                      for key, value in plan.facts.items())  # fmt: skip
    print(f"plan: {plan.device}, {facts}")
    for place in places:
        rows = rows_of(plan, place)
        if not console.is_terminal:
            print(f"\n{heading(plan, machine, place)}")
            for name, amount, share, when, formula in rows:
                print(f"  {name:<28} {amount:>12} {share:>7}  {when}: {formula}")
            continue
        table = Table(title=heading(plan, machine, place), title_justify="left")
        for column, right in (("what", 0), ("bytes", 1), ("share", 1), ("when", 0), ("reckoned", 0)):
            table.add_column(column, justify="right" if right else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    print(f"\ntraining state (weights, tables, their optimisers): {gib(plan.state_bytes)}")
    for name, value in times:
        print(f"{name}: {value}")
    for line in last:
        print(line)
