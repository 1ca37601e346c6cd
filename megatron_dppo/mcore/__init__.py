"""Megatron Core integration: the only package that imports ``megatron``. Call ``compat.shims.apply_shims`` first."""
