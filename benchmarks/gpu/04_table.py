"""Run 4, as often as there is a card: the table that a reader of the papers asks for, a cell after
the other; finished cells are kept.

    python benchmarks/gpu/04_table.py
    python benchmarks/gpu/04_table.py --only "lf-debian titles/DePSL/0"
"""

from recipes import main

if __name__ == "__main__":
    raise SystemExit(main("04-table", ["lf-debian titles/*/0", "lf-debian titles/*"], 9.0))
