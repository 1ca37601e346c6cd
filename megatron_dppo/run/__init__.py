"""One training run: preflight checks, folder and lock, loop, checkpoints, processes and watchdog."""
