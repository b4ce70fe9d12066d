"""What `time_to_quality.py` found: seconds until each figure of the rival, a page in Markdown, and a picture."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scale import table

from unidec.data.storage import write_bytes_atomic, write_json
from unidec.evaluation.figures import COLOURS, Chart

RIVAL, TARGET = "sentence-transformers", "nDCG@5"
SHOWN = ("P@1", "nDCG@5", "PSP@5", "R@100")
GOAL = 0.2  # of the rival's time, to reach its best figure
APART = 1.0  # points of the target between two lines of the table of times
Point = dict[str, float]
Found = Mapping[str, Any]
"""{"recipes": {name: what `train_ours` gives}, "trials": [what `train_rival` gives], "rival": the same}."""


# -- times ------------------------------------------------------------------------------------------------------------


def frontier(points: Sequence[Point]) -> list[Point]:
    """By seconds, the points that are better than all before them."""
    best: list[Point] = []
    for point in sorted(points, key=lambda point: point["seconds"]):
        if not best or point[TARGET] > best[-1][TARGET]:
            best.append(point)
    return best


def seconds_to(points: Sequence[Point], target: float) -> float | None:
    """Seconds of the first point that is at least as good; None where none is."""
    return min((point["seconds"] for point in points if point[TARGET] >= target), default=None)


def curves(found: Found) -> dict[str, list[Point]]:
    """Points of each of ours by name: the heads in training, and what is served, one point."""
    named: dict[str, list[Point]] = {}
    for name, result in found["recipes"].items():
        named |= {name: result["curve"], f"{name}, served": [result["served"]]}
    return named


def times(found: Found) -> list[dict[str, Any]]:
    """Seconds until figures of the rival were reached, by it and by ours (None: never): {"figure", RIVAL, name, ...}.

    The rival's seconds are those of the best of all its trainings. The last figure is its best of all; from there
    down every figure is at least `APART` below the one after it.
    """
    best = frontier([point for result in (*found["trials"], found["rival"]) for point in result["curve"]])
    levels = best[-1:]
    for point in reversed(best):
        if levels[0][TARGET] - point[TARGET] >= APART:
            levels.insert(0, point)
    lines = []
    for level in levels:
        ours = {name: seconds_to(points, level[TARGET]) for name, points in curves(found).items()}
        lines.append({"figure": level[TARGET], RIVAL: level["seconds"], **ours})
    return lines


# -- the page ---------------------------------------------------------------------------------------------------------

PAGE = """# Quality against time: our recipes beside sentence-transformers

`{command}`: {data}. {machine}. One run of each, one after the other.

{verdict}

![{target} against minutes of training]({picture})

{systems}

Seconds: of training, with tokens, vectors of frozen layers, refreshes and checkpoints; served: with export, index and
fusion too. "Validation" is {target} of the validation split, the others are of the test split; percent, filtered pairs
removed, exact search over all labels. The fusion learns from the validation queries: its figure there is of queries
that each of its networks had not seen.

## Seconds until each {target} of {rival}

{times}

In brackets: share of the rival's time. Nothing is interpolated: the first measured point that is at least as good
counts. The rival's time is that of the best of all its trainings, short ones included; its first
figure is that of the model as it comes.

## How each was trained

{trainings}
"""


def page(result: Mapping[str, Any], picture: str) -> str:
    """The Markdown page. `picture`: the file's name."""
    found = result["found"]
    return PAGE.format(
        **result["settings"], machine=", ".join(f"{key}: {value}" for key, value in result["machine"].items()),
        verdict=verdict(result["times"]), target=TARGET, rival=RIVAL, picture=picture, systems=_systems(found),
        times=_times(result["times"]), trainings="\n".join(f"- {line}" for line in _trainings(found)),
    )  # fmt: skip


def verdict(lines: Sequence[Mapping[str, Any]]) -> str:
    """Whether each of ours reaches the rival's best figure in `GOAL` of its time, in a sentence each."""
    last = lines[-1]
    said = [f"The best {TARGET} of {RIVAL} on the validation split is {last['figure']:.1f}, after {last[RIVAL]:.0f} s."]
    for name, seconds in last.items():
        if name in ("figure", RIVAL):
            continue
        if seconds is None:
            said.append(f"`{name}` does not reach it.")
            continue
        met = "met" if seconds <= GOAL * last[RIVAL] else "not met"
        said.append(f"`{name}` reaches it after {seconds:.0f} s (goal of {GOAL:g} of that time: {met}).")
    return " ".join(said)


def _systems(found: Found) -> str:
    """A line for each system as it ended."""
    rival, rows = found["rival"], []
    what = f"every layer: {_millions(rival['trained'])}"
    rows.append((RIVAL, what, rival["curve"][-1], rival["test"]))
    for name, own in found["recipes"].items():
        what = f"{', '.join(_parts(own['asked']['params']))}: {_millions(own['trained'])}; frozen: "
        rows.append((f"`{name}`, heads", what + _millions(own["frozen"]), own["curve"][-1], own["test"]["heads"]))
        rows.append((f"`{name}`, served", "the same", own["served"], own["test"]["served"]))
    lines: list[tuple[str, ...]] = []
    for system, what, end, test in rows:
        figures = (f"{test[metric]:.1f}" for metric in SHOWN)
        lines.append((system, what, f"{end['seconds']:.0f}", f"{end[TARGET]:.1f}", *figures))
    return table(("system", "what trains: numbers", "seconds", "validation", *SHOWN), lines)


