"""A step's samples as a Parquet file, and back."""
