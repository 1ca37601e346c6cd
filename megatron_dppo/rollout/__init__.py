"""Rollouts: the engine seam and what is done with its answers. Imports no engine and no Megatron."""
