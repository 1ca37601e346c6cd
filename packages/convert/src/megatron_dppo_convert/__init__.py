"""Conversions of weights by the command line: folders, adapters, mixtures of experts, quantized copies."""
