"""The type of a record that was read back from a file of a run."""

from typing import Any

StoredRecord = dict[str, Any]
"""Values by name, as JSON or Parquet holds them. Their reader knows the type of each name; mypy does not."""
