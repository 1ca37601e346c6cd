"""Prompts, and the way from token sequences to packed micro-batches."""
