"""Measures: one question about the stream per file."""