def _millions(count: float) -> str:
    return f"{count / 1e6:.1f} million"


def _parts(params: Mapping[str, Any]) -> list[str]:
    """What of a recipe's model trains."""
    encoder, heads = params["encoder"], params["model"]["heads"]
    parts = {
        "a bag of tokens": encoder["kind"] != "transformer" and not encoder["frozen"],
        "layers of the transformer": encoder["kind"] != "bag" and encoder["trainable_layers"] != 0,
        "the dual encoder's head": heads != "clf",
        "the classifier's head and rows": heads != "de",
    }
    return [part for part, trains in parts.items() if trains]


def _times(lines: Sequence[Mapping[str, Any]]) -> str:
    names = [name for name in lines[0] if name not in ("figure", RIVAL)]
    rows: list[tuple[str, ...]] = []
    for line in lines:
        cells = (_seconds(line[name], line[RIVAL]) for name in names)
        rows.append((f"{line['figure']:.1f}", f"{line[RIVAL]:.0f}", *cells))
    return table((TARGET, RIVAL, *names), rows)


def _seconds(seconds: float | None, of_rival: float) -> str:
    if seconds is None:
        return "not reached"
    return f"{seconds:.0f} ({seconds / of_rival:.2f})" if of_rival else f"{seconds:.0f}"


def _trainings(found: Found) -> list[str]:
    """Settings of each, the learning rates that the rival tried, and seconds by part of ours."""
    rival = found["rival"]
    asked, end = rival["asked"], rival["curve"][-1]
    lines = [
        f"{rival['version']}: all layers of the transformer by MultipleNegativesRankingLoss on {rival['pairs']:,} "
        f"pairs of a query's and a label's text, no text twice in a batch of {asked['batch_size']}; AdamW, learning "
        f"rate {asked['learning_rate']:g}, 10 % warm-up, linear decay; {asked['max_length']} tokens, "
        f"{asked['precision']}; {end['steps']} steps, {end['epochs']:.2f} epochs."
    ]
    if trials := found["trials"]:
        tried = {run["asked"]["learning_rate"]: run["curve"][-1][TARGET] for run in trials}
        figures = ", ".join(f"{rate:g}: {figure:.1f}" for rate, figure in tried.items())
        minutes = trials[0]["asked"]["seconds"] / 60
        line = (
            f"Its learning rate is the best of {len(tried)} trainings of {minutes:g} minutes ({TARGET}, validation): "
        )
        at_edge = asked["learning_rate"] in (min(tried), max(tried))
        lines.append(f"{line}{figures}." + (" It is at the edge of what was tried." if at_edge else ""))
    for name, own in found["recipes"].items():
        parts = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in own["parts"].items())
        lines.append(f"`{name}`: {own['curve'][-1]['epochs']:g} epochs; {parts}.")
    return lines


# -- the picture ------------------------------------------------------------------------------------------------------


def chart(found: Found) -> Chart:
    """Figures of the validation split against minutes of training."""
    orange, *ours = COLOURS[1], COLOURS[0], COLOURS[2]

    def draw(axes: Any) -> None:
        ends = [trial["curve"][-1] for trial in found["trials"]]
        if ends:
            label = f"{RIVAL}: by learning rate"
            axes.plot(*_minutes(ends), linestyle="", marker="o", fillstyle="none", color=orange, label=label)
        axes.plot(*_minutes(found["rival"]["curve"]), marker="o", color=orange, label=RIVAL)
        for colour, (name, result) in zip(ours, found["recipes"].items()):
            served = result["served"]
            axes.plot(*_minutes(result["curve"]), marker="o", color=colour, label=f"{name}: heads")
            axes.plot(*_minutes([result["curve"][-1], served]), linestyle=":", color=colour)
            axes.plot(*_minutes([served]), linestyle="", marker="D", color=colour, label=f"{name}: served")
        axes.set(xlabel="minutes of training", ylabel=f"{TARGET}, validation split (percent)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", frameon=False)

    return Chart("", f"{TARGET} against minutes of training", (), draw, 3.8)


def _minutes(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [point["seconds"] / 60 for point in points], [point[TARGET] for point in points]


# -- files ------------------------------------------------------------------------------------------------------------


def write(out: Path, result: Mapping[str, Any]) -> str:
    """Write `<out>.json`, `<out>.svg` and `<out>.md`; gives the page.

    Args:
        result: {"machine", "settings": {"command", "data"}, "times", "found"}.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    found = result["found"]
    image = base64.b64decode(chart(found).image().partition(",")[2])
    text = page(result, f"{out.name}.svg")
    trainings = {"rival": found["rival"], **{f"trial {n}": run for n, run in enumerate(found["trials"], 1)}}
    plain = {name: _without_places(run) for name, run in (trainings | found["recipes"]).items()}
    write_json(out.with_name(f"{out.name}.json"), {**result, "found": plain})
    write_bytes_atomic(out.with_name(f"{out.name}.svg"), image)
    write_bytes_atomic(out.with_name(f"{out.name}.md"), text.encode())
    return text


def _without_places(training: Mapping[str, Any]) -> dict[str, Any]:
    """Without folders of this machine, and without the parameters, which have some too."""
    asked = {key: value for key, value in training["asked"].items() if key not in ("task", "encoder", "params")}
    return {**training, "asked": asked}
