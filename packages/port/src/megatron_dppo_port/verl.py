"""Rules for verl's settings (``main_ppo`` and its asynchronous variants, FSDP and Megatron workers)."""

import math

from megatron_dppo_port.converters import filter_size, flag, integer, number, one_or_list, text
from megatron_dppo_port.derived import put_processes
from megatron_dppo_port.draft import Draft, NoCounterpart, Rule, map_to, map_within, no_effect, unsupported
from megatron_dppo_port.verl_loss import combine_loss
from megatron_dppo_port.verl_run import combine_run

_A, _R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
_OFFLOADED = "weights, gradients and optimizer move to the host while colocated servers sample"
_REFERENCE = "the reference model uses the parallel layout of the policy"
_ULYSSES = "Megatron's context parallelism instead of Ulysses"
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_SCORING = "training and scoring use the same batch"
_MANAGER = "scores come from reward.function; the overlong penalty of dapo is reward.overlong_buffer_tokens"
_SEQUENCE_PARALLEL = (_A + "ulysses_sequence_parallel_size", _A + "fsdp_config.ulysses_sequence_parallel_size")
"""Counterparts of context parallelism in FSDP's backend. The first one replaces the second if it is above 1."""


TABLE: dict[str, Rule] = {
    "data.train_files": map_to("data.train", one_or_list),
    "data.prompt_key": map_to("data.prompt_key", text),
    "data.shuffle": unsupported("prompts are always shuffled, by run.seed"),
    "data.return_raw_chat": unsupported("the chat template is always applied"),
    "actor_rollout_ref.model.path": map_to("model.path", text),
    "actor_rollout_ref.model.enable_gradient_checkpointing": unsupported(
        "activations: model.transformer.recompute_granularity = 'full' with recompute_method and recompute_num_layers"
    ),
    "actor_rollout_ref.model.use_remove_padding": unsupported("rows are always packed"),
    "actor_rollout_ref.model.use_fused_kernels": unsupported("the fused head is on (model.fused_head)"),
    "actor_rollout_ref.hybrid_engine": unsupported("rollout.servers.colocated"),
    _A + "ppo_epochs": map_to("train.epochs", integer),
    _A + "grad_clip": map_to("optimizer.clip_grad", number),
    _A + "use_torch_compile": unsupported("no torch.compile"),
    _R + "enable_rollout_routing_replay": unsupported("asked for where train.router_replay needs it"),
    _A + "entropy_coeff": map_to("loss.entropy_coef", number),
    _A + "ppo_micro_batch_size_per_gpu": unsupported("rows are packed up to train.micro_batch_tokens"),
    _A + "use_dynamic_bsz": unsupported("rows are always packed up to train.micro_batch_tokens"),
    _R + "n": map_to("rollout.samples_per_prompt", integer),
    _R + "temperature": map_to("rollout.temperature", number),
    _R + "top_p": map_to("rollout.top_p", number),
    _R + "top_k": map_to("rollout.top_k", filter_size),
    _R + "calculate_log_probs": unsupported("the rollout's log-probabilities are always recorded"),
    _R + "val_kwargs.n": map_to("eval.samples_per_prompt", integer),
    _R + "val_kwargs.temperature": map_to("eval.temperature", number),
    _R + "val_kwargs.top_p": map_to("eval.top_p", number),
    _R + "val_kwargs.top_k": map_to("eval.top_k", filter_size),
    _R + "val_kwargs.do_sample": unsupported("set by eval.temperature; 0 = greedy"),
    "trainer.critic_warmup": unsupported("there is no critic"),
    "trainer.val_before_train": unsupported("the weights before training are always evaluated"),
    "trainer.resume_mode": unsupported("rerunning a command resumes its run (checkpoint.resume)"),
    "trainer.balance_batch": map_to("train.balance_ranks", flag),
    "trainer.device": unsupported("detected at startup"),
    "trainer.max_actor_ckpt_to_keep": map_to("checkpoint.keep", integer),
    _A + "veomni.expert_parallel_size": map_to("parallel.expert_model_parallel_size", integer),
    _A + "veomni.ulysses_parallel_size": map_to("parallel.context_parallel_size", integer, _ULYSSES),
    _A + "megatron.dtype": map_to("model.dtype", lambda value: _DTYPES[text(value)]),
} | {
    f"{_A}megatron.{name}_parallel_size": map_to(f"parallel.{name}_parallel_size", integer)
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "context", "expert_model", "expert_tensor")
}
TABLE |= {
    f"{_A}optim.{name}": map_to(f"optimizer.{name}", number) for name in ("lr", "min_lr", "weight_decay", "clip_grad")
}
_STYLES = ("lr_decay_style", "lr_scheduler_type", "warmup_style")
TABLE |= {f"{_A}optim.{name}": map_to("optimizer.lr_decay_style", text) for name in _STYLES}
TABLE |= {f"{_A}{name}router_replay.mode": map_to("train.router_replay", text) for name in ("", "megatron.")}
TABLE |= {
    f"{_A}optim.override_optimizer_config.{name}": map_to(f"optimizer.{name}", convert)
    for name, convert in {
        "optimizer_cpu_offload": flag,
        "optimizer_offload_fraction": number,
        "overlap_cpu_optimizer_d2h_h2d": flag,
        "use_precision_aware_optimizer": flag,
    }.items()
}


