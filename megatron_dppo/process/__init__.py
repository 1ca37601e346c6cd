"""The processes of a run: one at a time in a folder, restarts, signals, time limits, a rank that hangs."""
