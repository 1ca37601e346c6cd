"""Our head as the trainer calls it: mode A (statistics for any loss) and mode B (the gradient formed in forward)."""

from __future__ import annotations

from head_peers.task import Statistics, Task, token_loss
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.types import LossNeeds, LossOutput


def mode_a(task: Task, topk: int = 0) -> Statistics:
    """Compute every statistic with one all-gather per call; the loss is computed on top."""
    stats = vocab_parallel_head_stats(
        task.hidden,
        task.weight,
        task.targets.labels,
        group=task.group,
        vocab_size=task.vocab_size,
        temperature=task.temperature,
        ids=task.ids,
        ids_valid=task.ids >= 0,
        topk=topk,
        needs=LossNeeds(entropy_gradient=task.entropy_gradient),
        plan=task.plan,
        chunk_tokens=task.chunk_tokens,
        accumulate_main_grad=True,
    )
    return Statistics(stats.logprobs, stats.entropy, stats.id_logprobs, stats.other_logprob)


def mode_b(task: Task) -> LossOutput:
    """Compute the loss with its gradient formed in forward; one all-gather per chunk."""
    return dppo_head_loss(
        task.hidden,
        task.weight,
        task.targets,
        token_loss(task, with_ids=True),
        group=task.group,
        vocab_size=task.vocab_size,
        temperature=task.temperature,
        needs=LossNeeds(entropy_gradient=task.entropy_gradient),
        plan=task.plan,
        chunk_tokens=task.chunk_tokens,
        accumulate_main_grad=True,
    )
