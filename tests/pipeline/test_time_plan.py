"""The time of a run at scale: measured figures, their interpolation, and division by machines."""

import json
from pathlib import Path

import pytest

from unidec.config import Params
from unidec.pipeline.data_sizes import Sizes
from unidec.pipeline.memory_plan import plan_command
from unidec.pipeline.time_plan import MEASURED, STAGES, plan_time, seconds_a_row

KEYS = ("hours", "machine_hours")
RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def hours_of(queries: int, labels: int, machines: int = 1) -> dict[str, float]:
    sizes = Sizes.given(labels, queries, tokens=8)
    return {time.name: time.hours for time in plan_time(sizes, machines)}


def test_the_figures_are_those_of_the_result_files():
    results = [json.loads((RESULTS / f"scale_run_{k}.json").read_text()) for k in (5, 6, 7)]
    assert tuple(result["size"]["labels"] for result in results) == MEASURED
    cells = [result["cells"] for result in results]
    stages = {stage.name: tuple(stage.seconds) for stage in STAGES}
    for name in ("ingest", "validate", "index"):
        assert stages[name] == tuple(cell[name]["seconds"] for cell in cells)
    # a tenth of the queries were predicted
    predicted = [10 * cell["predict"]["seconds"] for cell in cells]
    assert stages["predict all queries"] == pytest.approx(predicted)
    # parts of the training: table "part of training" of scale.md
    page = (RESULTS / "scale.md").read_text()
    parts = {"encode queries", "encode labels", "cluster", "mine", "steps of an epoch"}
    for part in parts:
        seconds = " | ".join(f"{s:,g}" for s in stages[part])
        assert seconds in page.replace(" (exact)", ""), part
    for k in range(len(MEASURED)):
        whole = sum(stages[part][k] for part in parts)
        assert 0.6 * cells[k]["train"]["seconds"] < whole < cells[k]["train"]["seconds"]


@pytest.mark.parametrize("k", range(3))
def test_measured_sizes_take_the_measured_time(k):
    hours = hours_of(MEASURED[k], MEASURED[k])
    assert hours == pytest.approx({s.name: s.seconds[k] / 3600 for s in STAGES})


def test_beyond_the_largest_size_growth_continues():
    hours = hours_of(10**8, 10**8)
    for stage in STAGES:
        growth = stage.seconds[2] / stage.seconds[1] if stage.grows else 10
        assert hours[stage.name] == pytest.approx(stage.seconds[2] * growth / 3600)


def test_between_two_sizes_the_time_lies_between_theirs():
    for stage in STAGES:
        few, middle, many = (seconds_a_row(stage, n) for n in (10**6, 3 * 10**6, 10**7))
        assert few < middle < many or few > middle > many


def test_each_stage_takes_time_by_its_own_rows():
    once = hours_of(10**7, 10**7)
    twice = hours_of(2 * 10**7, 10**7)
    assert twice["mine"] == pytest.approx(2 * once["mine"])
    assert twice["index"] == once["index"]
    assert twice["ingest"] == pytest.approx(1.5 * once["ingest"])


def test_machines_divide_what_torchrun_and_shards_divide():
    one = hours_of(10**7, 10**7)
    shares = {"ingest": 0.0, "validate": 0.7, "index": 0.6}
    for time in plan_time(Sizes.given(10**7, 10**7, tokens=8), machines=64):
        whole = one[time.name]
        share = shares.get(time.name, 1.0)
        assert time.machine_hours == pytest.approx(whole)
        assert time.hours == pytest.approx(whole * (1 - share) + whole * share / 64)
        assert time.machines == (64 if share else 1)


def test_the_command_prints_each_stage_and_their_sum():
    sizes = {"labels": 10**8, "queries": 10**9, "tokens": 8}
    params = Params.model_validate({"encoder": {"kind": "bag"}, "model": {"dim": 64}})
    plan = plan_command(params, **sizes, machines=64)
    lines = plan.lines()
    begin = lines.index("stage                   machines       hours   machine hours")
    printed = {line[:22].strip(): line[22:].split() for line in lines[begin + 1 :]}
    assert printed.pop("all") == [f"{sum(getattr(t, k) for t in plan.times):.1f}" for k in KEYS]
    assert printed == {
        t.name: [str(t.machines), f"{t.hours:.1f}", f"{t.machine_hours:.1f}"] for t in plan.times
    }
    assert plan.as_dict()["times"][0].keys() == {"name", "machines", *KEYS}
    assert plan_command(params, **sizes).times == ()
