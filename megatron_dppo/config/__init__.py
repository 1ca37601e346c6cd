"""Configuration: sections, loading, and the parallel layout that follows from it."""
