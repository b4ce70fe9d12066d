"""Memory that a training needs, and whether a machine has it."""
