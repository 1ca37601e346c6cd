"""Time of a whole step (sampling, updates, weight sync, save), and cost, disk and host memory of a run."""

import heapq
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.layout import Layout, ModelShape
from megatron_dppo.config.schema import Config
from megatron_dppo.hf.folder import model_shape
from megatron_dppo.report.steps.files import estimate_step_bytes
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest.batched_words import BATCH_BYTES
from megatron_dppo_plan.arithmetic import (
    BatchPlan,
    KvCachePlan,
    TokenBytes,
    TransferPlan,
    assumed_prompt_length,
    assumed_response_lengths,
)
from megatron_dppo_plan.machine import GpuNode

LAUNCH_SIGNAL_SECONDS = 600
"""Time that ``launch/qwen3_moe_dppo.sh`` gives a step and its save before the job's time limit (``--signal``)."""

_LAYER_SECONDS = 60e-6
"""Assumed time of launches and synchronization in each layer of a decoding iteration, with CUDA graphs."""
# Counts of ``benchmarks/sync_proof.py``.
_SENT_SECONDS = 15e-6
"""CPU time of rank 0 for each tensor that is sent: 0.25 s for the 18,867 of Qwen3-30B-A3B."""
_JUDGED_SECONDS = 3e-6
"""CPU time of rank 0 for each tensor, rank and server: 0.68 s for 849 x 8 x 32 of Qwen3-235B-A22B."""
_SERVED_SECONDS = 70e-6
"""Assumed CPU time of a server for each of its tensors: two launches and a read."""
_BATCH_SECONDS = 60e-6
"""Assumed CPU time of a launch and the copy of its table to the device."""
_HASH_RATE = 132 * 64 * 1.755e9 / 39 * 4
"""Bytes that an H100 or H200 hashes per second: its integer operations per second, and 39 operations a word of 4."""
_LAYER_TENSORS = 9
"""Tensors of a layer beside the experts: attention, norms, router."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """Sizes of the model that decide how fast a server decodes."""

    num_layers: int
    dense_bytes: int
    """Bytes of the weights that every token reads."""
    expert_bytes: int
    """Bytes of all routed experts."""
    expert_fraction: float
    """Experts that one token chooses, over all experts. 0 for a dense model."""
    cache: KvCachePlan

    @property
    def active_bytes(self) -> float:
        """Bytes of the weights that one token uses."""
        return self.dense_bytes + self.expert_fraction * self.expert_bytes

    def iteration_seconds(
        self, sequences: int, context_tokens: float, gpus: int, machine: GpuNode, peak: float
    ) -> float:
        """Return the time in which ``sequences`` get one token each.

        It is the longer of memory traffic and arithmetic. Weights are read once, however many sequences there are. Of
        the routed experts only those that some sequence chooses are read. ``context_tokens`` are those of all
        sequences, ``peak`` is the data sheet's FLOP/s for the engine's dtype.
        """
        chosen = 1 - (1 - self.expert_fraction) ** sequences
        moved = self.dense_bytes + chosen * self.expert_bytes + self.cache.bytes_per_token * context_tokens
        # Each token reads and writes the states of linear attention.
        moved += 2 * self.cache.bytes_per_sequence * sequences
        moved += self.cache.window_bytes_per_token * min(context_tokens, sequences * self.cache.window)
        memory = moved / (gpus * machine.memory_bandwidth * machine.bandwidth_efficiency)
        # Two bytes a weight, two FLOPs a weight and token.
        arithmetic = sequences * self.active_bytes / (gpus * peak * machine.flops_efficiency)
        return max(memory, arithmetic) + self.num_layers * _LAYER_SECONDS


def served_model(hf_config: Any, parameters: int, expert_parameters: int, cache: KvCachePlan) -> ServedModel:
    """Return the sizes of the model on a server."""
    shape = model_shape(hf_config)
    size = cache.weight_bytes / parameters
    # A token reads one row of the input embedding.
    embedding = 0 if hf_config.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    topk = getattr(hf_config, "num_experts_per_tok", 0) if shape.num_experts else 0
    return ServedModel(
        num_layers=shape.num_layers,
        dense_bytes=round(size * (parameters - expert_parameters - embedding)),
        expert_bytes=round(size * expert_parameters),
        expert_fraction=topk / shape.num_experts if shape.num_experts else 0.0,
        cache=cache,
    )


def decode_seconds(
    lengths: Sequence[int], prompt: int, capacity: int, model: ServedModel, gpus: int, machine: GpuNode, peak: float
) -> float:
    """Return the time in which one server samples responses, as many at once as its cache holds.

    ``lengths`` are the tokens of each response in the order of the requests, ``peak`` as in ``iteration_seconds``.
    """
    waiting = list(reversed(lengths))
    # All sequences in the batch grow by one token per iteration. Each ends at a known iteration.
    ends: list[tuple[int, int]] = []
    iteration = 0
    seconds = 0.0
    starts = 0
    while waiting or ends:
        while waiting and len(ends) < capacity:
            heapq.heappush(ends, (iteration + waiting.pop(), iteration))
            starts += iteration
        end = ends[0][0]
        count = len(ends)
        mean_iteration = (iteration + end) / 2
        context = count * (prompt + mean_iteration) - starts
        seconds += (end - iteration) * model.iteration_seconds(count, context, gpus, machine, peak)
        iteration = end
        while ends and ends[0][0] == end:
            starts -= heapq.heappop(ends)[1]
    return seconds


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Estimate of a step and of the whole run."""

    servers: int
    """Number of inference servers. 0 with the local engine."""
    server_gpus: int
    """GPUs of servers that are not the trainer's."""
    rollout: float | None
    """Seconds in which the servers sample a step. None with the local engine, whose time is not planned."""
    updates: float
    sync: float
    """Seconds of the weight sync, with its proof."""
    proof: float
    """Seconds of the proof that servers hold the weights."""
    save: float
    """Seconds in which a checkpoint is written."""
    has_evaluation: bool
    """True if the run evaluates. An evaluation counts as long as the sampling of a step."""
    is_overlapped: bool
    """True if servers sample later steps while the trainer updates (``train.max_staleness``)."""
    num_steps: int | None
    """Steps of the run. None if it is given in epochs."""
    gpus: int
    """GPUs of trainer and servers."""
    host: int
    """Bytes of host memory on a trainer node."""
    disk: int
    """Bytes of the checkpoints that exist at once, the export and recorded steps."""

    @property
    def seconds(self) -> float:
        """Seconds of a step, without evaluation and save."""
        rollout = self.rollout or 0.0
        return self.sync + (max(rollout, self.updates) if self.is_overlapped else rollout + self.updates)

    @property
    def stop_seconds(self) -> float:
        """Seconds that a stop needs at most: a whole step, an evaluation and a save."""
        return self.seconds + self.evaluation + self.save

    @property
    def evaluation(self) -> float:
        """Seconds of an evaluation, an assumption: its number of prompts is not known without the data."""
        return (self.rollout or 0.0) if self.has_evaluation else 0.0

    @property
    def signal_seconds(self) -> int:
        """Seconds before the job's limit at which Slurm has to signal, in whole minutes: ``--signal`` of all pages."""
        return max(LAUNCH_SIGNAL_SECONDS, math.ceil(self.stop_seconds / 60) * 60)

    def fits_host(self, machine: GpuNode) -> bool:
        """Return True if a node's host memory suffices."""
        return self.host <= machine.host_memory

    @property
    def gpu_hours(self) -> float | None:
        """GPU-hours of the run, without evaluations and saves."""
        return None if self.num_steps is None else self.gpus * self.num_steps * self.seconds / 3600


