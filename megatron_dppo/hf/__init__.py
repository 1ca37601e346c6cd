"""Hugging Face folders: configuration, weights, tokenizer files, model families."""