def _offload(draft: Draft, key: str) -> None:
    with draft.target("rollout.servers.colocated"):
        is_on = draft.read(key, flag)
        is_colocated = draft.get("rollout.servers.colocated") is True
        if is_on and is_colocated:
            draft.record(key, "changed", f"rollout.servers.colocated = True: {_OFFLOADED}")
        elif is_on:
            draft.record(key, "unsupported", "optimizer.optimizer_cpu_offload keeps the optimizer on the host")
        else:
            draft.record(key, "ported", "off")


def _loss_parameter(draft: Draft, key: str) -> None:
    if "loss.name" in draft.to_fill_in:
        draft.record(key, "unsupported", "belongs to the loss, which is to fill in")
    no_effect(draft, key)


PATTERNS: dict[str, Rule] = {
    _A + "megatron.override_transformer_config.": map_within("model.transformer.", lambda key: key.rpartition(".")[2]),
    "actor_rollout_ref.ref.": unsupported(_REFERENCE),
    _A + "fsdp_config.": unsupported("FSDP's; Megatron shards by [parallel] and the distributed optimizer"),
    _A + "megatron.": unsupported("Megatron's own default, or set by model.transformer"),
    _A + "strategy": unsupported("Megatron is the only strategy"),
    _A + "checkpoint.": unsupported("checkpoint.* here; docs/checkpoints.md"),
    _R + "log_prob": unsupported(_SCORING),
    _R: unsupported("a server flag: set it under the server's name in [rollout.sglang] or [rollout.vllm]"),
    "critic.": unsupported("there is no critic: the baseline is the mean reward of the group"),
    "reward_model.": unsupported("reward models run as servers (docs/rewards.md)"),
    "reward_model.reward_manager": unsupported(_MANAGER),
    "reward.reward_manager": unsupported(_MANAGER),
    "hydra.": unsupported("the launcher's"),
    "ray_": unsupported("no Ray"),
    "model_engine": unsupported("Megatron is the only engine"),
}
_CLIPS = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
TABLE |= {_A + name: _loss_parameter for name in (*_CLIPS, "tau_pos", "tau_neg", "loss_scale_factor")}
_OFFLOADS = [
    _A + f"{engine}.{part}_offload"
    for engine in ("megatron", "fsdp_config", "veomni")
    for part in ("param", "grad", "optimizer")
]
TABLE |= dict.fromkeys(_OFFLOADS, _offload)
TABLE |= dict.fromkeys(
    ("actor_rollout_ref.ref.megatron.param_offload", "actor_rollout_ref.ref.fsdp_config.param_offload"),
    unsupported("with kl_coef = 0 no reference model is loaded; else it stays on the GPU"),
)


