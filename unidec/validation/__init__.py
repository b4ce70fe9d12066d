"""Data validation with Great Expectations."""
