"""Comparisons of losses under controlled mismatches, on the real trainer: ``megatron-dppo experiment NAME``."""
