"""What belongs to one run: the checks before it, its folder and lock, its starts, updates, processes and hangs."""
