"""Bytes that follow from the configuration alone: rollouts, token columns, weight sync, checkpoints, memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dppo.config.layout import Layout, LinearAttentionShape
from megatron_dppo.config.schema import Config
from megatron_dppo.data.training_samples import RowShape, fill_bins
from megatron_dppo.engines.serving.command import count_gpus_per_server
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import model_shape, routing_shape
from megatron_dppo.parallel.platform import DTYPES
from megatron_dppo_engines.weight_files import find_weight_files
from megatron_dppo_plan.machine import GpuNode


@dataclass(frozen=True, kw_only=True)
class KvCachePlan:
    """Key-value cache of the rollout engine."""

    bytes_per_token: int
    """Bytes of keys and values per token, in all layers that keep every token, on all GPUs of one server."""
    bytes_per_sequence: int
    """Bytes of the states of linear attention per sequence, in all layers and on all GPUs of one server. 0 without."""
    window_bytes_per_token: int = 0
    """Bytes of keys and values per token in the layers with a sliding window. 0 without."""
    window: int = 0
    gpus_per_server: int
    cache_bytes: int | None
    """Bytes of the cache on one GPU. None with the local engine."""
    tokens_in_flight: int | None
    """Tokens that fit the cache of one server. None with the local engine."""
    longest: int
    """Length of the longest sequence in tokens."""
    weight_bytes: int
    """Bytes of the engine's weights, over all GPUs of one server."""

    @property
    def sequences(self) -> int | None:
        """Number of the longest sequences that fit one server. None with the local engine."""
        return None if self.tokens_in_flight is None else self.tokens_in_flight // self.longest


