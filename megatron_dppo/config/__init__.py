"""The configuration: its sections, reading it, and the layout of ranks that follows from it."""
