"""Run 8: `unidec-gpu-paper` at the size of LF-AmazonTitles-131K: two epochs, hence hours for 100,
and the share of a refresh.

    python benchmarks/gpu/08_paper.py
"""

import training
from bench import Section, main

SECTIONS = {"refresh": Section(training.refresh, 200)}

if __name__ == "__main__":
    raise SystemExit(main("08-paper", SECTIONS))
