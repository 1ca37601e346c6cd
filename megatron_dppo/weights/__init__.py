"""Weights of the policy to engines and files: sync, proof, probe, conversion, quantization."""
