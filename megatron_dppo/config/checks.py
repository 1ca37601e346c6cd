"""Checks across sections of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.data import EvalConfig
from megatron_dppo.config.train import FROM_ENGINE

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config


def check_agent(config: Config) -> None:
    """Whether the other sections fit the agent.

    Raises:
        ValueError: one does not, with what to change.
    """
    if not config.agent.is_set:
        return
    if config.rollout.generate is not None:
        raise ValueError(
            f"rollout.generate = {config.rollout.generate!r} and [agent] both make the responses; remove one of them"
        )
    if config.agent.max_running is not None and config.rollout.engine == "local":
        raise ValueError(
            f"agent.max_running = {config.agent.max_running} with rollout.engine = 'local', which decodes the turns of "
            "all episodes together and would wait for those that may not begin; remove it"
        )
    for name in ("system_prompt", "apply_chat_template"):
        if getattr(config.data, name) is not None:
            raise ValueError(
                f"data.{name} has no effect with [agent]: the agent writes the messages itself. Remove it, or put the "
                "text into the agent"
            )


def check_distillation(config: Config) -> None:
    """Whether the other sections fit a teacher.

    Raises:
        ValueError: one does not, with what to change.
    """
    chosen = config.distillation
    if config.rollout.dynamic_sampling and not chosen.task_reward:
        raise ValueError(
            "rollout.dynamic_sampling = true with distillation.task_reward = false: it throws away groups whose "
            "rewards are equal, and the teacher is the only signal here. Set dynamic_sampling = false"
        )
    if not chosen.is_exact and not chosen.teacher_urls:
        return
    what = f"distillation.divergence = {chosen.divergence!r}"
    if chosen.teacher_urls:
        what = "distillation.teacher_urls"
        if config.rollout.temperature != 1:
            raise ValueError(
                f"{what} with rollout.temperature = {config.rollout.temperature:g}: servers tell log-probabilities at "
                "temperature 1, and those of the rollout are at its own. Set temperature = 1, or use teacher_path"
            )
    elif not config.model.fused_head:
        raise ValueError(
            f"{what} with model.fused_head = false: it is formed in the fused head, chunk by chunk. Set fused_head = "
            "true, or divergence = 'sampled'"
        )
    filters = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for key, off in filters.items():
        if getattr(config.rollout, key) not in (off, None):
            raise ValueError(
                f"{what} with rollout.{key} = {getattr(config.rollout, key)}: what the filter left is not the whole "
                "vocabulary, which the teacher's distribution is over. Remove it, or use teacher_path with "
                "divergence = 'sampled'"
            )


_PASSES_BY = {
    "moe_shared_expert_overlap": "the shared expert's layers then exchange nothing themselves",
    "use_transformer_engine_op_fuser": "the fused operations do not call the layers that have adapters",
    "moe_router_bias_update_rate": "checkpoints hold adapters alone, and would lose the biases",
    "delay_wgrad_compute": "frozen weights have no gradient that could be delayed",
}
"""Switches of Megatron's under which a layer is not computed as its adapter takes it to be."""


def check_lora(config: Config) -> None:
    """Whether the other sections fit adapters, or to be without.

    Raises:
        ValueError: one does not, with what to change.
    """
    if config.rollout.weight_sync.method == "adapter":
        _check_adapter_sync(config)
    if not config.lora.rank:
        return
    if config.warmup.num_steps:
        raise ValueError(
            f"lora.rank = {config.lora.rank} with warmup.num_steps = {config.warmup.num_steps}: the warm-up trains all "
            "weights. Warm up in a run without [lora], and set model.path to its RUN/base"
        )
    for key, reason in _PASSES_BY.items():
        if config.model.transformer.get(key):
            raise ValueError(
                f"lora.rank = {config.lora.rank} with model.transformer.{key} = "
                f"{config.model.transformer[key]!r}: {reason}. Leave it out"
            )


def _check_adapter_sync(config: Config) -> None:
    if not config.lora.rank:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with lora.rank = 0: there is no adapter to send. Set lora.rank, or "
            "the method to 'distributed' or 'disk'"
        )
    if config.model.random_init:
        raise ValueError(
            "rollout.weight_sync.method = 'adapter' with model.random_init = true: the servers read the base model "
            "from model.path themselves, so its weights have to be there"
        )


def check_router_weights(replay: str, engine: str, transformer: Mapping[str, Any]) -> None:
    """Whether there are combine weights to replay, and they mean the same on both sides.

    Args:
        replay: ``train.router_replay``.
        engine: ``rollout.engine``.
        transformer: ``model.transformer``.

    Raises:
        ValueError: ``train.router_replay_weights = true`` does not go with one of them.
    """
    key = "train.router_replay_weights = true"
    if replay == "off":
        raise ValueError(
            f"{key} has no effect with train.router_replay = 'off'; set router_replay to 'rollout', 'recorded' or "
            "'compare', or leave router_replay_weights out"
        )
    if replay not in FROM_ENGINE:
        return
    if engine != "local":
        raise ValueError(
            f"{key} with rollout.engine = {engine!r}: neither SGLang (0.5.23) nor vLLM (0.32.0) returns the routers' "
            "weights, only which experts they chose. Set it to false, or use rollout.engine = 'local' or "
            "train.router_replay = 'recorded'"
        )
    for name in ("moe_router_topk_scaling_factor", "moe_router_score_function"):
        if transformer.get(name) is not None:
            raise ValueError(
                f"model.transformer.{name} = {transformer[name]!r} with {key}: it changes the trainer's weights of "
                "experts, but not those of the engine, which would replace them; remove one of them"
            )


def check_eval_filters(evaluation: EvalConfig, engine: str, *, recorded: bool) -> None:
    """Whether a server that tells what rollouts' filters left also answers what evaluation asks.

    Args:
        evaluation: ``[eval]``.
        engine: ``rollout.engine``.
        recorded: rollouts have filters.

    Raises:
        ValueError: vLLM then refuses each request without top-k.
    """
    if engine == "vllm" and recorded and evaluation.temperature and not evaluation.top_k:
        raise ValueError(
            f"eval.top_k = 0 with eval.temperature = {evaluation.temperature}, rollout.engine = 'vllm' and filters of "
            "rollouts: a vLLM server that tells what filters left answers no request without top_k. Set eval.top_k "
            "(4096 cuts next to nothing), or eval.temperature = 0"
        )


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
