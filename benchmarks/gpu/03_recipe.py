"""Run 3: the recipe `unidec-gpu` on lf-debian's titles to the end: training, index, fusion,
evaluation. Stopped at its limit it leaves a checkpoint; the same command resumes.

    python benchmarks/gpu/03_recipe.py
"""

from recipes import main

if __name__ == "__main__":
    raise SystemExit(main("03-recipe", ["lf-debian titles/UniDEC + bag/0"], 9.0))
