"""Our code for rollouts against simulated servers that fail and lie, on a virtual clock: see ``docs/testing.md``."""
