"""Bytes that follow from the configuration alone: rollouts, token columns, weight sync, checkpoints, memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.commands.plan.machine import GpuNode
from megatron_dppo.config.layout import Layout
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.families import get_family
from megatron_dppo.hf.folder import model_shape, routing_shape
from megatron_dppo.parallel.platform import DTYPES


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The key-value cache of the engine."""

    bytes_per_token: int
    """of all layers, over all GPUs of one server"""
    gpus_per_server: int
    room: int | None
    """bytes for the cache on one GPU; None = the engine is the trainer itself"""
    tokens_in_flight: int | None
    """that one server can hold"""
    longest: int
    """tokens of the longest sequence"""
    weights: int
    """bytes of the engine's weights"""

    @property
    def sequences(self) -> int | None:
        """The longest sequences that one server holds at a time."""
        return None if self.tokens_in_flight is None else self.tokens_in_flight // self.longest


def rollouts(config: Config, hf_config: Any, parameters: int, machine: GpuNode) -> Rollouts:
    """One server holds its weights, split over its GPUs, and fills the rest with the cache."""
    size = DTYPES[config.rollout.dtype or config.model.dtype].itemsize
    heads, numbers = _cached(hf_config)
    per_token = hf_config.num_hidden_layers * heads * numbers * size
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    weights = served_bytes(config, parameters)
    if config.rollout.engine == "local":
        return Rollouts(
            bytes_per_token=per_token,
            gpus_per_server=1,
            room=None,
            tokens_in_flight=None,
            longest=longest,
            weights=weights,
        )
    options = _options(config)
    gpus = int(options.get("tp-size", options.get("tensor-parallel-size", 1)))
    room = round(server_bytes(config, machine) - weights / gpus)
    copies = max(1, gpus // heads)  # fewer heads than GPUs: some hold the same ones
    return Rollouts(
        bytes_per_token=per_token,
        gpus_per_server=gpus,
        room=room,
        tokens_in_flight=max(0, room * gpus // (per_token * copies)),
        longest=longest,
        weights=weights,
    )


def served_bytes(config: Config, parameters: int) -> int:
    """Of the engine's weights: those of the quantised folder of ``rollout.servers.model`` where it is here, else of all
    parameters in ``rollout.dtype``."""
    folder = config.rollout.servers.model
    if folder is not None and (files := list(Path(folder).glob("*.safetensors"))):
        return sum(file.stat().st_size for file in files)
    return parameters * DTYPES[config.rollout.dtype or config.model.dtype].itemsize


def server_bytes(config: Config, machine: GpuNode) -> float:
    """Of one GPU for weights and cache: the server's own key (SGLang ``mem-fraction-static``, vLLM
    ``gpu-memory-utilization``), without it 0.85 of the memory."""
    options = _options(config)
    return machine.memory * float(options.get("mem-fraction-static", options.get("gpu-memory-utilization", 0.85)))


def _options(config: Config) -> dict[str, Any]:
    options = config.rollout.sglang if config.rollout.engine == "sglang" else config.rollout.vllm
    return {key.replace("_", "-"): value for key, value in options.items()}  # as ``serve`` reads them


def _cached(hf_config: Any) -> tuple[int, int]:
    """Heads of a layer's cache that GPUs can share among them, and the numbers of one for a token."""
    shape = model_shape(hf_config)
    own = get_family(hf_config).fields(hf_config, shape)
    if shape.has_latent_attention:
        return 1, own["kv_lora_rank"] + own["qk_pos_emb_head_dim"]
    return shape.num_query_groups, 2 * own["kv_channels"]


@dataclass(frozen=True, kw_only=True)
class Transfers:
    """What goes to the engines and to the disk."""

    sync: int
    """bytes of one weight sync through the sending GPU"""
    sync_seconds: float | None
    """over its network link, or within each GPU's memory; None = nothing is sent"""
    sync_buffer: int
    """bytes of the two buckets on a sending GPU: one is sent while the next is gathered"""
    sync_by_handle: bool
    """whether each rank has such buckets, and its server reads them where they are"""
    checkpoint: int
    """bytes of one checkpoint: what is trained, fp32 copies and both moments"""
    export: int
    """bytes of the Hugging Face folder"""
    save_host: int
    """bytes of host memory for each rank while a checkpoint is written: at most, or what ``async_save`` copies"""


_HANDED_OVER = 4
"""Times that a byte passes the memory of a GPU when a server reads it there: read and laid into a bucket, read by the
server and laid into its weights."""


_SAVE_HOST = 4
"""Bytes of host memory a parameter of a rank: 3.5 with 74 M parameters on two data-parallel ranks, 2.3 with 114 M
(``benchmarks/checkpoint.py``)."""


def transfers(config: Config, parameters: int, trained: tuple[int, int], layout: Layout, machine: GpuNode) -> Transfers:
    """By the number of parameters; the time is that of the link or memory alone, without gathering.

    ``trained``: how many of them have gradients, or are adapters; and how many of these are in routed experts.
    """
    size = DTYPES[config.model.dtype].itemsize
    by_adapter = config.rollout.weight_sync.method == "adapter"
    sent = trained[0] * size if by_adapter else parameters * size
    if config.rollout.servers.model is not None:
        sent = served_bytes(config, parameters)
    checkpoint = trained[0] * (size + optimizer_bytes(config))
    held = sum(count for count, _ in buffers(*trained, layout))
    served, sync = config.rollout.engine != "local", config.rollout.weight_sync
    by_handle = served and sync.method == "ipc"
    link = machine.memory_bandwidth / _HANDED_OVER if by_handle else machine.network_bandwidth
    return Transfers(
        sync=sent,
        sync_seconds=sent / (link * machine.reached_bandwidth) if served else None,
        sync_buffer=2 * sync.bucket_megabytes * 2**20 if served and not by_adapter else 0,
        sync_by_handle=by_handle,
        checkpoint=checkpoint,
        export=parameters * size,
        save_host=checkpoint // layout.world_size if config.checkpoint.async_save else _SAVE_HOST * held,
    )


def optimizer_bytes(config: Config) -> int:
    """Of each parameter: two moments, and with bf16 weights an fp32 copy of them."""
    return 8 if config.model.dtype == "fp32" else 12


def gradient_bytes(config: Config) -> int:
    """Of each parameter."""
    return 4 if config.optimizer.grad_reduce_in_fp32 else DTYPES[config.model.dtype].itemsize


_PRECISION_AWARE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def optimizer_bytes_on_device(config: Config) -> float:
    """The part of ``optimizer_bytes`` that is in the memory of the GPU; Transformer Engine keeps half of a copy."""
    chosen = config.optimizer
    if chosen.optimizer_cpu_offload:
        return optimizer_bytes(config) * (1 - chosen.optimizer_offload_fraction)
    if chosen.use_precision_aware_optimizer:
        return 2 + _PRECISION_AWARE[chosen.exp_avg_dtype] + _PRECISION_AWARE[chosen.exp_avg_sq_dtype]
    return optimizer_bytes(config)


def buffers(parameters: int, experts: int, layout: Layout) -> list[tuple[int, int]]:
    """Parameters on a rank if the stages are equal, and ranks that share their optimizer state, by gradient buffer.

    Args:
        parameters: of the model.
        experts: how many of these are in routed experts.
        layout: of the run.
    """
    dense = (parameters - experts) // (layout.tp * layout.pp)
    routed = experts // (layout.ep * layout.etp * layout.pp)
    if layout.ep == 1:  # Megatron keeps the gradients of experts apart only with expert parallelism
        return [(dense + routed, layout.dp * layout.cp)]
    return [(dense, layout.dp * layout.cp), (routed, layout.expert_dp)]


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One step."""

    samples: int
    """of all ranks"""
    samples_per_update: int
    """of one data-parallel rank"""
    updates: int
    """a step"""
    mean_tokens: int
    """of a sample: an assumption"""
    micro_batches: int
    """of one update on one rank"""


MEAN_LENGTH = 0.4
"""An assumption: tokens of a mean response over ``max_new_tokens`` (the 30B recipe's 6k of 16k)."""


def batch_of(config: Config, layout: Layout) -> Batch:
    """Of mean responses ``MEAN_LENGTH`` times as long as allowed, behind the longest prompts, in full rows."""
    rollout, train = config.rollout, config.train
    samples = rollout.prompts_per_step * rollout.samples_per_prompt
    each = samples // layout.dp // train.mini_batches
    mean = config.data.max_prompt_tokens // 4 + round(MEAN_LENGTH * rollout.max_new_tokens)
    count = -(-each * mean // train.micro_batch_tokens)
    multiple = layout.micro_batch_multiple
    return Batch(
        samples=samples,
        samples_per_update=each,
        updates=train.mini_batches * train.epochs,
        mean_tokens=mean,
        micro_batches=-(-count // multiple) * multiple,
    )


KEPT_IDS = 32
"""An assumption: ids that top-p or min-p leave of a token on average; a run tells its own (``rollout/kept_ids``)."""


@dataclass(frozen=True, kw_only=True)
class TokenBytes:
    """Bytes of one token, as ``types.Completion`` holds it."""

    sampled: int
    """its id and log-probability"""
    topk: int
    """ids and log-probabilities of the Top-K slots"""
    kept: int
    """the ids that the filters left, and their number"""
    routes: int
    """the experts that were chosen for it, in every layer; the prompt's tokens have such rows too"""
    router_weights: int
    """their combine weights"""
    step: int
    """bytes of a step's responses on one data-parallel rank, of the mean length that a plan assumes"""

    @property
    def token(self) -> int:
        """All of a token."""
        return self.sampled + self.topk + self.kept + self.routes + self.router_weights


def kept_ids(config: Config, vocab_size: int) -> int:
    """Ids in the sampling mask of each token that a plan assumes; 0 = there is no filter.

    Example: top-k alone keeps exactly k.
        >>> from types import SimpleNamespace as Config
        >>> kept_ids(Config(rollout=Config(filters=True, top_k=8, top_p=1.0, min_p=0.0)), 1000)
        8
    """
    rollout = config.rollout
    if not rollout.has_filters:
        return 0
    bounds = [vocab_size, *([rollout.top_k] if rollout.top_k else [])]
    return min(bounds if rollout.top_p == 1 and rollout.min_p == 0 else [*bounds, KEPT_IDS])


def columns_of(config: Config, hf_config: Any, layout: Layout) -> TokenBytes:
    """Of a configuration: the engine's answer with everything that the run asks it for."""
    kept = kept_ids(config, hf_config.vocab_size)
    shape = routing_shape(hf_config) if config.train.needs_engine_routing else None
    experts = 0 if shape is None else shape.num_layers * shape.topk
    found = TokenBytes(
        sampled=8,
        topk=8 * (config.loss.topk + 1) if config.loss.is_topk else 0,
        kept=4 * (kept + 1) if kept else 0,
        routes=0 if shape is None else experts * shape.dtype.itemsize,
        router_weights=4 * experts if config.train.router_replay_weights else 0,
        step=0,
    )
    batch = batch_of(config, layout)
    tokens = batch.samples // layout.dp * batch.mean_tokens
    return TokenBytes(**{**vars(found), "step": found.token * tokens})
