"""What the library does on a GPU, in ten minutes: right, fast, without waiting, within memory.

    python benchmarks/gpu.py  # the card; without one, its small form on the processor
    python benchmarks/gpu.py --only step --only refresh
    python benchmarks/gpu.py --out benchmarks/results/gpu-cpu-form

Prints a table and writes <out>.json and <out>.md. Each figure names its origin: measured on a
device, or computed. A section that fails, or for which no time is left, is a line of the table, and
the others run. The exit code is 1 if `correctness` or `synchronisations` failed: a figure beyond
its tolerance, or an error.

Nothing is downloaded: encoders have random weights (the tokenizer is that of extra `minilm`), data
are synthetic. Times of a step do not depend on the weights' values; quality is not measured here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gpu_products
import gpu_training
import torch
from gpu_bench import SIZES, Bench, Figure, clean_up
from measure import machine, table

from unidec.data.storage import write_bytes_atomic, write_json
from unidec.training.precision import choose_device

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Section:
    """A part of the program.

    Attributes:
        run: adds figures to the bench.
        seconds: that it needs on the card and in the form of the processor, as a guess for the time
        budget.
        check: its failure is the program's.
    """

    run: Callable[[Bench], None]
    seconds: tuple[float, float]
    check: bool = False


SECTIONS = {
    "correctness": Section(gpu_training.correctness, (60, 30), check=True),
    "synchronisations": Section(gpu_training.synchronisations, (30, 20), check=True),
    "step": Section(gpu_training.step, (90, 50)),
    "chunks": Section(gpu_training.chunks, (60, 20)),
    "refresh": Section(gpu_training.refresh, (90, 20)),
    "search": Section(gpu_products.search, (40, 30)),
    "bf16": Section(gpu_products.bf16, (10, 10)),
    "memory": Section(gpu_products.memory, (90, 20)),
    "compile": Section(gpu_training.compile_encoder, (120, 90)),
}


def run_sections(bench: Bench, names: Sequence[str]) -> int:
    """Run some sections one after the other; the exit code."""
    failed = False
    for name in names:
        section = SECTIONS[name]
        begin = time.monotonic()
        bench.section, first = name, len(bench.figures)
        needed = section.seconds[0 if bench.on_card else 1]
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
    """`<out>.json` and `<out>.md`; the table."""
    found = as_table(bench.figures)
    about = {
        **machine(),
        "load of the last minutes": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }
    facts = {
        "form": form,
        "machine": about,
        "figures": [asdict(figure) for figure in bench.figures],
    }
    write_json(out.with_name(f"{out.name}.json"), facts)
    where = ", ".join(f"{key}: {value}" for key, value in about.items())
    text = f"# `benchmarks/gpu.py`, form `{form}`\n\n{where}\n\n{found}\n"
    write_bytes_atomic(out.with_name(f"{out.name}.md"), text.encode())
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run the program; its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="this section; may be repeated"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="sections that would not fit are skipped (10)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RESULTS / "gpu-card",
        help="of the two files, without their ending",
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--form", choices=list(SIZES), help="sizes (card with a GPU, else cpu)")
    options = parser.parse_args(words)
    until = time.monotonic() + 60 * options.minutes
    device = choose_device(options.device)
    form = options.form or ("card" if device.type == "cuda" else "cpu")
    with tempfile.TemporaryDirectory(prefix="unidec-gpu-") as folder:
        bench = Bench(device, SIZES[form], Path(folder), until)
        torch.manual_seed(0)
        code = run_sections(
            bench, [name for name in SECTIONS if not options.only or name in options.only]
        )
        options.out.parent.mkdir(parents=True, exist_ok=True)
        print(write(options.out, bench, form))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
