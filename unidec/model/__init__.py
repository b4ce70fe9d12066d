"""Encoders, heads, classifier table, reductions and losses."""
