"""The Megatron seam: the only folder that imports ``megatron``. Apply ``compat.apply_shims`` first."""
