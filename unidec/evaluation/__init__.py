"""Metrics, significance tests, drift, and HTML reports."""
