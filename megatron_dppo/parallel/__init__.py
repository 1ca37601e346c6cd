"""Collective maths over explicit process groups; knows neither Megatron nor any loss."""

from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.vocab_logprobs import vocab_parallel_logprobs_and_entropy

__all__ = ["ParallelGroups", "vocab_parallel_logprobs_and_entropy"]
