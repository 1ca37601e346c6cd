"""Rules for slime's arguments (commit 624b824a8, 2026-08-21). Keys are flags without dashes."""

from __future__ import annotations

from megatron_dppo.commands.port.draft import (
    Draft,
    Rule,
    flag,
    integer,
    items,
    literal,
    map_to,
    number,
    one_or_list,
    text,
    unsupported,
)
from megatron_dppo.commands.port.verl import KL_ESTIMATORS

_MODEL = "the model's shape is read from model.path/config.json"
_ADVANTAGES = {"grpo": "std", "gspo": "std", "cispo": "std", "reinforce_plus_plus": "none"}
_ADVANTAGES["reinforce_plus_plus_baseline"] = "mean"
_BOXED = ("math", "deepscaler", "dapo", "boxed_math")
_RAY = "torchrun or srun starts the processes; there is no Ray"
_OPTIMIZER = ("optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer")
_PARALLEL = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")

TABLE: dict[str, Rule] = {
    "hf-checkpoint": map_to("model.path", text),
    "ref-load": unsupported(
        "a Megatron checkpoint: model.reference_path is a Hugging Face folder; default: model.path"
    ),
    "load": unsupported("rerunning a command resumes its run from run.output_dir"),
    "save": map_to("run.output_dir", text),
    "save-interval": map_to("checkpoint.save_every", integer),
    "prompt-data": map_to("data.train", one_or_list),
    "input-key": map_to("data.prompt_key", text),
    "label-key": map_to("data.label_key", text),
    "apply-chat-template": map_to("data.apply_chat_template", flag),
    "rollout-max-prompt-len": map_to("data.max_prompt_tokens", integer),
    "rollout-shuffle": unsupported("prompts are always shuffled, by run.seed"),
    "num-rollout": map_to("run.num_steps", integer),
    "rollout-batch-size": map_to("rollout.prompts_per_step", integer),
    "n-samples-per-prompt": map_to("rollout.samples_per_prompt", integer),
    "rollout-max-response-len": map_to("rollout.max_new_tokens", integer),
    "rollout-temperature": map_to("rollout.temperature", number),
    "rollout-top-p": map_to("rollout.top_p", number),
    "rollout-top-k": map_to("rollout.top_k", lambda value: max(0, integer(value))),
    "balance-data": map_to("train.balance_ranks", flag),
    "eval-interval": map_to("eval.every", integer),
    "n-samples-per-eval-prompt": map_to("eval.samples_per_prompt", integer),
    "eval-max-response-len": map_to("eval.max_new_tokens", integer),
    "eval-temperature": map_to("eval.temperature", number),
    "eval-top-p": map_to("eval.top_p", number),
    "eval-top-k": map_to("eval.top_k", lambda value: max(0, integer(value))),
    "entropy-coef": map_to("loss.entropy_coef", number),
    "lr": map_to("optimizer.lr", number),
    "min-lr": map_to("optimizer.min_lr", number),
    "lr-decay-style": map_to("optimizer.lr_decay_style", text),
    "lr-warmup-iters": map_to("optimizer.lr_warmup_steps", integer),
    "weight-decay": map_to("optimizer.weight_decay", number),
    "adam-beta1": map_to("optimizer.adam_beta1", number),
    "adam-beta2": map_to("optimizer.adam_beta2", number),
    "adam-eps": map_to("optimizer.adam_eps", number),
    "clip-grad": map_to("optimizer.clip_grad", number),
    "accumulate-allreduce-grads-in-fp32": map_to("optimizer.grad_reduce_in_fp32", flag),
    "seed": map_to("run.seed", integer),
    "partial-rollout": unsupported("rollout.partial_rollouts, with rollout.oversample and rollout.abort_slowest"),
    "use-dynamic-batch-size": unsupported("rows are always packed up to train.micro_batch_tokens"),
    "micro-batch-size": unsupported("rows are packed up to train.micro_batch_tokens"),
    "use-rollout-routing-replay": lambda draft, key: draft.put("train.router_replay", "rollout", key),
    "use-routing-replay": lambda draft, key: draft.put("train.router_replay", "recorded", key),
    "use-slime-router": unsupported("the trainer balances requests itself"),
    "optimizer": unsupported("Adam is the only optimizer"),
    "calculate-per-token-loss": lambda draft, key: draft.put("loss.aggregation", "token_mean", key),
    "attention-dropout": unsupported("always 0"),
    "hidden-dropout": unsupported("always 0"),
    "attention-backend": unsupported("chosen at startup"),
    "wandb-key": unsupported("set the API key in the environment (WANDB_API_KEY), not in a file"),
    "custom-generate-function-path": unsupported("use rollout.generate; its signature differs (docs/engines.md)"),
    "rollout-function-path": unsupported("the rollout scheduler cannot be replaced"),
} | {f"{name}-parallel-size": map_to(f"parallel.{name.replace('-', '_')}_parallel_size", integer) for name in _PARALLEL}
TABLE |= {name: map_to("optimizer." + name.replace("-", "_"), flag) for name in _OPTIMIZER}
PATTERNS: dict[str, Rule] = {
    "recompute-": lambda draft, key: map_to("model.transformer." + key.replace("-", "_"), literal)(draft, key),
    "moe-token-dispatcher-type": lambda draft, key: map_to("model.transformer.moe_token_dispatcher_type", text)(
        draft, key
    ),
    "sglang-": lambda draft, key: _server_flag(draft, key),
    "actor-num-": unsupported(_RAY),
    "rollout-num-gpus": unsupported("rollout.servers.count and the GPUs of each (megatron-dppo serve)"),
    "wandb-": unsupported("use log.wandb_project and the environment variables of W&B"),
}
_SHAPE = """num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention
kv-channels vocab-size normalization norm-epsilon swiglu disable-bias-linear qk-layernorm rotary-base rotary-percent
use-rotary-position-embeddings position-embedding-type untie-embeddings-and-output-weights num-experts moe-
add-qkv-bias multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
max-position-embeddings
rotary-scaling-factor mscale attention-softmax-in-fp32 spec make-vocab-size-divisible-by"""
PATTERNS |= {name: unsupported(_MODEL) for name in _SHAPE.split()}

