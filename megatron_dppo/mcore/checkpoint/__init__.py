"""Megatron checkpoints: format, manifest, saving, loading, folders."""
