"""Costs of the further needs of the head in mode B, relative to DPPO-TopK-TV as the trainer runs it, on the same task.

A need is what one loss or setting asks of the head beyond log pi at the Top-K ids: the sum of pi^2 and four more sums
of the slots (predicted direction), a gradient at every id (score centering), a softmax over sampling masks (filters), a
teacher of the same width (distillation over the whole vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from head_peers.task import Size, Task, add_to_main_grad, quick_task

from head_bench.counters import counted, peak_bytes
from head_bench.one_process import in_one_process
from head_bench.timing import Ratio, cpu_seconds, paired_ratios, steadiest
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.head.loss import dppo_head_loss
from megatron_dppo.head.row_plan import RowPlan
from megatron_dppo.head.teacher import TeacherTargets
from megatron_dppo.losses import policy_objective
from megatron_dppo.types import Divergence, SamplingMask

BASE = "dppo_topk_tv"
_TOPK: Mapping[str, Any] = {"name": "dppo_topk_tv"}
NEEDS: Mapping[str, tuple[Mapping[str, Any], bool, str | None]] = {
    BASE: (_TOPK, False, None),
    "DPPO-Binary": ({"name": "dppo_binary_tv"}, False, None),
    "predictive TV": ({**_TOPK, "direction": "predictive"}, False, None),
    "predictive KL": ({"name": "dppo_topk_kl", "direction": "predictive"}, False, None),
    "DPPO-Binary, centered": ({"name": "dppo_binary_tv", "centering": True}, False, None),
    "DPPO-TopK, centered": ({**_TOPK, "centering": True}, False, None),
    "score centering": ({"name": "score_centering"}, False, None),
    "sampling masks": (_TOPK, True, None),
    "teacher, reverse KL": (_TOPK, False, "reverse_kl"),
    "teacher, forward KL": (_TOPK, False, "forward_kl"),
}
"""Name -> keys of ``[loss]``, whether the rollouts were filtered (the sampling mask: the Top-K and the sampled token),
and the divergence from a teacher"""


def runs(size: Size) -> dict[str, Callable[[], None]]:
    """Return one forward and backward pass for each need."""
    task = quick_task(size)
    return {name: _runner(task, *need) for name, need in NEEDS.items()}


def _loss(keys: Mapping[str, Any], topk: int) -> LossConfig:
    """Return the loss, with this K if it reads the Top-K."""
    return LossConfig(**keys, topk=topk) if LossConfig(**keys).is_topk else LossConfig(**keys)


def _runner(task: Task, keys: Mapping[str, Any], filtered: bool, divergence: str | None) -> Callable[[], None]:
    objective, targets = policy_objective(_loss(keys, task.ids.shape[1])), task.targets
    if not objective.needs.slot_gradient and keys["name"] == "dppo_binary_tv":
        # Rollouts of a run without Top-K have none.
        targets = replace(targets, rollout_topk_ids=None, rollout_topk_logprobs=None)
    if filtered:
        assert targets.rollout_topk_ids is not None
        rows, width = targets.rollout_topk_ids.shape
        counts = torch.full((rows,), width, dtype=torch.int32)
        targets = replace(targets, sampling_mask=SamplingMask(targets.rollout_topk_ids.flatten(), counts))

    teacher, plan = None, task.plan
    if divergence is not None:
        hidden, weight = task.hidden.detach().clone(), task.weight.detach().flip(0)
        teacher, plan = TeacherTargets(hidden, weight, Divergence(divergence)), RowPlan.of(targets.loss_mask, None)

    def run() -> None:
        output = dppo_head_loss(
            task.hidden,
            task.weight,
            targets,
            objective.loss,
            group=None,
            vocab_size=task.vocab_size,
            needs=objective.needs,
            plan=plan,
            teacher=teacher,
            accumulate_main_grad=True,
        )
        output.loss_sum.backward()
        add_to_main_grad(task.weight)
        task.hidden.grad = None

    return run


def products(size: Size) -> dict[str, tuple[float, float, float]]:
    """Return the deterministic counts of each need.

    They are products in units of one N x V x H product, bytes read and written per logit, and peak MB beyond hidden
    states and weights.
    """
    counts_by_need = {}
    logits = size.tokens * size.vocab
    for name, run in runs(size).items():
        with counted() as counts:
            run()
        counts_by_need[name] = counts.flops / (2 * logits * size.hidden), counts.traffic / logits, peak_bytes(run) / 1e6
    return counts_by_need


def measure(size: Size, pages: str, rounds: int, attempts: int) -> dict[str, Ratio]:
    """Measure CPU times relative to ``BASE`` in a new process; ``pages`` as in ``timing.use_pages``."""
    return in_one_process(_times, size, pages, rounds, attempts)


def _times(size: Size, rounds: int, attempts: int) -> dict[str, Ratio]:
    every = runs(size)
    return steadiest(lambda attempt: paired_ratios(every, BASE, rounds, clock=cpu_seconds, seed=attempt), attempts)


def table(counts: Mapping[str, tuple[float, float, float]], times: Mapping[str, Mapping[str, Ratio]]) -> str:
    """Return a Markdown table with one line for each need."""
    lines = ["| need | products | traffic | peak, MB | " + " | ".join(f"{pages} pages" for pages in times) + " |"]
    lines.append("|---" * (4 + len(times)) + "|")
    for name, (gemms, traffic, peak) in counts.items():
        cells = [f"{gemms:.2f}", f"{traffic:.0f}", f"{peak:.0f}", *(str(ratios[name]) for ratios in times.values())]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
