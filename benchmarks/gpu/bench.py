"""What the runs of this folder share: sizes, figures with their origin, clocks, trainers on
synthetic data, and the command line of a run.

Everything takes the device as a value; what only CUDA has is behind the functions at the head of
this file. Nothing is downloaded: encoders have random weights (the tokenizer is that of extra
`minilm`), data are synthetic. Times of a step do not depend on the weights' values."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.append(str(Path(__file__).resolve().parents[1]))
from measure import machine, table
from synthetic import Synthetic, Words, write_dataset, write_encoder, write_tokens

from unidec.config import Params, load_params
from unidec.data.dataset import XMCDataset
from unidec.data.storage import write_bytes_atomic
from unidec.data.tokens import TokenCache
from unidec.model.batch import Prepared
from unidec.model.sources import resolve_encoder
from unidec.training.precision import choose_device
from unidec.training.round_refresh import Refresh
from unidec.training.trainer import Trainer, TrainingData

LATE = 40  # seconds after the last section should have ended
RESULTS = Path(__file__).resolve().parents[1] / "results"
MAX_LENGTH = 32  # tokens of a text
MINILM = "all-MiniLM-L6-v2"  # its tokenizer comes with extra `minilm`; no weights of it are used


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """How long it takes, the device's work included."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - begin


def queued_seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """How long the host takes to queue its work for the device."""
    synchronize(device)
    begin = time.perf_counter()
    run()
    taken = time.perf_counter() - begin
    synchronize(device)
    return taken


