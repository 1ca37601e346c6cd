"""Rules for prime-rl's configuration, ``rl.toml`` (commit 559b44772, 2026-08-21)."""

from __future__ import annotations

from megatron_dppo.commands.port.draft import Draft, Rule, flag, integer, literal, map_to, number, text, unsupported

_ENV = "an environment of `verifiers`: prompts go to data.train, its rubric to reward.function, its turns to [agent]"

TABLE: dict[str, Rule] = {
    "max_steps": map_to("run.num_steps", integer),
    "output_dir": map_to("run.output_dir", text),
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

DEFAULTS: dict[str, object] = {
    "train.max_staleness": 8,
    "optimizer.lr": 1e-6,
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


def combine(draft: Draft) -> None:
    """Translate settings that depend on each other."""
    draft.put("loss.name", "prime_rl/2026-09-18", note="prime-rl's loss of that day; docs/loss.md lists the others")
    samples, group = draft.read("orchestrator.batch_size", integer), draft.read("orchestrator.group_size", integer)
    if samples and group and samples % group == 0:
        note = f"{samples} rollouts / {group}"
        draft.put("rollout.prompts_per_step", samples // group, "orchestrator.batch_size", note=note)
    lengths = [k for k in ("trainer.model.seq_len", "trainer.seq_len", "seq_len") if k in draft.source]
    if lengths:
        draft.put(
            "train.micro_batch_tokens", draft.read(lengths[0], integer), lengths[0], note="one row of the trainer"
        )
    draft.put("rollout.engine", "vllm", note="prime-rl's engine")
    if draft.read("trainer.enable_router_replay", flag, False):
        draft.put("train.router_replay", "rollout", "trainer.enable_router_replay")
    if name := draft.read("monitors.wandb.name", text):
        draft.put("run.output_dir", f"runs/{name}", "monitors.wandb.name", note="the folder of the run")
    trainers, nodes = (
        draft.read("deployment.num_train_gpus", integer),
        draft.read("deployment.num_train_nodes", integer),
    )
    draft.num_processes = trainers or (8 * nodes if nodes else None)
