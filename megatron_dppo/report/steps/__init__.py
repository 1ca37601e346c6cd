"""Samples of a step as a Parquet file: writing and reading."""
