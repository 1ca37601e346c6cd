"""Shims that let released versions of Megatron Core run without CUDA, apex or Transformer Engine."""
