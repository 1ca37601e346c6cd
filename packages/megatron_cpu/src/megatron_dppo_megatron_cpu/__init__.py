"""Released Megatron Core on a CPU. Call ``shims.apply_shims`` before anything imports ``megatron.core``."""