def proof_seconds(
    config: Config, shape: ModelShape, sent: int, machine: GpuNode, *, gpus_per_server: int, servers: int
) -> float:
    """Return the time that a full proof adds to a weight sync; 0 without one.

    ``sent`` is the bytes of a sync, ``gpus_per_server`` the tensor-parallel size of a server.
    """
    sync = config.rollout.weight_sync
    if not servers or sync.method == "adapter" or not sync.checksum_every:
        return 0.0
    # Every layer has a gate, an up and a down projection, or those of each expert.
    num_expert_layers = shape.num_layers - len(shape.dense_layers) if shape.num_experts else 0
    num_projections = shape.num_layers - num_expert_layers + num_expert_layers * (shape.num_experts or 0)
    num_sent = shape.num_layers * _LAYER_TENSORS + 3 * num_projections
    num_served = shape.num_layers * _LAYER_TENSORS
    rate = _HASH_RATE * machine.bandwidth_efficiency
    # Rank 0 computes while it sends; the servers follow, all at once, and then rank 0 judges them one by one.
    expected = max(num_sent * _SENT_SECONDS + sent / BATCH_BYTES * _BATCH_SECONDS, sent / rate)
    held = max(num_served * _SERVED_SECONDS, sent / gpus_per_server / rate)
    return expected + held + servers * gpus_per_server * num_served * _JUDGED_SECONDS


