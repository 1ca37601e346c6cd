"""Rules for prime-rl's configuration, ``rl.toml``."""

from __future__ import annotations

import re

from megatron_dppo.commands.port.draft import (
    Draft,
    Rule,
    UnreadSettingError,
    flag,
    integer,
    literal,
    map_to,
    number,
    text,
    unsupported,
)

_ENV = "an environment of `verifiers`: prompts go to data.train, its rubric to reward.function, its turns to [agent]"
_LOSS = "trainer.loss."

TABLE: dict[str, Rule] = {
    "max_steps": map_to("run.num_steps", integer),
    "output_dir": map_to("run.output_dir", text),
    "trainer.model.name": map_to("model.path", text, "a local folder is needed: download it (hf download)"),
    "model.name": map_to("model.path", text, "a local folder is needed: download it (hf download)"),
    "orchestrator.group_size": map_to("rollout.samples_per_prompt", integer),
    "orchestrator.train.sampling.max_completion_tokens": map_to("rollout.max_new_tokens", integer),
    "orchestrator.train.sampling.temperature": map_to("rollout.temperature", number),
    "orchestrator.train.sampling.top_p": map_to("rollout.top_p", number),
    "orchestrator.max_off_policy_steps": map_to("train.max_staleness", integer),
    "orchestrator.eval.interval": map_to("eval.every", integer),
    "orchestrator.eval.sampling.max_completion_tokens": map_to("eval.max_new_tokens", integer),
    "orchestrator.eval.sampling.temperature": map_to("eval.temperature", number),
    "orchestrator.eval.num_examples": map_to("eval.max_prompts", integer),
    "orchestrator.concurrency.max_inflight": map_to(
        "rollout.servers.max_in_flight", integer, "of one data-parallel rank"
    ),
    "trainer.optim.lr": map_to("optimizer.lr", number),
    "trainer.optim.weight_decay": map_to("optimizer.weight_decay", number),
    "trainer.optim.betas1": map_to("optimizer.adam_beta1", number),
    "trainer.optim.betas2": map_to("optimizer.adam_beta2", number),
    "trainer.optim.max_norm": map_to("optimizer.clip_grad", number),
    "trainer.scheduler.type": map_to("optimizer.lr_decay_style", text),
    "trainer.scheduler.warmup_steps": map_to("optimizer.lr_warmup_steps", integer),
    "trainer.scheduler.min_lr": map_to("optimizer.min_lr", number),
    "trainer.model.cp": map_to("parallel.context_parallel_size", integer),
    "trainer.model.ep": map_to("parallel.expert_model_parallel_size", integer),
    "trainer.model.tp": map_to("parallel.tensor_model_parallel_size", integer),
    "trainer.model.lora.rank": map_to("lora.rank", integer),
    "trainer.model.lora.alpha": map_to("lora.alpha", number),
    "monitors.wandb.project": map_to("log.wandb_project", text),
    "ckpt.interval": map_to("checkpoint.save_every", integer),
    "ckpt.keep_last": map_to("checkpoint.keep", integer),
    "inference.vllm.enable_return_routed_experts": unsupported("asked for where train.router_replay needs it"),
}
PATTERNS: dict[str, Rule] = {
    "orchestrator.train.source": unsupported(_ENV),
    "orchestrator.eval.source": unsupported(_ENV),
    "orchestrator.renderer": unsupported("the tokenizer's own chat template is applied"),
    "orchestrator.algo": unsupported("train.advantage and [loss], [distillation]"),
    "deployment.": unsupported("torchrun or srun starts the processes; megatron-dppo serve the servers"),
    "slurm.": unsupported("launch/qwen3_moe_dppo.sh"),
    "weight_broadcast.": unsupported("[rollout.weight_sync]"),
    "trainer.model.ac": unsupported("model.transformer.recompute_granularity and its companions"),
    "trainer.model.": unsupported("Megatron's own, or model.transformer"),
    "inference.vllm.": lambda draft, key: map_to("rollout.vllm." + key.rpartition(".")[2].replace("_", "-"), literal)(
        draft, key
    ),
}


def combine(draft: Draft) -> None:
    """Translate settings that depend on each other."""
    _leave_parts_to_user(draft)
    with draft.target("loss.name"):
        _loss(draft)
    _advantage(draft)
    _sizes(draft)
    draft.put("rollout.engine", "vllm", note="prime-rl's engine")
    with draft.target("train.router_replay"):
        if draft.read("trainer.enable_router_replay", flag):
            draft.put("train.router_replay", "rollout", "trainer.enable_router_replay")
    with draft.target("optimizer.lr"):
        kind = draft.read("trainer.optim.type", text)
        if kind != "adamw":
            raise UnreadSettingError("trainer.optim.type", f"{kind}: Adam is the only optimizer here")
    with draft.target("run.output_dir"):
        name = draft.read("monitors.wandb.name", text)
        if name and not draft.has("output_dir"):
            draft.put("run.output_dir", f"runs/{name}", "monitors.wandb.name", note="the folder of the run")
    # The number is only printed: where it is unread, no key is left to the user.
    with draft.target("run.output_dir"):
        trainers = draft.read("deployment.num_train_gpus", integer)
        nodes = draft.read("deployment.num_train_nodes", integer)
        draft.num_processes = trainers or (8 * nodes if nodes else None)


