"""Starting inference servers from a run's configuration: their command lines, and the processes. No torch needed."""