DEFAULTS: dict[str, object] = {
    "eval.temperature": 1.0,
    "optimizer.lr_decay_style": "linear",
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
}


def _server_flag(draft: Draft, key: str) -> None:
    value = draft.source[key]
    if isinstance(value, list) and len(value) > 1:
        draft.record(key, "unsupported", "a list; set it in [rollout.sglang] under SGLang's name")
    else:
        draft.put("rollout.sglang." + key.removeprefix("sglang-"), True if value == [] else literal(value), key)


def combine(draft: Draft) -> None:
    """Translate arguments that depend on each other."""
    _sizes(draft)
    _loss(draft)
    _penalties(draft)
    _engine(draft)
    _evaluation_and_reward(draft)
    if draft.read("tensor-model-parallel-size", integer, 1) == 1:
        draft.record("sequence-parallel", "unsupported", "has no effect with tensor_model_parallel_size = 1")
    elif "sequence-parallel" in draft.source:
        draft.put("parallel.sequence_parallel", True, "sequence-parallel")
    if "use-wandb" in draft.source and draft.read("wandb-project", text):
        draft.put("log.wandb_project", draft.read("wandb-project", text), "use-wandb", "wandb-project")
    if "eval-temperature" not in draft.source and (temperature := draft.read("rollout-temperature", number)):
        draft.put("eval.temperature", temperature, note="slime evaluates at the rollout's")
    nodes, gpus = draft.read("actor-num-nodes", integer, 1), draft.read("actor-num-gpus-per-node", integer)
    draft.num_processes = nodes * gpus if gpus else None


