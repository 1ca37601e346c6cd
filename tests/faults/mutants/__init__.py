"""The simulation against changed copies of the package: see ``docs/testing.md``."""