NO_COUNTERPARTS = {
    _A + "optim.optimizer": NoCounterpart("optimizer.lr", "Adam is the only optimizer", ("adam", "adamw")),
    "algorithm.kl_ctrl.type": NoCounterpart("reward.kl_coef", "the coefficient is fixed here", ("fixed",)),
    "algorithm.kl_penalty": NoCounterpart("reward.kl_coef", "the penalty here is log mu - log reference", ("kl", "k1")),
    "algorithm.gamma": NoCounterpart("train.advantage", "rewards are not discounted here", ("1", "1.0")),
    "distillation.enabled": NoCounterpart("distillation.teacher_path", "see [distillation]"),
    "trainer.v1.trainer_mode": NoCounterpart("train.max_staleness", "see docs/engines.md", ("sync", "colocate")),
    "data.train_max_samples": NoCounterpart("data.train", "a part of the file", ("-1",)),
}


def combine(draft: Draft) -> None:
    """Translate settings that depend on each other."""
    # Sizes come before the optimizer, whose warm-up may be a fraction of the steps.
    _sizes(draft)
    _optimizer(draft)
    _layout(draft)
    combine_loss(draft)
    combine_run(draft)


def _sizes(draft: Draft) -> None:
    (_asynchronous_sizes if "async_training.require_batches" in draft.defaults else _synchronous_sizes)(draft)
    draft.translate("algorithm.filter_groups.enable", "rollout.dynamic_sampling", lambda value: flag(value) or None)
    with draft.target("data.overlong_prompts"):
        if draft.read("data.filter_overlong_prompts", flag):
            draft.put("data.overlong_prompts", "drop", "data.filter_overlong_prompts")
            draft.record("data.truncation", "unsupported", "longer prompts are always dropped")
        elif (truncation := draft.read("data.truncation", text)) in ("left", "error"):
            draft.put("data.overlong_prompts", {"left": "truncate_left"}.get(truncation, "error"), "data.truncation")
    if draft.has("data.truncation"):
        draft.record("data.truncation", "unsupported", "prompts are dropped, truncated at the left, or an error")
    _lengths(draft)
    with draft.target("parallel.context_parallel_size"):
        size = _sequence_parallel_size(draft)
        key = next((key for key in _SEQUENCE_PARALLEL if draft.has(key)), None)
        if key is not None:
            draft.put("parallel.context_parallel_size", size, key, note=_ULYSSES)
    with draft.target("train.micro_batch_tokens"):
        context = (draft.read(_A + "megatron.context_parallel_size", integer) or 1) * _sequence_parallel_size(draft)
        tokens = draft.read(_A + "ppo_max_token_len_per_gpu", integer)
        note = f"{tokens} a GPU * {context}" if context > 1 else ""
        # A micro-batch here is that of all context-parallel ranks; verl counts the tokens of one GPU.
        draft.put("train.micro_batch_tokens", tokens and tokens * context, _A + "ppo_max_token_len_per_gpu", note=note)


def _sequence_parallel_size(draft: Draft) -> int:
    first, second = (draft.read(key, integer) or 1 for key in _SEQUENCE_PARALLEL)
    return int(first if first > 1 else second)


def _lengths(draft: Draft) -> None:
    """Translate the lengths. Those of the engine follow the data's unless they are set themselves."""
    for path, length, general in (
        ("rollout.max_new_tokens", "response_length", "data.max_response_length"),
        ("data.max_prompt_tokens", "prompt_length", "data.max_prompt_length"),
    ):
        key = "actor_rollout_ref.rollout." + length
        with draft.target(path):
            # A reference such as ${data.max_response_length} is resolved before.
            source = key if draft.has(key) else general
            draft.put(path, draft.read(source, integer), source)
            if source == key:
                draft.record(general, "unsupported", f"{key} sets the length")


