"""Rules for slime's arguments. Keys are flags without dashes."""

import math

from megatron_dppo_port.converters import filter_size, flag, integer, items, literal, number, one_or_list, text
from megatron_dppo_port.derived import put_processes, put_server_count
from megatron_dppo_port.draft import Draft, NoCounterpart, Rule, UnreadSettingError, map_to, map_within, unsupported
from megatron_dppo_port.slime_loss import combine_loss

_MODEL = "the model's shape is read from model.path/config.json"
_BOXED = ("math", "deepscaler", "dapo", "boxed_math")
_RAY = "torchrun or srun starts the processes; there is no Ray"
_OPTIMIZER = ("optimizer-cpu-offload", "overlap-cpu-optimizer-d2h-h2d", "use-precision-aware-optimizer")
_OPTIMIZER_NUMBERS = ("lr", "min-lr", "weight-decay", "adam-beta1", "adam-beta2", "adam-eps", "clip-grad")
_STAGES = ("sglang-pp-size", "sglang-pipeline-parallel-size")
_PARALLEL = ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")


def _replay(mode: str) -> Rule:
    return lambda draft, key: draft.translate(key, "train.router_replay", lambda value: mode if flag(value) else None)


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
    "rollout-shuffle": unsupported("prompts are always shuffled, by run.seed"),
    "num-rollout": map_to("run.num_steps", integer),
    "rollout-batch-size": map_to("rollout.prompts_per_step", integer),
    "n-samples-per-prompt": map_to("rollout.samples_per_prompt", integer),
    "rollout-max-response-len": map_to("rollout.max_new_tokens", integer),
    "rollout-temperature": map_to("rollout.temperature", number),
    "rollout-top-p": map_to("rollout.top_p", number),
    "rollout-top-k": map_to("rollout.top_k", filter_size),
    "balance-data": map_to("train.balance_ranks", flag),
    "eval-interval": map_to("eval.every", integer),
    "n-samples-per-eval-prompt": map_to("eval.samples_per_prompt", integer),
    "eval-max-response-len": map_to("eval.max_new_tokens", integer),
    "entropy-coef": map_to("loss.entropy_coef", number),
    "lr-decay-style": map_to("optimizer.lr_decay_style", text),
    "lr-warmup-iters": map_to("optimizer.lr_warmup_steps", integer),
    "use-rollout-logprobs": unsupported("the anchor is always the rollout's own log-probability"),
    "decoder-first-pipeline-num-layers": map_to("model.transformer.num_layers_in_first_pipeline_stage", integer),
    "decoder-last-pipeline-num-layers": map_to("model.transformer.num_layers_in_last_pipeline_stage", integer),
    "accumulate-allreduce-grads-in-fp32": map_to("optimizer.grad_reduce_in_fp32", flag),
    "seed": map_to("run.seed", integer),
    "partial-rollout": unsupported("rollout.partial_rollouts, with rollout.oversample and rollout.abort_slowest"),
    "use-dynamic-batch-size": unsupported("rows are always packed up to train.micro_batch_tokens"),
    "micro-batch-size": unsupported("rows are packed up to train.micro_batch_tokens"),
    "use-rollout-routing-replay": _replay("rollout"),
    "use-routing-replay": _replay("recorded"),
    "use-slime-router": unsupported("the trainer balances requests itself"),
    "optimizer": unsupported("Adam is the only optimizer"),
    "attention-dropout": unsupported("always 0"),
    "hidden-dropout": unsupported("always 0"),
    "attention-backend": unsupported("chosen at startup"),
    "wandb-key": unsupported("set the API key in the environment (WANDB_API_KEY), not in a file"),
    "custom-generate-function-path": unsupported("use rollout.generate; its signature differs (docs/engines.md)"),
    "rollout-function-path": unsupported("the rollout scheduler cannot be replaced"),
} | {f"{name}-parallel-size": map_to(f"parallel.{name.replace('-', '_')}_parallel_size", integer) for name in _PARALLEL}
TABLE |= {name: map_to("optimizer." + name.replace("-", "_"), flag) for name in _OPTIMIZER}
TABLE |= {name: map_to("optimizer." + name.replace("-", "_"), number) for name in _OPTIMIZER_NUMBERS}
_SHAPE = """num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention
kv-channels vocab-size normalization norm-epsilon swiglu disable-bias-linear qk-layernorm rotary-base rotary-percent
use-rotary-position-embeddings position-embedding-type untie-embeddings-and-output-weights num-experts moe-
add-qkv-bias multi-latent-attention kv-lora-rank q-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim
max-position-embeddings
rotary-scaling-factor mscale attention-softmax-in-fp32 spec make-vocab-size-divisible-by"""


