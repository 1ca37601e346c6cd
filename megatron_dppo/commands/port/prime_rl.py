"""prime-rl's configuration (``rl.toml``; read at 559b44772, 2026-08-21) as ours."""

from __future__ import annotations

from megatron_dppo.commands.port.draft import Draft, Rule, flag, gone, literal, number, text, to, whole

_ENV = "an environment of `verifiers`: prompts go to data.train, its rubric to reward.function, its turns to [agent]"

TABLE: dict[str, Rule] = {
    "max_steps": to("run.num_steps", whole),
    "output_dir": to("run.output_dir", text),
    "model.name": to("model.path", text, "a local folder is needed: download it (hf download)"),
    "orchestrator.group_size": to("rollout.samples_per_prompt", whole),
    "orchestrator.train.sampling.max_completion_tokens": to("rollout.max_new_tokens", whole),
    "orchestrator.train.sampling.temperature": to("rollout.temperature", number),
    "orchestrator.train.sampling.top_p": to("rollout.top_p", number),
    "orchestrator.max_off_policy_steps": to("train.max_staleness", whole),
    "orchestrator.eval.interval": to("eval.every", whole),
    "orchestrator.eval.sampling.max_completion_tokens": to("eval.max_new_tokens", whole),
    "orchestrator.eval.sampling.temperature": to("eval.temperature", number),
    "orchestrator.eval.num_examples": to("eval.max_prompts", whole),
    "orchestrator.concurrency.max_inflight": to("rollout.servers.max_in_flight", whole, "of one data-parallel rank"),
    "trainer.optim.lr": to("optimizer.lr", number),
    "trainer.optim.weight_decay": to("optimizer.weight_decay", number),
    "trainer.optim.betas1": to("optimizer.adam_beta1", number),
    "trainer.optim.betas2": to("optimizer.adam_beta2", number),
    "trainer.optim.max_norm": to("optimizer.clip_grad", number),
    "trainer.model.cp": to("parallel.context_parallel_size", whole),
    "trainer.model.ep": to("parallel.expert_model_parallel_size", whole),
    "trainer.model.tp": to("parallel.tensor_model_parallel_size", whole),
    "trainer.model.lora.rank": to("lora.rank", whole),
    "trainer.model.lora.alpha": to("lora.alpha", number),
    "monitors.wandb.project": to("log.wandb_project", text),
    "ckpt.interval": to("checkpoint.save_every", whole),
    "ckpt.keep_last": to("checkpoint.keep", whole),
    "inference.vllm.enable_return_routed_experts": gone("asked for where train.router_replay needs it"),
}
PATTERNS: dict[str, Rule] = {
    "orchestrator.train.source": gone(_ENV),
    "orchestrator.eval.source": gone(_ENV),
    "orchestrator.renderer": gone("the tokenizer's own chat template is applied"),
    "orchestrator.algo": gone("train.advantage and [loss], [distillation]"),
    "deployment.": gone("torchrun or srun starts the processes; megatron-dppo serve the servers"),
    "slurm.": gone("launch/qwen3_moe_dppo.sh"),
    "weight_broadcast.": gone("[rollout.weight_sync]"),
    "trainer.model.ac": gone("model.transformer.recompute_granularity and its companions"),
    "trainer.model.": gone("Megatron's own, or model.transformer"),
    "inference.vllm.": lambda draft, key: to("rollout.vllm." + key.rpartition(".")[2].replace("_", "-"), literal)(
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
    """What several of their settings say together, and prime-rl's defaults."""
    draft.put("loss.name", "prime_rl/2026-09-18", note="prime-rl's loss of that day; docs/loss.md lists the others")
    samples, group = draft.read("orchestrator.batch_size", whole), draft.read("orchestrator.group_size", whole)
    if samples and group and samples % group == 0:
        note = f"{samples} rollouts / {group}"
        draft.put("rollout.prompts_per_step", samples // group, "orchestrator.batch_size", note=note)
    lengths = [k for k in ("trainer.model.seq_len", "trainer.seq_len", "seq_len") if k in draft.source]
    if lengths:
        draft.put("train.micro_batch_tokens", draft.read(lengths[0], whole), lengths[0], note="one row of the trainer")
    draft.put("rollout.engine", "vllm", note="prime-rl's engine")
    if draft.read("trainer.enable_router_replay", flag, False):
        draft.put("train.router_replay", "rollout", "trainer.enable_router_replay")
    if name := draft.read("monitors.wandb.name", text):
        draft.put("run.output_dir", f"runs/{name}", "monitors.wandb.name", note="the folder of the run")
    trainers, nodes = draft.read("deployment.num_train_gpus", whole), draft.read("deployment.num_train_nodes", whole)
    draft.num_processes = trainers or (8 * nodes if nodes else None)
