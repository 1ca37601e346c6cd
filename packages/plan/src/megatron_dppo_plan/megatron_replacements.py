"""Replacements in Megatron and torch.distributed for a rehearsal: a run on fake tensors that measures memory.

``REPLACEMENTS`` lists them with their reasons. They hold for the rest of the process, which only rehearses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from megatron_dppo.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Values that a run computes from its data and a rehearsal must assume."""

    row: tuple[int, int, int]
    """Shape of the hidden states between pipeline stages: tokens, 1, hidden size."""
    expert_load: float = 1.0
    """Tokens of this rank's experts relative to a perfectly balanced router."""


@dataclass(frozen=True)
class Replacement:
    """Difference between a rehearsal and a run."""

    apply: Callable[[Assumptions], None]
    """Applies the replacement, after ``apply_shims`` and before any process group is created."""
    reason: str
    as_gpu: bool = False
    """True if it is only needed to rehearse a GPU."""


def schedule_phases() -> list[tuple[Any, str, str]]:
    """Return the functions of the phases of Megatron's update: (module, function, phase)."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_dppo.mcore import optim

    return [(schedules, "backward_step", "backward"), (optim, "finalize_model_grads", "reduce")]


def _one_backend(_: Assumptions) -> None:
    new_group = dist.new_group

    @functools.wraps(new_group)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in ("backend", "pg_options"):
            kwargs.pop(name, None)
        return new_group(*args, **kwargs)

    dist.new_group = call


def _objects(_: Assumptions) -> None:
    def all_gather_object(out: list[Any], value: Any, group: Any = None) -> None:
        out[:] = [value] * len(out)

    dist.all_gather_object = all_gather_object  # type: ignore[assignment]


def _conversion(_: Assumptions) -> None:
    @torch.no_grad()
    def apply(self: Module, change: Callable[[Any], Any], recurse: bool = True) -> Module:
        for module in self.modules():
            for name, old in module._parameters.items():
                if old is None or ((new := change(old)).dtype == old.dtype and new.device == old.device):
                    continue
                parameter = Parameter(new, old.requires_grad)
                # Megatron marks parameters by attributes (``tensor_model_parallel``, ``allreduce``), which the new one
                # needs too.
                known = vars(parameter)
                known.update({key: value for key, value in vars(old).items() if key not in known})
                module._parameters[name] = parameter
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else change(buffer)
        return self

    Module._apply = apply  # type: ignore[method-assign]


class _TokenCounts(list[int]):
    """Token counts on the host, instead of a tensor ``[rows, columns]`` that was copied there."""

    columns = 1

    @property
    def T(self) -> _TokenCounts:
        """Transposed counts."""
        return _TokenCounts(count for first in range(self.columns) for count in self[first :: self.columns])

    def tolist(self) -> list[int]:
        """Return the counts as a list, like ``Tensor.tolist``."""
        return list(self)

    def ravel(self) -> _TokenCounts:
        """Return the counts, which are flat already."""
        return self


def _token_counts(assumed: Assumptions) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    original = Dispatcher.preprocess

    def preprocess(self: Any, routing_map: Any) -> Any:
        original(self, routing_map)  # for its collectives and tensors
        ranks, local = self.ep_size * self.tp_size, self.num_local_experts
        # A balanced router sends as many tokens to every rank.
        pairs = split_evenly(self.num_out_tokens, self.ep_size)
        arriving = [round(count * assumed.expert_load) for count in pairs]
        if ranks > 1:
            self.input_splits, self.output_splits = pairs, _TokenCounts(arriving)
            self.output_splits_tp = _TokenCounts([sum(arriving)] * self.tp_size)
        by_rank = [split_evenly(count, local) for _ in range(self.tp_size) for count in arriving]
        if local > 1:
            self.num_global_tokens_per_local_expert = table = _TokenCounts([n for counts in by_rank for n in counts])
            table.columns = local
        return _TokenCounts([sum(column) for column in zip(*by_rank, strict=True)])

    Dispatcher.preprocess = preprocess
    Dispatcher._maybe_dtoh_and_synchronize = lambda self, point, counts=None: counts


def split_evenly(total: int, parts: int) -> _TokenCounts:
    """Split ``total`` into parts that differ by at most one."""
    return _TokenCounts([total // parts + (i < total % parts) for i in range(parts)])


def _orders_of_chunks(_: Assumptions) -> None:
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    original = Dispatcher.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        number = range(self.num_experts * self.tp_size)
        local = self.num_local_experts
        ranks = len(number) // local
        self.sort_input_by_local_experts = _TokenCounts(i for first in range(local) for i in number[first::local])
        self.restore_output_by_local_experts = _TokenCounts(i for first in range(ranks) for i in number[first::ranks])

    Dispatcher.__init__ = init


def _norms(_: Assumptions) -> None:
    from megatron.core.optimizer import clip_grads

    def norm(chunk: int, flag: Any, tensors: Sequence[Sequence[torch.Tensor]], *per_tensor: bool) -> Any:
        norms = torch.stack([torch.norm(tensor) for several in tensors for tensor in several])
        return torch.norm(norms).reshape(1), None

    clip_grads.l2_norm_impl = norm


def _gathered_tokens(assumed: Assumptions) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    Dispatcher = token_dispatcher.MoEAllGatherTokenDispatcher

    def dispatch_postprocess(self: Any, hidden_states: Any, probs: Any) -> Any:
        # Megatron's method, but for the counts, which it reads from ``local_map``.
        self.hidden_shape_before_permute = hidden_states.shape
        local = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        self.local_map = self.routing_map[:, local].contiguous()
        self.local_probs = probs[:, local].contiguous()
        share = self.num_local_experts / self.config.num_moe_experts
        most = min(self.router_topk, self.num_local_experts)
        arriving = round(len(hidden_states) * min(self.router_topk * share * assumed.expert_load, most))
        # Megatron Core 0.19 returns more values after these.
        permuted, _, self.reversed_local_input_permutation_mapping = token_dispatcher.permute(
            hidden_states, self.local_map, num_out_tokens=arriving, fused=self.config.moe_permute_fusion
        )[:3]
        self.local_probs = self.local_probs.T.contiguous().masked_select(self.local_map.T.contiguous())
        self.routing_map = None
        return permuted, split_evenly(arriving, self.num_local_experts), self.local_probs

    Dispatcher.dispatch_postprocess = dispatch_postprocess


def _other_dispatchers(_: Assumptions) -> None:
    from megatron.core.transformer.moe import token_dispatcher

    def init(*args: Any, **kwargs: Any) -> None:
        raise PlanError("MoEFlexTokenDispatcher needs DeepEP's kernels and cannot be rehearsed")

    token_dispatcher.MoEFlexTokenDispatcher.__init__ = init


def _neighbour_shapes(assumed: Assumptions) -> None:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    P2PCommunicator.rehearsed_shape = assumed.row


REPLACEMENTS: Sequence[Replacement] = (
    Replacement(_one_backend, "CPU groups become fake groups too: there are no other processes"),
    Replacement(_objects, "objects of the other ranks are those of this rank"),
    Replacement(_conversion, "torch cannot convert fake parameters in place (Module.bfloat16)"),
    Replacement(_token_counts, "tokens per expert are read from the router's choice: here ``expert_load``"),
    Replacement(_orders_of_chunks, "the order of the experts' chunks is read on the host: the same numbers as a list"),
    Replacement(_norms, "without Transformer Engine and Apex the gradient norm reads that of each tensor on the host"),
    Replacement(_gathered_tokens, "the same for the allgather dispatcher"),
    Replacement(_other_dispatchers, "a plan replaces the flex dispatcher by alltoall: no other may be rehearsed"),
    Replacement(_neighbour_shapes, "the shape of a received row is read from the neighbour's message: here ``row``"),
)
