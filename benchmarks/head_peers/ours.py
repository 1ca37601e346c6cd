"""Our head: mode A (statistics that any loss can use) and mode B (the gradient formed in forward)."""

from __future__ import annotations

from head_peers.task import Statistics, Task, token_loss
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.stats import vocab_parallel_head_stats
from megatron_dppo.types import LossNeeds, LossOutput


def mode_a(task: Task, topk: int = 0) -> Statistics:
    """One all-gather a call; every statistic, and the loss on top."""
    found = vocab_parallel_head_stats(
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
    )
    return Statistics(found.logprobs, found.entropy, found.id_logprobs, found.other_logprob)


def mode_b(task: Task) -> LossOutput:
    """One all-gather a chunk; the loss whose gradient is ready."""
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
    )
