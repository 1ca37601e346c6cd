"""Time of the proof that servers hold the weights that they got, by the counts of ``benchmarks/sync_proof.py``."""

from __future__ import annotations

from megatron_dppo.config.layout import ModelShape
from megatron_dppo.config.schema import Config
from megatron_dppo_engines.serving.vllm_extension.megatron_dppo_digest.batched_words import BATCH_BYTES
from megatron_dppo_plan.machine import GpuNode

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
