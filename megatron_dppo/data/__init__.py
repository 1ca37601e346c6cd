"""Prompts, supervised examples, and the way from token sequences to packed micro-batches."""