def _loss(draft: Draft) -> None:
    """Translate prime-rl's loss: DPPO-Binary-TV (``default``) or IPO, with a KL term to the rollout's policy."""
    kind = draft.read(_LOSS + "type", text)
    if kind == "default":
        draft.put("loss.name", "dppo_binary_tv", _LOSS + "type", note="DPPO-Binary-TV without a cap")
        draft.put("loss.ratio_cap", "off", note="prime-rl has no cap")
        limits = {"low": "dppo_mask_low", "high": "dppo_mask_high"}
    elif kind == "ipo":
        draft.put("loss.name", "ipo", _LOSS + "type")
        limit = "ipo_threshold" if draft.has(_LOSS + "ipo_threshold") or _LOSS + "eps" not in draft.defaults else "eps"
        limits = {"low": limit, "high": limit}
    else:
        raise UnreadSettingError(_LOSS + "type", f"no loss here is prime-rl's {kind!r}")
    draft.put("loss.form", "ratio", note="prime-rl's")
    for side, name in limits.items():
        path = f"loss.divergence_threshold_{side}"
        with draft.target(path):
            value = draft.read(_LOSS + name, number)
            if value is None:
                raise UnreadSettingError(_LOSS + name, f"{draft.version} has no default of it")
            draft.put(path, value, _LOSS + name)
    draft.put("loss.aggregation", "token_mean", note="prime-rl divides by the tokens of the batch")
    with draft.target("loss.kl_coef", "loss.kl_estimator", "loss.kl_target"):
        weight = draft.read(_LOSS + "kl_tau", number)
        if weight:
            draft.put("loss.kl_coef", 2 * weight, _LOSS + "kl_tau", note=f"{weight:g} log^2 r = {2 * weight:g} k2")
            draft.put("loss.kl_estimator", "k2", note="prime-rl's")
            draft.put("loss.kl_target", "rollout", note="prime-rl's")
        draft.record(_LOSS + "kl_tau", "ported", "no penalty")


def _leave_parts_to_user(draft: Draft) -> None:
    """Leave what single environments set for themselves to the user."""
    for key, setting in draft.source.items():
        match = re.fullmatch(r"orchestrator\.train\.source\[\d+\]\.(group_size|algo\.type)", key)
        if match is None:
            continue
        path = "rollout.samples_per_prompt" if match.group(1) == "group_size" else "train.advantage"
        with draft.target(path):
            if setting.value != draft.read(f"orchestrator.{match.group(1)}", lambda value: value):
                raise UnreadSettingError(key, f"{setting.value} for one environment; here one value counts for all")
    with draft.target("train.advantage"):
        for key in draft.source:
            if key.startswith("orchestrator.algo.length_penalty."):
                raise UnreadSettingError(key, "a penalty on the length; write it as a function in train.advantage")


def _advantage(draft: Draft) -> None:
    with draft.target("train.advantage"):
        kind = draft.read("orchestrator.algo.type", text)
        if kind != "grpo":
            raise UnreadSettingError("orchestrator.algo.type", f"no estimator here is prime-rl's {kind!r}")
        scale = draft.read(_LOSS + "adv_tau", number)
        if scale != 1:
            raise UnreadSettingError(_LOSS + "adv_tau", f"{scale:g}: advantages are not scaled here")
        draft.put("train.advantage", "mean", "orchestrator.algo.type")


def _sizes(draft: Draft) -> None:
    batch, group = "orchestrator.batch_size", "orchestrator.group_size"
    with draft.target("rollout.prompts_per_step"):
        if draft.has("orchestrator.token_batch_size"):
            raise UnreadSettingError(
                "orchestrator.token_batch_size", "a step here has a number of prompts, not of tokens"
            )
        samples, size = draft.read(batch, integer), draft.read(group, integer)
        if samples % size:
            raise UnreadSettingError(batch, f"{samples} rollouts are not a multiple of the group size {size}")
        draft.put("rollout.prompts_per_step", samples // size, batch, note=f"{samples} rollouts / {size}")
    with draft.target("train.micro_batch_tokens"):
        names = ("trainer.model.seq_len", "trainer.seq_len", "seq_len")
        key = next((name for name in names if draft.has(name)), names[0])
        draft.put("train.micro_batch_tokens", draft.read(key, integer), key, note="one row of the trainer")
