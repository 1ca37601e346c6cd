"""Server of the Tinker API: a client's training loop with this package's model, losses, optimizer and engine."""
