"""Run 3: the recipe `unidec-gpu` on lf-debian's titles to the end: training, index, fusion,
evaluation; then the form of the CPU, with a frozen transformer, alone and taught by its bundle.
Stopped at its limit it leaves a checkpoint; the same command resumes.

    python benchmarks/gpu/03_recipe.py
"""

from recipes import main

TEACHER = "lf-debian titles/UniDEC + bag/0"
STUDENT = "lf-debian titles/frozen transformer + bag/0"

if __name__ == "__main__":
    raise SystemExit(main("03-recipe", [TEACHER, STUDENT], 9.0, taught=STUDENT))
