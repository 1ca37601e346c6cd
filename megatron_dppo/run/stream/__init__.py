"""Where the rollouts of a step come from."""
