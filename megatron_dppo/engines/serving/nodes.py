"""Servers whose GPUs are on several nodes: each node runs ``megatron-dppo serve`` with its own rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerNode:
    """Position of this node in a server that spans several."""

    rank: int
    """Index of the node. Node 0 answers requests."""
    address: str
    """``HOST:PORT`` of node 0, where the nodes meet."""


def count_nodes(engine: str, options: Mapping[str, Any]) -> int:
    """Return the number of nodes of one server: the option ``nnodes``.

    Raises:
        ConfigError: It is not a whole number above 0.
    """
    nodes = options.get("nnodes", 1)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigError(f"[rollout.{engine}] nnodes = {nodes!r}: expected a whole number of nodes")
    return nodes


def node_arguments(rollout: RolloutConfig, options: Mapping[str, Any], node: ServerNode | None) -> tuple[str, ...]:
    """Return the arguments of a server's part on this node; empty for a server on one node.

    Args:
        rollout: Configuration of the servers.
        options: Options of the engine.
        node: This node. None if the user has not named it.

    Raises:
        ConfigError: The node is missing, invalid or superfluous, or this configuration cannot span nodes.
    """
    nodes = count_nodes(rollout.engine, options)
    if nodes == 1:
        if node is not None:
            raise ConfigError(
                f"--node-rank {node.rank} with a server on one node. Fix: set nnodes in [rollout.{rollout.engine}], or "
                "remove --node-rank and --dist-init-addr"
            )
        return ()
    if problem := _spanning_problem(rollout):
        raise ConfigError(f"[rollout.{rollout.engine}] nnodes = {nodes}: {problem}")
    if node is None:
        raise ConfigError(
            f"[rollout.sglang] nnodes = {nodes}: start `megatron-dppo serve` on each of these nodes, with --node-rank "
            f"0 to {nodes - 1} and the same --dist-init-addr HOST:PORT, a free port of node 0"
        )
    if not 0 <= node.rank < nodes:
        raise ConfigError(f"--node-rank {node.rank}: expected 0 to {nodes - 1}, because nnodes = {nodes}")
    if not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:\s\[\]]+):\d{1,5}", node.address):
        raise ConfigError(f"--dist-init-addr {node.address}: expected HOST:PORT of node 0")
    return ("--node-rank", str(node.rank), "--dist-init-addr", node.address)


def _spanning_problem(rollout: RolloutConfig) -> str | None:
    if rollout.engine == "vllm":
        return (
            "the other nodes of a vLLM server run `vllm serve --headless`, which answers no health check. Start it by "
            "hand, and name node 0 in rollout.servers.urls"
        )
    if rollout.servers.colocated:
        return (
            "rollout.servers.colocated = true needs each server on the GPUs of one node; lower tp-size, or leave it out"
        )
    if rollout.weight_sync.method == "ipc":
        return "weight_sync.method = 'ipc' shares the memory of one node; set it to 'distributed' or 'disk'"
    if rollout.servers.count > 1:
        return f"rollout.servers.count = {rollout.servers.count}: a node has a part of one such server; set count = 1"
    return None
