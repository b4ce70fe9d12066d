"""Run 7: LF-AmazonTitles-1.3M's size from raw files to evaluation, with synthetic text and one
epoch of UniDEC on MiniLM; further options are those of `published.py stand-in`.

    python benchmarks/gpu/07_scale.py
    python benchmarks/gpu/07_scale.py --share 0.001 --steps 20    # a rehearsal
"""

import subprocess
import sys

from bench import RESULTS

PROGRAM = [sys.executable, str(RESULTS.parent / "published.py"), "stand-in", "LF-AmazonTitles-1.3M"]
ONE_EPOCH = "--share 1 --steps 2048 --batch 1098 --encoder all-MiniLM-L6-v2 --minutes 9.5"

if __name__ == "__main__":
    output = ["--output", str(RESULTS / "gpu-07-scale.md")]
    raise SystemExit(subprocess.call([*PROGRAM, *ONE_EPOCH.split(), *output, *sys.argv[1:]]))