def _server_flag(draft: Draft, key: str) -> None:
    path = "rollout.sglang." + key.removeprefix("sglang-")
    with draft.target(path):
        value = draft.read(key, lambda words: words)
        if len(value) > 1:
            draft.record(key, "unsupported", "a list; set it in [rollout.sglang] under SGLang's name")
        else:
            draft.put(path, literal(value) if value else True, key)


PATTERNS: dict[str, Rule] = {
    "recompute-": map_within("model.transformer.", lambda key: key.replace("-", "_")),
    "moe-token-dispatcher-type": map_to("model.transformer.moe_token_dispatcher_type", text),
    "sglang-": _server_flag,
    "actor-num-": unsupported(_RAY),
    "rollout-num-gpus": unsupported("rollout.servers.count and the GPUs of each (megatron-dppo serve)"),
    "wandb-": unsupported("use log.wandb_project and the environment variables of W&B"),
    # The shape comes from config.json, so an unread one changes nothing.
} | dict.fromkeys(_SHAPE.split(), lambda draft, key: draft.record(key, "unsupported", _MODEL))


_ADVANTAGE = "changes the advantages; write it as a function in train.advantage"
_PRECISION = "see [model.transformer] in docs/parallelism.md"
NO_COUNTERPARTS = {
    "use-opd": NoCounterpart("distillation.teacher_path", "see [distillation]"),
    "custom-reward-post-process-path": NoCounterpart("train.advantage", _ADVANTAGE),
    "custom-advantage-function-path": NoCounterpart("train.advantage", _ADVANTAGE),
    "fp8-format": NoCounterpart("model.transformer.fp8", _PRECISION),
    "fp16": NoCounterpart("model.dtype", "set model.dtype"),
    "enable-mtp-training": NoCounterpart("model.transformer.mtp_num_layers", "no loss for multi-token prediction"),
    "loss-mask-type": NoCounterpart("data.train", "a mask of its own", ("qwen", "qwen3")),
}


def combine(draft: Draft) -> None:
    """Translate arguments that depend on each other."""
    _sizes(draft)
    _schedule(draft)
    combine_loss(draft)
    _engine(draft)
    _layout(draft)
    _evaluation(draft)
    _reward(draft)
    with draft.target("log.wandb_project"):
        if draft.has("use-wandb"):
            draft.put("log.wandb_project", draft.read("wandb-project", text), "use-wandb", "wandb-project")


