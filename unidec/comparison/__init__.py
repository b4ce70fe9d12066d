"""Comparisons: many systems on the same data, split, encoder and seeds, each a child process in a folder of its own."""