def start_peak(device: torch.device) -> None:
    """Measure the peak of allocated memory from here on."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes that tensors held on a GPU since `start_peak`; 0 without one."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def free_bytes(device: torch.device) -> int:
    """Of the GPU, with what torch keeps for later."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def clean_up(device: torch.device) -> None:
    """After a section, whatever became of it: its memory is free, and nothing is refused any
    longer.
    """
    if device.type == "cuda":
        gc.collect()
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """For the table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"


class Launches(TorchDispatchMode):
    """Counts operators that are neither views nor allocations: about what a GPU is given to do."""

    FREE = ("empty", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view", "_record_fun")

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and not name.startswith(self.FREE):
            self.by_name[name] += 1
        return func(*args, **(kwargs or {}))


def launches(device: torch.device, run: Callable[[], Any]) -> int:
    """Kernels that a GPU is given; without one operators."""
    if device.type != "cuda":
        with Launches() as counted:
            run()
        return counted.by_name.total()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        run()
        synchronize(device)
    return sum(each.count for each in profiled.key_averages() if "LaunchKernel" in each.key)


@dataclass(frozen=True)
class Sizes:
    """How large the sections are.

    Attributes:
        hidden, layers: of the DistilBERT that trains, with random weights.
        train, labels, batch, pool, dim: of the step, the refresh and what compile brings.
        steps: whole steps that are timed.
        small: queries, labels, batch and pool of what is compared with the CPU; its encoder is
        small too.
        search: labels, queries and their width, of search and mining.
        compiler: torch.compile's backend.
    """

    hidden: int
    layers: int
    train: int
    labels: int
    batch: int
    pool: int
    dim: int
    steps: int
    small: tuple[int, int, int, int]
    search: tuple[int, int, int]
    compiler: str = "inductor"


SIZES = {
    # LF-AmazonTitles-131K as published: 294,805 queries, batches of N / 2^8 = 1,152
    "card": Sizes(
        768,
        6,
        294_805,
        131_073,
        1024,
        3000,
        384,
        20,
        (2048, 2000, 256, 700),
        (1_305_265, 8192, 384),
    ),
    "tiny": Sizes(64, 1, 96, 60, 16, 40, 16, 2, (96, 60, 16, 40), (300, 24, 16), "eager"),
}


@dataclass(frozen=True)
class Figure:
    """A line of the table.

    Attributes:
        section, what, value: what was found; a number is rounded for people only in the table.
        origin: "measured on ...", "computed ..."; sizes: what it was taken at.
        goal: in words, "" where there is none; ok: whether it is met, None where it cannot be said
        here.
    """

    section: str
    what: str
    value: float | str
    unit: str
    origin: str
    sizes: str
    goal: str = ""
    ok: bool | None = None


def stored_data(train: int, labels: int, folder: Path) -> tuple[XMCDataset, TokenCache, TokenCache]:
    """Synthetic data and their tokens in a folder."""
    data = Synthetic(Words(), train, max(1, train // 20), labels)
    caches = []
    write_dataset(data, folder / "dataset")
    for which in ("queries", "labels"):
        write_tokens(data, folder / which, which, resolve_encoder(MINILM), MAX_LENGTH)
        caches.append(TokenCache.open(folder / which, verify=False))
    return XMCDataset.open(folder / "dataset", verify=False), caches[0], caches[1]


@dataclass
class Bench:
    """What a section is given.

    Attributes:
        device: where it runs; sizes: how large; folder: for its data, which sections share.
        until: `time.monotonic()` when the time is over.
        section: its name; figures: what all sections found; save: writes them, after each section.
    """

    device: torch.device
    sizes: Sizes
    folder: Path
    until: float = float("inf")
    section: str = ""
    figures: list[Figure] = field(default_factory=list)
    save: Callable[[], Any] | None = None
    _data: dict[tuple[int, int], tuple[XMCDataset, TokenCache, TokenCache]] = field(
        default_factory=dict
    )

    @property
    def on_card(self) -> bool:
        return self.device.type == "cuda"

    @property
    def left(self) -> float:
        """Seconds."""
        return self.until - time.monotonic()

    def add(
        self,
        what: str,
        value: float | str,
        unit: str,
        sizes: str,
        *,
        most: float | None = None,
        judged: bool = True,
        origin: str = "",
    ) -> None:
        """Take down a figure of this section.

        Args:
            most: its goal, at most so much; `judged`: whether being above it counts here.
            origin: where it is not measured on the device.
        """
        goal = "" if most is None else f"at most {most:g}"
        ok = float(value) <= most if most is not None and judged else None  # NaN is not
        origin = origin or f"measured on {device_name(self.device)}"
        self.figures.append(Figure(self.section, what, value, unit, origin, sizes, goal, ok))

    def encoder(self, hidden: int, layers: int, *, to_compare: bool = False) -> Path:
        """A DistilBERT of random weights. What is compared between devices has no dropout, since
        they draw other numbers, and weights five times as wide, so that its attention attends.
        """
        folder = self.folder / f"encoder-{hidden}-{layers}{'-to-compare' * to_compare}"
        if folder.is_dir():
            return folder
        write_encoder(
            folder,
            hidden=hidden,
            layers=layers,
            tokenizer_from=resolve_encoder(MINILM),
            kind="distilbert",
        )
        if to_compare:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config |= {"dropout": 0.0, "attention_dropout": 0.0}
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
            weights = load_file(folder / "model.safetensors")
            wider = {
                name: 5 * weight if weight.ndim == 2 else weight for name, weight in weights.items()
            }
            save_file(wider, folder / "model.safetensors", {"format": "pt"})
        return folder

    def params(self, recipe: str, **overrides: Any) -> Params:
        """A recipe at this bench's sizes, on its device."""
        sizes = self.sizes
        file = self.folder / f"{recipe}.yaml"
        file.write_text(f"recipe: {recipe}\n", encoding="utf-8")
        return load_params(
            file,
            {
                "device": self.device.type,
                "encoder.name": str(self.encoder(sizes.hidden, sizes.layers)),
                "tokens.max_length": MAX_LENGTH,
                "pool.batch_size": sizes.batch,
                "pool.start_epoch": 0,  # clusters and hard negatives from the first step on
                "pool.size": sizes.pool,
                "model.dim": sizes.dim,
            }
            | overrides,
        )

    def data(self, train: int, labels: int) -> tuple[XMCDataset, TokenCache, TokenCache]:
        """Synthetic data and their tokens, made once."""
        if (train, labels) not in self._data:
            folder = self.folder / f"data-{train}-{labels}"
            folder.mkdir()
            self._data[train, labels] = stored_data(train, labels, folder)
        return self._data[train, labels]

    def trainer(self, params: Params, train: int = 0, labels: int = 0) -> Trainer:
        """A new run; before batches are drawn it needs a refresh (`uniform`, or its own)."""
        run = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        data = TrainingData(*self.data(train or self.sizes.train, labels or self.sizes.labels))
        trainer = Trainer(params.training, data, run, run / "cache")
        trainer.model.train()
        return trainer


def uniform(trainer: Trainer) -> Refresh:
    """Random batches and uniform hard negatives, in place of a refresh: two thirds of a pool lie
    anywhere.
    """
    pool = trainer.settings.pool
    data = trainer.dataset
    shape = (data.num_queries, max(1, pool.eta * pool.refresh))
    return Refresh(
        negatives=np.random.default_rng(0).integers(0, data.num_labels, shape, dtype=np.int32)
    )


def some_batches(trainer: Trainer, count: int) -> list[Prepared]:
    """The first batches of the round, on the device."""
    rows = trainer.made.batches(trainer.rows, trainer.batch_size, trainer.settings.seed, 0)
    return [trainer.prepare(rows[number % len(rows)], number) for number in range(count)]


