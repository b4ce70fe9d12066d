"""Metrics and the report."""
