"""``rollout.batch_invariant``: what the engine on the trainer's own model can and cannot do."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config

_MOST_TENSOR_RANKS = 2
"""Of two numbers the sum is the same in any order; more are added in an order that depends on their place."""
_TOGETHER = "ranks that sample together"


def check_batch_invariant(config: Config) -> None:
    """Whether everything that the mode needs is so.

    Raises:
        ValueError: something is not, with what to change.
    """
    rollout, parallel, train = config.rollout, config.parallel, config.train
    model_dtype = f"model.dtype = {config.model.dtype!r}, whose weights it samples with"
    unfit: list[tuple[bool, str, object, str]] = [
        (rollout.engine != "local", "rollout.engine", rollout.engine, "'local'"),
        (rollout.dtype != config.model.dtype, "rollout.dtype", rollout.dtype, model_dtype),
        (
            rollout.generate is not None,
            "rollout.generate",
            rollout.generate,
            f"left out: {_TOGETHER} take the same turns",
        ),
        (config.agent.is_set, "[agent]", "set", f"left out: {_TOGETHER} take the same turns"),
        (rollout.abort_slowest, "rollout.abort_slowest", True, f"false: {_TOGETHER} end together"),
        (
            rollout.perturbation.is_active,
            "[rollout.perturbation]",
            "set",
            "left out: no copy of the weights to perturb",
        ),
        (not config.model.fused_head, "model.fused_head", False, "true"),
        (
            config.needs_engine_routing,
            "train.router_replay",
            train.router_replay,
            "'off': the routers agree to the bit",
        ),
        (
            train.layer_noise.std > 0 and train.max_first_prob_diff == "auto",
            "train.layer_noise.std",
            train.layer_noise.std,
            "0, or train.max_first_prob_diff set: the guard allows no difference, and the noise makes one",
        ),
        (bool(config.eval.beside_training), "eval.beside_training", True, "left out: the model does one at a time"),
    ]
    for key, most in (
        ("tensor_model_parallel_size", _MOST_TENSOR_RANKS),
        ("expert_tensor_parallel_size", _MOST_TENSOR_RANKS),
        ("pipeline_model_parallel_size", 1),
        ("context_parallel_size", 1),
    ):
        size = getattr(parallel, key) or 1
        unfit.append((size > most, f"parallel.{key}", size, f"at most {most}"))
    found = [f"{name} = {value!r} (expected {expected})" for is_unfit, name, value, expected in unfit if is_unfit]
    if found:
        raise ValueError(f"rollout.batch_invariant = true does not go with {'; '.join(found)}")