def plan_kv_cache(config: Config, hf_config: Any, parameters: int, machine: GpuNode) -> KvCachePlan:
    """Return the cache that fits a server beside its weights, which are split over its GPUs."""
    size = DTYPES[config.rollout.dtype or config.model.dtype].itemsize
    heads, values_per_head = _cache_layout(hf_config)
    # Linear attention caches states of a fixed size instead.
    shape = model_shape(hf_config)
    num_full_layers = shape.num_layers - len(shape.linear_layers) - len(shape.window_layers)
    states = _state_bytes(hf_config, shape.linear, size)
    per_token = num_full_layers * heads * values_per_head * size
    window_per_token = len(shape.window_layers) * heads * values_per_head * size
    window = hf_config.sliding_window if shape.window_layers else 0
    longest = longest_sample(config)
    weight_bytes = served_weight_bytes(config, parameters)
    cache = KvCachePlan(
        bytes_per_token=per_token,
        bytes_per_sequence=states,
        window_bytes_per_token=window_per_token,
        window=window,
        gpus_per_server=1,
        cache_bytes=None,
        tokens_in_flight=None,
        longest=longest,
        weight_bytes=weight_bytes,
    )
    if config.rollout.engine == "local":
        return cache
    options = _server_options(config)
    gpus = count_gpus_per_server(config.rollout.engine, options)
    # With data-parallel attention each replica has the cache of its own sequences.
    has_dp_attention = options.get("enable-dp-attention") is True
    attention_gpus = gpus // int(options.get("dp-size", 1)) if has_dp_attention else gpus
    cache_bytes = round(server_memory_bytes(config, machine) - weight_bytes / gpus)
    # With more GPUs than key-value heads, several GPUs hold copies of the same head.
    copies = max(1, attention_gpus // heads)
    window_tokens = _cached_window_tokens(config.rollout.engine, options, window, longest)
    sequence = copies * (per_token * longest + window_per_token * window_tokens) + states
    # The states of linear attention are split by heads as well, and count once for each sequence.
    in_flight = max(0, int(cache_bytes * gpus * longest // sequence))
    return replace(cache, gpus_per_server=gpus, cache_bytes=cache_bytes, tokens_in_flight=in_flight)


_SGLANG_WINDOW_RATIO = 0.8
"""SGLang's default of ``swa-full-tokens-ratio``: tokens of the cache of layers with a window, over those of others."""


def _cached_window_tokens(engine: str, options: Mapping[str, Any], window: int, longest: int) -> float:
    """Return the tokens of one sequence of ``longest`` for which a server has room in the layers with a window.

    vLLM frees what no query sees any more. SGLang has two pools of a fixed ratio.
    """
    if not window or options.get("disable-hybrid-swa-memory") is True:
        return longest
    if engine == "vllm":
        return longest if options.get("disable-hybrid-kv-cache-manager") is True else min(window, longest)
    return longest * float(options.get("swa-full-tokens-ratio", _SGLANG_WINDOW_RATIO))


def served_weight_bytes(config: Config, parameters: int) -> int:
    """Return the bytes of the folder ``rollout.servers.model`` if it is here, else of all parameters."""
    folder = config.rollout.servers.model
    if folder is not None and any(Path(folder).glob("*.safetensors")):
        return sum(file.stat().st_size for file in find_weight_files(Path(folder), "rollout.servers.model").files)
    return parameters * DTYPES[config.rollout.dtype or config.model.dtype].itemsize


def server_memory_bytes(config: Config, machine: GpuNode) -> float:
    """Return the bytes that a server uses for weights and cache on each GPU: 85 % of its memory by default."""
    options = _server_options(config)
    return machine.memory * float(options.get("mem-fraction-static", options.get("gpu-memory-utilization", 0.85)))


def _server_options(config: Config) -> dict[str, Any]:
    options = config.rollout.sglang if config.rollout.engine == "sglang" else config.rollout.vllm
    # ``serve`` accepts both spellings of a flag.
    return {key.replace("_", "-"): value for key, value in options.items()}


_STATE_SIZE = 4
"""Bytes of one value of a recurrent state, which servers keep in fp32."""


def _state_bytes(hf_config: Any, linear: LinearAttentionShape | None, size: int) -> int:
    """Return the bytes of one sequence's states of linear attention, with the last inputs of its convolution."""
    if linear is None:
        return 0
    state = linear.num_value_heads * linear.key_head_dim * linear.value_head_dim * _STATE_SIZE
    inputs = (hf_config.linear_conv_kernel_dim - 1) * sum(linear.sections[:3]) * size
    return len(linear.layers) * (state + inputs)


def _cache_layout(hf_config: Any) -> tuple[int, int]:
    """Return the heads of a layer's cache that are split over GPUs, and the values of one head per token."""
    shape = model_shape(hf_config)
    fields = get_family(hf_config).fields(hf_config, shape)
    if shape.has_latent_attention:
        # Latent attention caches one compressed vector and the rotary part, which every GPU holds.
        return 1, fields["kv_lora_rank"] + fields["qk_pos_emb_head_dim"]
    return shape.num_query_groups, 2 * fields["kv_channels"]


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """Bytes that go to the engines and to disk."""

    sync: int
    """Bytes of one weight sync through the sending GPU."""
    sync_seconds: float | None
    """Time over the network link, or within each GPU's memory. None with the local engine."""
    sync_buffer: int
    """Bytes of the two buckets on a sending GPU: one is sent while the next is gathered."""
    sync_by_handle: bool
    """True if every rank has such buckets and its server reads them in place (``weight_sync.method = "ipc"``)."""
    checkpoint: int
    """Bytes of one checkpoint: trained parameters, fp32 copies and both moments."""
    export: int
    """Bytes of the exported Hugging Face folder."""
    save_host: int
    """Bytes of host memory per rank while a checkpoint is written: an upper bound, or the copy of ``async_save``."""


_HANDLE_PASSES = 4
"""Passes of each byte through a GPU's memory in an IPC weight sync: the trainer reads it and writes it to a bucket, the
server reads it and writes it to its weights."""
_SAVE_HOST = 4
"""Bytes of host memory per parameter of a rank: 3.5 with 74 M parameters on two data-parallel ranks, 2.3 with 114 M
(``benchmarks/checkpoint.py``)."""


def plan_transfers(
    config: Config, parameters: int, trained: tuple[int, int], layout: Layout, machine: GpuNode
) -> TransferPlan:
    """Return the bytes of weight sync, checkpoint and export by the number of parameters.

    The time of a sync is that of the link or memory alone, without gathering. ``trained`` is ``PlannedModel.trained``.
    """
    size = DTYPES[config.model.dtype].itemsize
    by_adapter = config.rollout.weight_sync.method == "adapter"
    sent = trained[0] * size if by_adapter else parameters * size
    if config.rollout.servers.model is not None:
        sent = served_weight_bytes(config, parameters)
    checkpoint = trained[0] * (size + optimizer_bytes(config))
    rank_parameters = sum(count for count, _ in gradient_buffers(*trained, layout))
    uses_servers = config.rollout.engine != "local"
    sync = config.rollout.weight_sync
    by_handle = uses_servers and sync.method == "ipc"
    link = machine.memory_bandwidth / _HANDLE_PASSES if by_handle else machine.network_bandwidth
    return TransferPlan(
        sync=sent,
        sync_seconds=sent / (link * machine.bandwidth_efficiency) if uses_servers else None,
        sync_buffer=2 * sync.bucket_megabytes * 2**20 if uses_servers and not by_adapter else 0,
        sync_by_handle=by_handle,
        checkpoint=checkpoint,
        export=parameters * size,
        save_host=checkpoint // layout.world_size if config.checkpoint.async_save else _SAVE_HOST * rank_parameters,
    )


def optimizer_bytes(config: Config) -> int:
    """Return the optimizer's bytes per parameter: two moments, and with bf16 weights an fp32 copy."""
    return 8 if config.model.dtype == "fp32" else 12


def gradient_bytes(config: Config) -> int:
    """Return the bytes of a gradient per parameter."""
    return 4 if config.optimizer.grad_reduce_in_fp32 else DTYPES[config.model.dtype].itemsize


_PRECISION_AWARE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def optimizer_bytes_on_device(config: Config) -> float:
    """Return the part of ``optimizer_bytes`` in GPU memory."""
    chosen = config.optimizer
    if chosen.optimizer_cpu_offload:
        return optimizer_bytes(config) * (1 - chosen.optimizer_offload_fraction)
    if chosen.use_precision_aware_optimizer:
        # Transformer Engine stores 2 bytes of the fp32 copy; the bf16 weight is the other half.
        return 2 + _PRECISION_AWARE[chosen.exp_avg_dtype] + _PRECISION_AWARE[chosen.exp_avg_sq_dtype]
    return optimizer_bytes(config)


def gradient_buffers(parameters: int, experts: int, layout: Layout) -> list[tuple[int, int]]:
    """Return for each gradient buffer of a rank its parameters and the ranks that share their optimizer state.

    ``experts`` of the parameters are in routed experts. All pipeline stages are assumed to have equally many.
    """
    dense = (parameters - experts) // (layout.tp * layout.pp)
    routed = experts // (layout.ep * layout.etp * layout.pp)
    # Megatron has a separate gradient buffer for experts only with expert parallelism.
    if layout.ep == 1:
        return [(dense + routed, layout.dp * layout.cp)]
    return [(dense, layout.dp * layout.cp), (routed, layout.expert_dp)]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Batch sizes of one step."""

    samples: int
    """Samples of a step on all ranks."""
    samples_per_update: int
    """Samples of an update on one data-parallel rank."""
    updates: int
    mean_tokens: int
    """Assumed mean length of a sample in tokens."""
    mean_response: int
    """Assumed mean length of a response in tokens."""
    micro_batches: int
    """Micro-batches of one update on one rank."""
    row_tokens: int
    """Tokens of the longest micro-batch: a sample longer than ``train.micro_batch_tokens`` has a row of its own."""
    full_rows: float
    """Micro-batches of ``row_tokens`` with as many tokens as those of an update."""


MEAN_LENGTH_RATIO = 0.4
"""Assumed mean response length over ``max_new_tokens`` (the 30B recipe's 6k of 16k)."""


class _AssumedSample(NamedTuple):
    num_tokens: int


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest possible sample."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def assumed_response_lengths(config: Config, count: int, mean: int) -> list[int]:
    """Return response lengths of ``count`` samples, evenly spread around their mean, at most ``max_new_tokens``."""
    half = min(mean, config.rollout.max_new_tokens - mean)
    return [max(1, round(mean - half + 2 * half * (index + 0.5) / count)) for index in range(count)]


def assumed_prompt_length(config: Config) -> int:
    """Return the assumed length of a prompt in tokens: a quarter of the limit."""
    return config.data.max_prompt_tokens // 4


def plan_batch(config: Config, layout: Layout, mean_response: int | None = None) -> BatchPlan:
    """Return the batch sizes, with the rows that a run makes of samples of the assumed lengths.

    ``mean_response`` None assumes ``MEAN_LENGTH_RATIO * max_new_tokens``.
    """
    rollout = config.rollout
    train = config.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    samples_per_update = samples // layout.dp // train.mini_batches
    mean = mean_response or round(MEAN_LENGTH_RATIO * rollout.max_new_tokens)
    prompt = assumed_prompt_length(config)
    assumed = [_AssumedSample(prompt + length) for length in assumed_response_lengths(config, samples_per_update, mean)]
    shape = RowShape(row_multiple=layout.row_multiple, sequence_multiple=layout.sequence_multiple)
    count = len(fill_bins(assumed, train.micro_batch_tokens, shape))
    # Interleaved pipelines need a multiple of the stages.
    multiple = layout.micro_batch_multiple
    micro_batches = -(-count // multiple) * multiple
    row_tokens = max(train.micro_batch_tokens, longest_sample(config))
    has_long_rows = row_tokens > train.micro_batch_tokens
    return BatchPlan(
        samples=samples,
        samples_per_update=samples_per_update,
        updates=train.mini_batches * train.epochs,
        mean_tokens=prompt + mean,
        mean_response=mean,
        micro_batches=micro_batches,
        row_tokens=row_tokens,
        full_rows=sum(sample.num_tokens for sample in assumed) / row_tokens if has_long_rows else micro_batches,
    )


ASSUMED_MASK_SIZE = 32
"""Assumed mean number of ids that top-p or min-p allow. A run measures its own in ``rollout/allowed_ids``."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes of one response token in ``types.Completion``."""

    sampled: int
    """Bytes of the id and its log-probability."""
    topk: int
    """Bytes of ids and log-probabilities of the Top-K slots."""
    sampling_mask: int
    """Bytes of the ids that the sampling filters allow, and of their number."""
    routes: int
    """Bytes of the chosen experts in all layers. Prompt tokens have them too."""
    router_weights: int
    """Bytes of the combine weights."""
    step: int
    """Bytes of a step's responses of the assumed mean length on one data-parallel rank."""

    @property
    def total(self) -> int:
        """Bytes of all columns of a token."""
        return self.sampled + self.topk + self.sampling_mask + self.routes + self.router_weights


def assumed_mask_size(config: Config, vocab_size: int) -> int:
    """Return the assumed number of ids in a token's sampling mask. 0 without filters.

    Example:
        Top-k alone allows exactly k ids.

        >>> from types import SimpleNamespace as Config
        >>> assumed_mask_size(Config(rollout=Config(filters=True, top_k=8, top_p=1.0, min_p=0.0)), 1000)
        8
    """
    rollout = config.rollout
    if not rollout.has_filters:
        return 0
    bounds = [vocab_size, *([rollout.top_k] if rollout.top_k else [])]
    return min(bounds if rollout.top_p == 1 and rollout.min_p == 0 else [*bounds, ASSUMED_MASK_SIZE])


def plan_token_bytes(config: Config, hf_config: Any, layout: Layout, batch: BatchPlan | None = None) -> TokenBytes:
    """Return the bytes of a response token with every column that the run requests."""
    mask_size = assumed_mask_size(config, hf_config.vocab_size)
    shape = routing_shape(hf_config) if config.train.needs_engine_routing else None
    experts = 0 if shape is None else shape.num_layers * shape.topk
    per_token = TokenBytes(
        sampled=8,
        topk=8 * (config.loss.topk + 1) if config.loss.is_topk else 0,
        sampling_mask=4 * (mask_size + 1) if mask_size else 0,
        routes=0 if shape is None else experts * shape.dtype.itemsize,
        router_weights=4 * experts if config.train.router_replay_weights else 0,
        step=0,
    )
    batch = batch or plan_batch(config, layout)
    tokens = batch.samples // layout.dp * batch.mean_tokens
    return replace(per_token, step=per_token.total * tokens)
