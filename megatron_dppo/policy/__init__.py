"""The trained policy: packing, optimizer updates, log-probabilities and checkpoints."""
