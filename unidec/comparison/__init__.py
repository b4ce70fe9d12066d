"""Comparisons: many systems on the same data, split, encoder and seeds, each in its own child
process and folder.
"""
