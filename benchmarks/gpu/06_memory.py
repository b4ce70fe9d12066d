"""Run 6: peak memory of the papers' largest settings, 450 million rows among them.

python benchmarks/gpu/06_memory.py
"""

import products
from bench import Section, main

SECTIONS = {"memory": Section(products.memory, 120)}

if __name__ == "__main__":
    raise SystemExit(main("06-memory", SECTIONS))
