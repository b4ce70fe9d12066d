"""Data: formats, the stored data set, tokens, propensities, the label graph."""
