"""Every method by name: what it offers, and how to run one forward and backward pass of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from head_peers.liger import liger_fallback
from head_peers.nemo import nemo_logits
from head_peers.ours import mode_a, mode_b
from head_peers.slime import slime
from head_peers.task import Statistics, Task, add_to_main_grad, compute_loss
from head_peers.trl import trl_chunked
from head_peers.verl_fused import verl_fused
from head_peers.verl_unfused import stable_rl, verl_unfused
from megatron_dppo.types import LossOutput


@dataclass(frozen=True)
class Method:
    """One way from hidden states to the loss."""

    name: str
    forward: Callable[[Task], LossOutput]
    offers: str
    """Statistics on offer: a log-probability at the label, b at K ids of each token, c own Top-K, d entropy."""
    gradients: str
    """Statistics that can carry a gradient."""
    equal_task: bool
    """True if the method does the whole task of DPPO-TopK: a, b and d."""
    ours: bool = False
    rounded_logits: bool = True
    """True if logits are rounded to the dtype of the model."""
    tensor_parallel: bool = True
    ids_over_ranks: bool = True

    def offers_ids(self, ranks: int) -> bool:
        """Return True if the method has log-probabilities at K ids over that many ranks."""
        return "b" in self.offers.split() and (ranks == 1 or self.ids_over_ranks)

    def run(self, task: Task) -> LossOutput:
        """Run forward and backward; the gradients are in ``hidden.grad`` and ``weight.main_grad`` of the task."""
        output = self.forward(task)
        output.loss_sum.backward()
        add_to_main_grad(task.weight)
        return output


def _with_loss(statistics: Callable[[Task], Statistics]) -> Callable[[Task], LossOutput]:
    return lambda task: compute_loss(task, statistics(task))


OURS_B = Method("ours B", mode_b, "a b d", "a d", True, ours=True, rounded_logits=False)
OURS_A = Method("ours A", _with_loss(mode_a), "a b c d", "a d", True, ours=True, rounded_logits=False)
METHODS = (
    OURS_B,
    OURS_A,
    Method("Stable-RL", _with_loss(stable_rl), "a b d", "a d", True, ids_over_ranks=False),
    Method("verl unfused", _with_loss(verl_unfused), "a b c d", "a b d", True),
    Method("NeMo-RL logits", _with_loss(nemo_logits), "a b c d", "a b d", True),
    Method("slime", _with_loss(slime), "a d", "a d", False),
    Method("verl fused", _with_loss(verl_fused), "a d", "a d", False, rounded_logits=False),
    Method("TRL", _with_loss(trl_chunked), "a d", "a", False, tensor_parallel=False),
    Method("Liger fallback", _with_loss(liger_fallback), "a d", "a d", False),
)


def by_name(name: str) -> Method:
    """Return the method of that name.

    Raises:
        KeyError: If there is none.
    """
    return {method.name: method for method in METHODS}[name]
