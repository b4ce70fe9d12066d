"""Run 1: the tests that need a GPU.

    python benchmarks/gpu/01_tests.py

Writes results/gpu-01-tests.md: the counts and the head of each failure. Ends pytest after its
minutes; what it printed until then is kept.
"""

from __future__ import annotations

import subprocess
import sys

from bench import RESULTS, machine

from unidec.data.storage import write_bytes_atomic

SECONDS = 480
# those that need a card; others would import packages that a machine with a card may not have
PLACES = ("tests/model", "tests/training", "tests/faults/test_out_of_memory.py")
COMMAND = "-m pytest -m cuda -q --tb=short -p no:cacheprovider --timeout 120"


def main() -> int:
    """Run the tests; pytest's exit code, 124 if it had to be ended."""
    root = RESULTS.parents[1]
    command = [sys.executable, *COMMAND.split(), *(sys.argv[1:] or PLACES)]
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as tests:
        try:
            said, _ = tests.communicate(timeout=SECONDS)
            code = tests.returncode
        except subprocess.TimeoutExpired:
            tests.kill()
            said, _ = tests.communicate()
            code = 124
    where = ", ".join(f"{key}: {value}" for key, value in machine().items())
    shown = said[-20_000:].strip()
    text = f"# Run 01-tests\n\n{where}\n\nExit code {code}.\n\n```\n{shown}\n```\n"
    write_bytes_atomic(RESULTS / "gpu-01-tests.md", text.encode())
    print(shown)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
