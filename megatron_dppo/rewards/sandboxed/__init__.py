"""Programs that run a response's code: standard library alone, started by path, none of our own imports."""