def _sizes(draft: Draft) -> None:
    with draft.target("train.mini_batches"):
        steps = draft.read("num-steps-per-rollout", integer)
        if steps:
            draft.put("train.mini_batches", steps, "num-steps-per-rollout")
            draft.record("global-batch-size", "ported", "num-steps-per-rollout sets the number of updates")
        else:
            _mini_batches(draft)
    with draft.target("rollout.oversample"):
        more, prompts = draft.read("over-sampling-batch-size", integer), draft.read("rollout-batch-size", integer)
        if more and prompts and more > prompts:
            note = f"{more} / {prompts} prompts"
            draft.put("rollout.oversample", more / prompts, "over-sampling-batch-size", note=note)
    with draft.target("rollout.dynamic_sampling"):
        path = draft.read("dynamic-sampling-filter-path", text)
        if path and "nonzero_std" in path:
            draft.put("rollout.dynamic_sampling", True, "dynamic-sampling-filter-path")
        elif path:
            raise UnreadSettingError("dynamic-sampling-filter-path", f"{path}: write it as rollout.filter")
    with draft.target("train.micro_batch_tokens"):
        tokens, context = draft.read("max-tokens-per-gpu", integer), draft.read("context-parallel-size", integer)
        note = f"{tokens} a GPU * {context}" if context and context > 1 else ""
        draft.put("train.micro_batch_tokens", tokens and tokens * (context or 1), "max-tokens-per-gpu", note=note)
    with draft.target("data.max_prompt_tokens"):
        key = "rollout-max-prompt-len"
        length, context = draft.read(key, integer), draft.read("rollout-max-context-len", integer)
        if length is None and context:
            draft.put("data.max_prompt_tokens", context - 1, "rollout-max-context-len", note=f"{context} - 1")
        else:
            draft.put("data.max_prompt_tokens", length, key)
    with draft.target("run.num_epochs"):
        if draft.read("num-rollout", integer) is None:
            draft.put("run.num_epochs", draft.read("num-epoch", number), "num-epoch")


def _schedule(draft: Draft) -> None:
    """Translate the warm-up as a fraction of the steps, and the staleness of ``train_async.py``."""
    with draft.target("optimizer.lr_warmup_steps"):
        fraction, steps = draft.read("lr-warmup-fraction", number), draft.read("num-rollout", integer)
        if fraction and not steps:
            raise UnreadSettingError("lr-warmup-fraction", f"{fraction:g} of the number of steps, which is not set")
        if fraction:
            note = f"{fraction:g} * {steps} steps"
            draft.put("optimizer.lr_warmup_steps", int(fraction * steps), "lr-warmup-fraction", note=note)
    if "train_async" in draft.defaults:
        with draft.target("train.max_staleness"):
            interval = draft.read("update-weights-interval", integer) or 1
            draft.put("train.max_staleness", interval, "update-weights-interval", note="train_async.py samples ahead")


