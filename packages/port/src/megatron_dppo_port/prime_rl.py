"""Rules for prime-rl's configuration, ``rl.toml``."""

import re

from megatron_dppo_port.converters import flag, integer, items, number, text
from megatron_dppo_port.derived import put_server_count, put_targets
from megatron_dppo_port.draft import Draft, NoCounterpart, Rule, UnreadSettingError, map_to, map_within, unsupported

_ENV = "an environment of `verifiers`: prompts go to data.train, its rubric to reward.function, its turns to [agent]"
_LOSS = "trainer.loss."

TABLE: dict[str, Rule] = {
    "max_steps": map_to("run.num_steps", integer),
    "output_dir": map_to("run.output_dir", text),
    "trainer.model.name": map_to("model.path", text),
    "model.name": map_to("model.path", text),
    "orchestrator.group_size": map_to("rollout.samples_per_prompt", integer),
    "orchestrator.train.sampling.max_completion_tokens": map_to("rollout.max_new_tokens", integer),
    "orchestrator.train.sampling.temperature": map_to("rollout.temperature", number),
    "orchestrator.train.sampling.top_p": map_to("rollout.top_p", number),
    "orchestrator.max_off_policy_steps": map_to("train.max_staleness", integer),
    "orchestrator.eval.interval": map_to("eval.every", integer),
    "orchestrator.eval.sampling.max_completion_tokens": map_to("eval.max_new_tokens", integer),
    "orchestrator.eval.sampling.temperature": map_to("eval.temperature", number),
    "orchestrator.eval.num_examples": map_to("eval.max_prompts", integer),
    "orchestrator.eval.group_size": map_to("eval.samples_per_prompt", integer),
    "orchestrator.concurrency.max_inflight": map_to(
        "rollout.servers.max_in_flight", integer, "of one data-parallel rank"
    ),
    "trainer.optim.lr": map_to("optimizer.lr", number),
    "trainer.optim.weight_decay": map_to("optimizer.weight_decay", number),
    "trainer.optim.betas1": map_to("optimizer.adam_beta1", number),
    "trainer.optim.betas2": map_to("optimizer.adam_beta2", number),
    "trainer.optim.max_norm": map_to("optimizer.clip_grad", number),
    "trainer.scheduler.min_lr": map_to("optimizer.min_lr", number),
    "trainer.model.cp": map_to("parallel.context_parallel_size", integer),
    "trainer.model.ep": map_to("parallel.expert_model_parallel_size", integer),
    "trainer.model.tp": map_to("parallel.tensor_model_parallel_size", integer),
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
    "inference.vllm.": map_within("rollout.vllm.", lambda key: key.rpartition(".")[2].replace("_", "-")),
}
NO_COUNTERPARTS: dict[str, NoCounterpart] = {}


def combine(draft: Draft) -> None:
    """Translate settings that depend on each other."""
    _leave_parts_to_user(draft)
    with draft.target("loss.name"):
        _loss(draft)
    _advantage(draft)
    _sizes(draft)
    _schedule(draft)
    _adapters(draft)
    draft.put("rollout.engine", "vllm", note="prime-rl's engine")
    with draft.target("rollout.servers.count", "rollout.vllm.data-parallel-size"):
        _servers(draft)
    replay = "trainer.enable_router_replay"
    draft.translate(replay, "train.router_replay", lambda value: "rollout" if flag(value) else None)
    with draft.target("optimizer.lr"):
        kind = draft.read("trainer.optim.type", text)
        if kind != "adamw":
            raise UnreadSettingError("trainer.optim.type", f"{kind}: Adam is the only optimizer here")
    with draft.target("log.wandb_project"):
        if _has_table(draft, "monitors.wandb"):
            draft.put("log.wandb_project", draft.read("monitors.wandb.project", text), "monitors.wandb.project")
    with draft.target("run.output_dir"):
        name = draft.read("monitors.wandb.name", text)
        if name and not draft.has("output_dir"):
            draft.put("run.output_dir", f"runs/{name}", "monitors.wandb.name", note="the folder of the run")
    # The number is only printed: where it is unread, no key is left to the user.
    with draft.target("run.output_dir"):
        trainers = draft.read("deployment.num_train_gpus", integer)
        nodes = draft.read("deployment.num_train_nodes", integer)
        draft.num_processes = trainers or (8 * nodes if nodes else None)


def _has_table(draft: Draft, name: str) -> bool:
    """Return True if the file has a table, also an empty one: prime-rl fills it with defaults."""
    return any(key == name or key.startswith(name + ".") for key in draft.source)


def _adapters(draft: Draft) -> None:
    table = "trainer.model.lora"
    if not _has_table(draft, table):
        return
    draft.record(table, "ported", "lora.rank")
    with draft.target("lora.rank"):
        for name, harmless in (("dropout", 0), ("modules_to_save", None)):
            value = draft.read(f"{table}.{name}", number if name == "dropout" else items)
            if value and value != harmless:
                raise UnreadSettingError(f"{table}.{name}", f"{value}: adapters here have no {name}")
        draft.put("lora.rank", draft.read(f"{table}.rank", integer), f"{table}.rank")
    draft.translate(f"{table}.alpha", "lora.alpha", number)
    with draft.target("lora.target_modules"):
        names = draft.read(f"{table}.target_modules", items)
        if names:
            is_without_experts = "gate_proj" in names and "experts" not in names
            note = "experts of a mixture get adapters, too" if is_without_experts else ""
            put_targets(draft, names, f"{table}.target_modules", note)


def _servers(draft: Draft) -> None:
    """Translate the number of servers: prime-rl fills its GPUs with data-parallel ranks of one vLLM."""
    gpus_key = "deployment.num_infer_gpus"
    nodes_key = "deployment.num_infer_nodes"
    before = "inference.vllm."
    nodes = draft.read(nodes_key, integer)
    per_node = draft.read("deployment.gpus_per_node" if nodes else gpus_key, integer)
    nodes = (nodes or 1) * draft.read("deployment.num_infer_replicas", integer)
    size = draft.read(before + "tensor_parallel_size", integer) or 1
    ranks_key = before + "data_parallel_size"
    if draft.read(before + "enable_expert_parallel", flag) and draft.read(ranks_key, integer) is None and nodes == 1:
        # Experts are spread over the ranks of one server, so these cannot be servers of their own.
        note = f"{per_node} GPUs / {size}"
        draft.put("rollout.vllm.data-parallel-size", per_node // size, note=note)
        return
    size *= draft.read(ranks_key, integer) or 1
    put_server_count(draft, gpus_key, per_node=per_node, num_nodes=nodes, per_server=size)
    for key in (gpus_key, nodes_key):
        draft.record(key, "ported", "rollout.servers.count")


def _schedule(draft: Draft) -> None:
    """Translate the schedule of the learning rate. Only ``linear`` and ``cosine`` have a warm-up, of ten steps."""
    before = "trainer.scheduler."
    with draft.target("optimizer.lr_decay_style", "optimizer.lr_warmup_steps"):
        kind = draft.read(before + "type", text)
        if kind == "linear":
            reason = "linear: prime-rl lowers the rate in the last decay_steps alone; choose constant, linear or cosine"
            raise UnreadSettingError(before + "type", reason)
        draft.put("optimizer.lr_decay_style", kind, before + "type")
        if kind != "constant":
            steps = draft.read(before + "warmup_steps", integer)
            note = "" if draft.has(before + "warmup_steps") else "prime-rl's default"
            draft.put("optimizer.lr_warmup_steps", 10 if steps is None else steps, before + "warmup_steps", note=note)


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