def _sizes(draft: Draft) -> None:
    prompts, samples = draft.read("rollout-batch-size", integer), draft.read("n-samples-per-prompt", integer)
    batch, steps = draft.read("global-batch-size", integer), draft.read("num-steps-per-rollout", integer)
    if steps:
        draft.put("train.mini_batches", steps, "num-steps-per-rollout")
    elif prompts and samples and batch and prompts * samples % batch == 0:
        note = f"{prompts} * {samples} / {batch} samples"
        draft.put("train.mini_batches", prompts * samples // batch, "global-batch-size", note=note)
    more = draft.read("over-sampling-batch-size", integer)
    if more and prompts and more > prompts:
        draft.put("rollout.oversample", more / prompts, "over-sampling-batch-size", note=f"{more} / {prompts} prompts")
    if "nonzero_std" in str(draft.source.get("dynamic-sampling-filter-path", "")):
        draft.put("rollout.dynamic_sampling", True, "dynamic-sampling-filter-path")
    tokens, context = draft.read("max-tokens-per-gpu", integer), draft.read("context-parallel-size", integer, 1)
    if tokens:
        note = f"{tokens} a GPU * {context}" if context > 1 else ""
        draft.put("train.micro_batch_tokens", tokens * context, "max-tokens-per-gpu", note=note)
    if not draft.read("num-rollout", integer) and (epochs := draft.read("num-epoch", number)):
        draft.put("run.num_epochs", epochs, "num-epoch")


def _loss(draft: Draft) -> None:
    estimator = draft.read("advantage-estimator", text, "grpo")
    low = draft.read("eps-clip", number, 0.2)
    high = draft.read("eps-clip-high", number, low)
    if estimator not in _ADVANTAGES:
        draft.record(
            "advantage-estimator",
            "unsupported",
            "there is no critic; train.advantage keeps its default, the reward minus the group mean",
        )
    else:
        plain = "disable-grpo-std-normalization" in draft.source
        kind = "mean" if plain and _ADVANTAGES[estimator] == "std" else _ADVANTAGES[estimator]
        draft.put("train.advantage", kind, "advantage-estimator", "disable-grpo-std-normalization")
        if estimator.startswith("reinforce"):
            draft.put("train.advantage_normalization", "batch", note="REINFORCE++")
    anchored = "pi / mu, from the log-probabilities of the rollout"
    if estimator == "cispo":
        draft.put("loss.name", "cispo", note=anchored)
        draft.put("loss.ratio_floor", 1 - low, "eps-clip")
        draft.put("loss.ratio_cap", 1 + high, "eps-clip-high")
        return
    name = "gspo" if estimator == "gspo" else "ppo_decoupled" if "use-tis" in draft.source else "ppo_clip"
    draft.put("loss.name", name, note="the old policy is recomputed" if name == "ppo_decoupled" else anchored)
    draft.put("loss.clip_ratio_low", low, "eps-clip")
    draft.put("loss.clip_ratio_high", high, "eps-clip-high")
    if name != "gspo" and "eps-clip-c" in draft.source:
        draft.put("loss.dual_clip", draft.read("eps-clip-c", number), "eps-clip-c")
    if name == "ppo_decoupled":
        draft.put("loss.mismatch", "truncate", "use-tis")
        draft.put("loss.mismatch_high", draft.read("tis-clip", number, 2.0), "tis-clip")


def _penalties(draft: Draft) -> None:
    value = draft.read("kl-loss-coef", number, 0.0)
    if "use-kl-loss" in draft.source and value > 0:
        draft.put("loss.kl_coef", value, "kl-loss-coef")
        if estimator := draft.read("kl-loss-type", lambda v: KL_ESTIMATORS[text(v)]):
            draft.put("loss.kl_estimator", estimator, "kl-loss-type")
    for key in ("use-kl-loss", "kl-loss-coef", "kl-loss-type"):
        draft.record(key, "ported", "see loss.kl_coef")
    if (reward := draft.read("kl-coef", number, 0.0)) > 0:
        draft.put("reward.kl_coef", reward, "kl-coef")
    draft.record("kl-coef", "ported", "reward.kl_coef is 0")


def _engine(draft: Draft) -> None:
    draft.put("rollout.engine", "sglang", note="slime's engine")
    if "colocate" in draft.source:
        draft.put("rollout.servers.colocated", True, "colocate")
        draft.put("rollout.weight_sync.method", "ipc", note="servers on the trainer's GPUs")
    if size := draft.read("rollout-num-gpus-per-engine", integer):
        draft.put("rollout.sglang.tp-size", size, "rollout-num-gpus-per-engine")


def _evaluation_and_reward(draft: Draft) -> None:
    pairs = draft.read("eval-prompt-data", items, [])
    if len(pairs) == 1:
        draft.put("data.eval", pairs[0], "eval-prompt-data")
    elif pairs and len(pairs) % 2 == 0:
        draft.put("data.eval", dict(zip(pairs[::2], pairs[1::2], strict=True)), "eval-prompt-data")
    path, kind = draft.read("custom-rm-path", text), draft.read("rm-type", text)
    if path:
        module, _, function = path.rpartition(".")
        draft.put("reward.function", f"{module}:{function}", "custom-rm-path")
        draft.record("rm-type", "unsupported", "custom-rm-path names the reward")
    elif kind in _BOXED:
        note = "" if kind == "math" else "the last boxed answer, without the rules of " + kind
        draft.put("reward.function", "math", "rm-type", note=note)
    draft.record("rm-type", "unsupported", "name a function in reward.function (docs/rewards.md)")
