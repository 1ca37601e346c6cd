"""Hugging Face folders of a policy: weights, adapters, quantized copies."""
