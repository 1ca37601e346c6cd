"""Programs that run a response's code. They use only the standard library and are started by path."""
