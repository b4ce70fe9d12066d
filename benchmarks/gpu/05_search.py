"""Run 5: exact search and mining among 1.3 million labels beside faiss.

python benchmarks/gpu/05_search.py
"""

import products
from bench import Section, main

SECTIONS = {"search": Section(products.search, 150)}

if __name__ == "__main__":
    raise SystemExit(main("05-search", SECTIONS))