def train(trainer: Trainer, batches: Iterable[Prepared]) -> None:
    """The trainer's own steps."""
    for batch in batches:
        trainer.train_step(batch)
        trainer.at.step += 1


def of_step(trainer: Trainer, batch: Prepared) -> str:
    """A step's sizes in words."""
    return (
        f"{len(batch.pool.rows_B)} queries, {len(batch.pool.pool_S)} pool labels, "
        f"{batch.counts.tokens} tokens, "
        f"{trainer.dataset.num_labels} labels, {trainer.settings.optim.precision}"
    )


@dataclass(frozen=True)
class Section:
    """A part of the program.

    Attributes:
        run: adds figures to the bench.
        seconds: that it needs on the card, as a guess for the time budget.
        check: its failure is the program's.
    """

    run: Callable[[Bench], None]
    seconds: float
    check: bool = False


def run_sections(bench: Bench, sections: Mapping[str, Section]) -> int:
    """Run sections one after the other; the exit code: 1 if a check failed."""
    failed = False
    for name, section in sections.items():
        begin = time.monotonic()
        bench.section, first = name, len(bench.figures)
        needed = section.seconds if bench.on_card else 0
        if bench.left < needed:
            why = f"{max(0.0, bench.left):.0f} s left, about {needed:g} s needed"
            bench.figures.append(Figure(name, "skipped", why, "", "nothing was run", "", "", None))
            continue
        print(f"{name} ...", flush=True)
        try:
            section.run(bench)
        except Exception as error:  # whatever it is, the other sections run
            traceback.print_exc()
            what = f"{type(error).__name__}: {str(error)[:300]}"
            bench.figures.append(
                Figure(name, "failed", what, "", "an error", "", "no error", False)
            )
        clean_up(bench.device)
        if bench.save is not None:
            bench.save()
        failed |= section.check and any(figure.ok is False for figure in bench.figures[first:])
        took = time.monotonic() - begin
        bench.figures.append(Figure(name, "the section took", took, "s", "measured", ""))
    return int(failed)


def as_table(figures: Sequence[Figure]) -> str:
    """In Markdown."""
    verdict = {None: "", True: "met", False: "**not met**"}
    rows = [
        (f.section, f.what, _shown(f.value), f.unit, f.goal, verdict[f.ok], f.origin, f.sizes)
        for f in figures
    ]
    return table(("section", "figure", "value", "unit", "goal", "verdict", "origin", "sizes"), rows)


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value.replace("|", "/").replace("\n", "; ")
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def write(out: Path, bench: Bench, form: str) -> str:
    """`<out>.md`; the table."""
    found = as_table(bench.figures)
    loads = " ".join(f"{load:.1f}" for load in os.getloadavg())
    about = machine() | {"load of the last minutes": loads}
    out.parent.mkdir(parents=True, exist_ok=True)
    where = ", ".join(f"{key}: {value}" for key, value in about.items())
    text = f"# Run {out.name}, form `{form}`\n\n{where}\n\n{found}\n"
    write_bytes_atomic(out.with_name(f"{out.name}.md"), text.encode())
    return found


def end_late(bench: Bench) -> None:
    """End the process in the middle of a section, with what was found so far."""
    what = "ended in the middle: the time is over"
    bench.figures.append(Figure(bench.section, "failed", what, "", "an error", "", "", False))
    assert bench.save is not None
    print(bench.save(), flush=True)
    os._exit(124)


def main(name: str, sections: Mapping[str, Section], words: Sequence[str] | None = None) -> int:
    """The command line of a run; its exit code."""
    parser = argparse.ArgumentParser(description=f"run {name}")
    parser.add_argument("--only", action="append", choices=list(sections), help="this section")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="sections that would not fit are skipped (9)"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS / f"gpu-{name}", help="of the file, without ending"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--form", choices=list(SIZES), help="sizes (card with a GPU, else tiny)")
    options = parser.parse_args(words)
    until = time.monotonic() + 60 * options.minutes
    device = choose_device(options.device)
    form = options.form or ("card" if device.type == "cuda" else "tiny")
    with tempfile.TemporaryDirectory(prefix="unidec-gpu-") as folder:
        bench = Bench(device, SIZES[form], Path(folder), until)
        bench.save = lambda: write(options.out, bench, form)
        late = threading.Timer(60 * options.minutes + LATE, end_late, [bench])
        late.daemon = True
        late.start()
        torch.manual_seed(0)
        chosen = {each: sections[each] for each in options.only or sections}
        code = run_sections(bench, chosen)
        late.cancel()
        print(write(options.out, bench, form))
    return code
