"""Collective maths over explicit process groups; knows neither Megatron nor any loss."""

from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.vocab_logprobs import vocab_parallel_logprobs_and_entropy
from megatron_dppo.parallel.vocab_topk import VocabStatistics, vocab_parallel_statistics, vocab_parallel_topk

__all__ = [
    "ParallelGroups",
    "VocabStatistics",
    "vocab_parallel_logprobs_and_entropy",
    "vocab_parallel_statistics",
    "vocab_parallel_topk",
]
