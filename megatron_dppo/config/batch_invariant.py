"""``rollout.batch_invariant``: what the engine on the trainer's own model can and cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config

_MOST_TENSOR_RANKS = 2
"""Of two numbers the sum is the same in any order; more are added in an order that depends on their place."""


def check_batch_invariant(config: Config) -> None:
    """Whether everything that the mode needs is so.

    Raises:
        ValueError: something is not, with what to change.
    """
    rollout, parallel, train = config.rollout, config.parallel, config.train
    wrong: list[tuple[str, Any, str]] = [
        ("rollout.engine", rollout.engine, "'local'") if rollout.engine != "local" else _FINE,
        ("rollout.dtype", rollout.dtype, f"model.dtype = {config.model.dtype!r}, whose weights it samples with")
        if rollout.dtype != config.model.dtype
        else _FINE,
        ("rollout.generate", rollout.generate, "left out: ranks that sample together take the same turns")
        if rollout.generate is not None
        else _FINE,
        ("rollout.abort_slowest", True, "false: ranks that sample together end together")
        if rollout.abort_slowest
        else _FINE,
        ("[rollout.perturbation]", "set", "left out: there is no copy of the weights to perturb")
        if rollout.perturbation.is_active
        else _FINE,
        ("model.fused_head", False, "true") if not config.model.fused_head else _FINE,
        ("train.router_replay", train.router_replay, "'off': the routers agree to the bit by themselves")
        if config.needs_engine_routing
        else _FINE,
        ("eval.beside_training", True, "left out: the model cannot train and sample at a time")
        if config.eval.beside_training
        else _FINE,
    ]
    for name, limit in (
        ("tensor_model_parallel_size", _MOST_TENSOR_RANKS),
        ("expert_tensor_parallel_size", _MOST_TENSOR_RANKS),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
    ):
        if (value := getattr(parallel, name) or 1) > limit:
            wrong.append((f"parallel.{name}", value, f"at most {limit}"))
    found = [f"{name} = {value!r} (expected {expected})" for name, value, expected in wrong if name]
    if found:
        raise ValueError(f"rollout.batch_invariant = true does not go with {'; '.join(found)}")


_FINE = ("", None, "")