def count_servers(config: Config, layout: Layout, gpus_per_server: int, servers: int | None = None) -> int:
    """Return the number of inference servers of a run.

    ``servers`` is the number that the user names. None takes it from the configuration: colocated servers use all GPUs
    of the trainer; otherwise it is the number of URLs, or ``rollout.servers.count``.
    """
    if config.rollout.engine == "local":
        return 0
    if servers is not None:
        return servers
    if config.rollout.servers.colocated:
        return max(1, layout.world_size // gpus_per_server)
    return len(config.rollout.servers.resolved_urls)


def rollout_seconds(
    config: Config, batch: BatchPlan, cache: KvCachePlan, model: ServedModel, machine: GpuNode, servers: int
) -> float | None:
    """Return the time in which the servers sample a step.

    The samples are spread evenly. One response of the slowest server reaches ``max_new_tokens``, for which the others
    wait. None without servers, or if the weights alone do not fit a server.
    """
    if not servers or not cache.tokens_in_flight:
        return None
    count = math.ceil(batch.samples / servers)
    lengths = assumed_response_lengths(config, count, batch.mean_response)
    # A stride that has no common divisor with the count mixes short and long responses.
    stride = next(step for step in range(max(1, round(count * 0.618)), count + 2) if math.gcd(step, count) == 1)
    mixed = [lengths[index * stride % count] for index in range(count)]
    mixed[count // 2] = config.rollout.max_new_tokens
    prompt = assumed_prompt_length(config)
    peak = machine.flops["float32" if config.rollout.dtype == "fp32" else "bfloat16"]
    capacity = max(1, cache.tokens_in_flight // (prompt + batch.mean_response))
    decode = decode_seconds(mixed, prompt, capacity, model, cache.gpus_per_server, machine, peak)
    # Siblings share the prefill of their prompt.
    prompts = math.ceil(config.rollout.prompts_per_step / servers)
    prefill = prompts * prompt * model.active_bytes / (cache.gpus_per_server * peak * machine.flops_efficiency)
    return decode + prefill


def plan_step(
    config: Config,
    layout: Layout,
    machine: GpuNode,
    batch: BatchPlan,
    cache: KvCachePlan,
    token_bytes: TokenBytes,
    transfers: TransferPlan,
    model: ServedModel,
    *,
    updates: float,
    host_per_rank: int,
    shape: ModelShape,
    servers: int | None = None,
) -> StepPlan:
    """Return the estimate of a step.

    ``updates`` are the seconds of a step's updates. ``host_per_rank`` is the bytes of an offloaded optimizer, and of
    state that leaves the GPU while colocated servers sample.
    """
    num_servers = count_servers(config, layout, cache.gpus_per_server, servers)
    server_gpus = 0 if config.rollout.servers.colocated else num_servers * cache.gpus_per_server
    per_node = min(machine.gpus_per_node, layout.world_size)
    nodes = layout.world_size / per_node
    # One rank of each replica holds the columns of its responses.
    replicas = math.ceil(layout.dp / nodes)
    checkpoint = config.checkpoint
    copies = checkpoint.keep + 1 + checkpoint.keep_best
    proof = proof_seconds(
        config, shape, transfers.sync, machine, gpus_per_server=cache.gpus_per_server, servers=num_servers
    )
    return StepPlan(
        servers=num_servers,
        server_gpus=server_gpus,
        rollout=rollout_seconds(config, batch, cache, model, machine, num_servers),
        updates=updates,
        sync=(transfers.sync_seconds or 0.0) + proof,
        proof=proof,
        save=transfers.checkpoint / (nodes * machine.disk_bandwidth),
        has_evaluation=bool(config.data.eval) and config.eval.every > 0,
        is_overlapped=config.train.max_staleness > 0 and num_servers > 0 and not config.rollout.servers.colocated,
        num_steps=None if config.run.num_epochs is not None else config.run.num_steps,
        gpus=layout.world_size + server_gpus,
        host=per_node * (transfers.save_host + host_per_rank) + replicas * token_bytes.step,
        disk=copies * transfers.checkpoint + transfers.export + _recorded_bytes(config, token_bytes),
    )


def _recorded_bytes(config: Config, token_bytes: TokenBytes) -> int:
    """Return an upper bound of the bytes of all steps that ``log.rollouts_every`` records."""
    every = config.log.rollouts_every
    if not every or config.run.num_epochs is not None:
        return 0
    return math.ceil((config.run.num_steps or 0) / every) * recorded_step_bytes(config, token_bytes)


def recorded_step_bytes(config: Config, token_bytes: TokenBytes) -> int:
    """Return an upper bound of the bytes of one recorded step."""
    samples = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    more = token_bytes.total - token_bytes.sampled
    return estimate_step_bytes(samples, config.rollout.max_new_tokens, more=more)


def sbatch_line(file: str, overrides: Sequence[str], step: StepPlan, machine: GpuNode) -> str:
    """Return the sbatch line of a run with ``launch/qwen3_moe_dppo.sh``."""
    per_node = machine.gpus_per_node
    trainer_gpus = step.gpus - step.server_gpus
    server_nodes = math.ceil(step.server_gpus / per_node)
    nodes = math.ceil(trainer_gpus / per_node) + server_nodes
    servers = f"--server-nodes {server_nodes} " if server_nodes else ""
    return " ".join(
        [
            f"sbatch --nodes={nodes} --gpus-per-node={min(per_node, trainer_gpus)} --mem=0 --time=24:00:00",
            f"--signal=B:TERM@{step.signal_seconds} launch/qwen3_moe_dppo.sh {servers}{file}",
            *map(shlex.quote, overrides),
        ]
    )