def _mini_batches(draft: Draft) -> None:
    batch = draft.read("global-batch-size", integer)
    prompts, samples = draft.read("rollout-batch-size", integer), draft.read("n-samples-per-prompt", integer)
    if not batch:
        raise UnreadSettingError("global-batch-size", "not set: Megatron's default depends on the layout")
    if not prompts:
        return
    if prompts * samples % batch:
        raise UnreadSettingError("global-batch-size", f"{prompts} * {samples} samples are not a multiple of {batch}")
    note = f"{prompts} * {samples} / {batch} samples"
    draft.put("train.mini_batches", prompts * samples // batch, "global-batch-size", note=note)


def _engine(draft: Draft) -> None:
    draft.put("rollout.engine", "sglang", note="slime's engine")
    with draft.target("rollout.servers.colocated", "rollout.weight_sync.method"):
        if draft.read("colocate", flag):
            draft.put("rollout.servers.colocated", True, "colocate")
            draft.put("rollout.weight_sync.method", "ipc", note="servers on the trainer's GPUs")
    with draft.target("rollout.sglang.tp-size"):
        size = draft.read("rollout-num-gpus-per-engine", integer)
        stages = int(next((draft.read(key, integer) for key in _STAGES if draft.has(key)), 1))
        note = f"{size} GPUs of an engine / {stages} stages" if stages > 1 else ""
        if size > 1 or draft.has("rollout-num-gpus-per-engine"):
            draft.put("rollout.sglang.tp-size", size // stages, "rollout-num-gpus-per-engine", note=note)
    with draft.target("rollout.servers.count"):
        _servers(draft)
    for key in ("offload", "offload-train", "offload-rollout"):
        with draft.target("rollout.servers.colocated"):
            if draft.has(key) and draft.get("rollout.servers.colocated"):
                draft.read(key, flag)
                draft.record(
                    key, "changed", "rollout.servers.colocated = True: server and trainer take turns on the GPU"
                )


def _servers(draft: Draft) -> None:
    """Translate the number of engines. Colocated ones get the trainer's GPUs unless a number is set."""
    total, per_node = draft.read("rollout-num-gpus", integer), draft.read("num-gpus-per-node", integer)
    source = "rollout-num-gpus"
    if total is None and draft.read("colocate", flag):
        source = "actor-num-gpus-per-node"
        total = draft.read("actor-num-nodes", integer) * draft.read(source, integer)
    if total is None:
        raise UnreadSettingError(source, "not set: the number of servers is open")
    per_node = min(per_node, total)
    key = "rollout-num-gpus-per-engine"
    nodes = math.ceil(total / per_node)
    put_server_count(draft, key, per_node=per_node, num_nodes=nodes, per_server=draft.read(key, integer))
    draft.record("rollout-num-gpus", "ported", "rollout.servers.count")


def _layout(draft: Draft) -> None:
    with draft.target("parallel.sequence_parallel"):
        size = draft.read("tensor-model-parallel-size", integer)
        is_on = draft.read("sequence-parallel", flag)
        if size == 1:
            draft.record("sequence-parallel", "unsupported", "has no effect with tensor_model_parallel_size = 1")
        elif is_on:
            draft.put("parallel.sequence_parallel", True, "sequence-parallel")
    dispatcher = "model.transformer.moe_token_dispatcher_type"
    with draft.target(dispatcher, "model.transformer.moe_flex_dispatcher_backend"):
        if draft.read("moe-enable-deepep", flag):
            draft.put(dispatcher, "flex", "moe-enable-deepep", note="DeepEP")
            draft.record("moe-token-dispatcher-type", "ported", "moe_token_dispatcher_type = 'flex'")
            draft.put("model.transformer.moe_flex_dispatcher_backend", "deepep", note="--moe-enable-deepep")
    put_processes(draft, "actor-num-nodes", "actor-num-gpus-per-node")


def _evaluation(draft: Draft) -> None:
    with draft.target("data.eval"):
        pairs = draft.read("eval-prompt-data", items) or []
        if len(pairs) == 1:
            draft.put("data.eval", pairs[0], "eval-prompt-data")
        elif pairs and len(pairs) % 2 == 0:
            sets = dict(zip(pairs[::2], pairs[1::2], strict=True))
            if len(sets) < len(pairs) // 2:
                raise UnreadSettingError("eval-prompt-data", f"two sets have one name: {' '.join(pairs[::2])}")
            draft.put("data.eval", sets, "eval-prompt-data")
    for name, convert in (("temperature", number), ("top-p", number), ("top-k", filter_size)):
        path = "eval." + name.replace("-", "_")
        with draft.target(path):
            value = draft.read(f"eval-{name}", convert)
            if value is not None:
                draft.put(path, value, f"eval-{name}")
            elif (value := draft.read(f"rollout-{name}", convert)) != (1.0 if convert is number else 0) or path == (
                "eval.temperature"
            ):
                draft.put(path, value, note="slime evaluates at the rollout's")


def _reward(draft: Draft) -> None:
    with draft.target("reward.function"):
        path, kind = draft.read("custom-rm-path", text), draft.read("rm-type", text)
        if path:
            module, _, function = path.rpartition(".")
            draft.put("reward.function", f"{module}:{function}", "custom-rm-path")
            draft.record("rm-type", "unsupported", "custom-rm-path names the reward")
        elif kind in _BOXED:
            note = "" if kind == "math" else "the last boxed answer, without the rules of " + kind
            draft.put("reward.function", "math", "rm-type", note=note)
    if draft.has("rm-type"):
        draft.record("rm-type", "unsupported", "name a function in reward.function (docs/rewards.md)")
