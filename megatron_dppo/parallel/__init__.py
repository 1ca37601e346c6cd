"""Collective maths over explicit process groups; knows neither Megatron nor any loss."""

from megatron_dppo.parallel.fused_head import HeadStatistics, loss_inputs, vocab_parallel_head_stats
from megatron_dppo.parallel.fused_head_loss import dppo_head_loss
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.row_plan import RowPlan
from megatron_dppo.parallel.vocab_logprobs import vocab_parallel_logprobs_and_entropy
from megatron_dppo.parallel.vocab_topk import VocabStatistics, vocab_parallel_statistics, vocab_parallel_topk

__all__ = [
    "HeadStatistics",
    "ParallelGroups",
    "RowPlan",
    "VocabStatistics",
    "dppo_head_loss",
    "loss_inputs",
    "vocab_parallel_head_stats",
    "vocab_parallel_logprobs_and_entropy",
    "vocab_parallel_statistics",
    "vocab_parallel_topk",
]
