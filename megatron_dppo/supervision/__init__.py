"""What keeps a run whole from outside of it: signals, hangs, child processes, the lock of its folder."""
