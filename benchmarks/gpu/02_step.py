"""Run 2: does the card compute what the CPU does, without waiting, and how long does a step take?

    python benchmarks/gpu/02_step.py

The exit code is 1 if `correctness` or `synchronisations` failed.
"""

import training
from bench import Section, main

SECTIONS = {
    "correctness": Section(training.correctness, 60, check=True),
    "synchronisations": Section(training.synchronisations, 30, check=True),
    "counts": Section(training.counts, 20),
    "step": Section(training.step, 400),
}

if __name__ == "__main__":
    raise SystemExit(main("02-step", SECTIONS))