def _synchronous_sizes(draft: Draft) -> None:
    draft.translate("data.train_batch_size", "rollout.prompts_per_step", integer)
    with draft.target("train.mini_batches"):
        key = _A + "ppo_mini_batch_size"
        batch, mini = draft.read("data.train_batch_size", integer), draft.read(key, integer)
        if batch and mini and batch % mini:
            reason = f"{batch} prompts a step are not a multiple of {mini}"
            draft.record(key, "unread", reason)
            draft.leave_to_user("train.mini_batches", key, reason)
        elif batch and mini:
            note = f"{batch} / {mini} prompts"
            draft.put("train.mini_batches", batch // mini, key, "data.train_batch_size", note=note)
    with draft.target("rollout.oversample"):
        more, batch = draft.read("data.gen_batch_size", integer), draft.read("data.train_batch_size", integer)
        if batch and more and more > batch:
            draft.put("rollout.oversample", more / batch, "data.gen_batch_size", note=f"{more} / {batch} prompts")
    if "async_training.one_step" in draft.defaults:
        draft.put("train.max_staleness", 1, note="one step off-policy")


def _asynchronous_sizes(draft: Draft) -> None:
    """Translate ``fully_async_main``: the weights are sent after ``trigger_parameter_sync_step`` batches."""
    before = "async_training."
    sizes = (_A + "ppo_mini_batch_size", before + "require_batches", before + "trigger_parameter_sync_step")
    with draft.target("rollout.prompts_per_step", "train.mini_batches", "run.num_steps"):
        mini, required, trigger = (draft.read(key, integer) for key in sizes)
        prompts = mini * required * trigger
        note = f"{mini} * {required} * {trigger} prompts between two weight updates of the servers"
        draft.put("rollout.prompts_per_step", prompts, *sizes, note=note)
        draft.put("train.mini_batches", required * trigger, *sizes, note=note)
        total = draft.read("rollout.total_rollout_steps", integer)
        if total:
            steps = max(1, total // prompts)
            draft.put("run.num_steps", steps, "rollout.total_rollout_steps", note=f"{total} / {prompts} prompts")
            draft.record("trainer.total_epochs", "unsupported", "rollout.total_rollout_steps sets the length")
    with draft.target("train.max_staleness"):
        threshold = draft.read(before + "staleness_threshold", number)
        key = before + "staleness_threshold"
        draft.put("train.max_staleness", math.ceil(threshold), key, note=f"{threshold:g} of a step, rounded up")
    for key in ("data.train_batch_size", "data.gen_batch_size"):
        draft.record(key, "unsupported", "async_training.* sets the number of prompts a step")


def _optimizer(draft: Draft) -> None:
    betas = _A + "optim.betas"
    with draft.target("optimizer.adam_beta1", "optimizer.adam_beta2"):
        values = draft.read(betas, _pair)
        if values is not None:
            draft.put("optimizer.adam_beta1", values[0], betas)
            draft.put("optimizer.adam_beta2", values[1], betas)
    steps_key, ratio_key = _A + "optim.lr_warmup_steps", _A + "optim.lr_warmup_steps_ratio"
    with draft.target("optimizer.lr_warmup_steps"):
        steps = draft.read(steps_key, integer)
        ratio = draft.read(ratio_key, number)
        if steps is not None and steps > 0:
            draft.put("optimizer.lr_warmup_steps", steps, steps_key)
        elif ratio:
            total = draft.get("run.num_steps") or draft.read("trainer.total_training_steps", integer)
            if not total:
                reason = f"{ratio:g} of the number of steps, which the size of the data sets"
                draft.record(ratio_key, "unread", reason)
                draft.leave_to_user("optimizer.lr_warmup_steps", ratio_key, reason)
            else:
                draft.put("optimizer.lr_warmup_steps", int(ratio * total), ratio_key, note=f"{ratio:g} * {total} steps")
    with draft.target("optimizer.min_lr"):
        ratio = draft.read(_A + "optim.min_lr_ratio", number)
        if ratio:
            rate = draft.read(_A + "optim.lr", number)
            draft.put("optimizer.min_lr", ratio * rate, _A + "optim.min_lr_ratio", note=f"{ratio:g} * {rate:g}")


def _pair(value: object) -> tuple[float, float]:
    parts = value if isinstance(value, list) else str(value).strip("'\"[]() ").split(",")
    first, second = parts
    return number(first), number(second)


def _layout(draft: Draft) -> None:
    sequence = _A + "megatron.sequence_parallel"
    with draft.target("parallel.sequence_parallel"):
        size = draft.read(_A + "megatron.tensor_model_parallel_size", integer)
        is_on = draft.read(sequence, flag)
        if size and size > 1 and draft.has(sequence):
            draft.put("parallel.sequence_parallel", is_on, sequence)
    put_processes(draft, "trainer.nnodes", "trainer.n_gpus_per_node")
