"""Servers whose GPUs are on several nodes: each node runs ``megatron-dppo serve`` with its own rank.

SGLang answers health checks on every node. With vLLM only node 0 listens; the others run ``vllm serve --headless``
(vllm/entrypoints/cli/serve.py, 0.32), whose workers are ready when node 0 is healthy.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import ConfigError

_API_SERVER = "vllm.entrypoints.openai.api_server"


@dataclass(frozen=True, kw_only=True)
class ServerNode:
    """Position of this node in a server that spans several."""

    rank: int
    """Index of the node. Node 0 answers requests."""
    address: str
    """``HOST:PORT`` of node 0, where the nodes meet."""

    @property
    def host(self) -> str:
        """Host of node 0, an IPv6 address in brackets."""
        return self.address.rpartition(":")[0]

    @property
    def port(self) -> str:
        """Port where the nodes meet."""
        return self.address.rpartition(":")[2]


def count_nodes(engine: str, options: Mapping[str, object]) -> int:
    """Return the number of nodes of one server: the option ``nnodes``."""
    nodes = options.get("nnodes", 1)
    if isinstance(nodes, bool) or not isinstance(nodes, int) or nodes < 1:
        raise ConfigError(f"[rollout.{engine}] nnodes = {nodes!r}: expected a whole number of nodes")
    return nodes


def node_arguments(rollout: RolloutConfig, options: Mapping[str, object], node: ServerNode | None) -> tuple[str, ...]:
    """Return the arguments of a server's part on this node; empty for a server on one node."""
    nodes = count_nodes(rollout.engine, options)
    if nodes == 1:
        if node is not None:
            raise ConfigError(
                f"--node-rank {node.rank} with a server on one node. Fix: set nnodes in [rollout.{rollout.engine}], or "
                "remove --node-rank and --dist-init-addr"
            )
        return ()
    if problem := _spanning_problem(rollout, options):
        raise ConfigError(f"[rollout.{rollout.engine}] nnodes = {nodes}: {problem}")
    if node is None:
        raise ConfigError(
            f"[rollout.{rollout.engine}] nnodes = {nodes}: start `megatron-dppo serve` on each of these nodes, with "
            f"--node-rank 0 to {nodes - 1} and the same --dist-init-addr HOST:PORT, a free port of node 0"
        )
    if not 0 <= node.rank < nodes:
        raise ConfigError(f"--node-rank {node.rank}: expected 0 to {nodes - 1}, because nnodes = {nodes}")
    if not re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^:\s\[\]]+):\d{1,5}", node.address):
        raise ConfigError(f"--dist-init-addr {node.address}: expected HOST:PORT of node 0")
    rank = ("--node-rank", str(node.rank))
    if rollout.engine == "sglang":
        return (*rank, "--dist-init-addr", node.address)
    headless = () if answers_requests(rollout.engine, node) else ("--headless",)
    return (*rank, "--master-addr", node.host.strip("[]"), "--master-port", node.port, *headless)


def answers_requests(engine: str, node: ServerNode | None) -> bool:
    """Return True if a server's part on this node listens: every part but those of vLLM after node 0."""
    return engine == "sglang" or node is None or node.rank == 0


def headless_command(command: Sequence[str]) -> list[str]:
    """Return the command of a vLLM node that does not listen: vLLM's older module ignores ``--headless``."""
    if _API_SERVER not in command:
        return list(command)
    index = list(command).index(_API_SERVER)
    return [*command[:index], "vllm.entrypoints.cli.main", "serve", *command[index + 1 :]]


def _spanning_problem(rollout: RolloutConfig, options: Mapping[str, object]) -> str | None:
    if rollout.engine == "vllm" and any(options.get(name, 1) != 1 for name in ("data-parallel-size", "dp-size", "dp")):
        return "replicas of a vLLM server (data-parallel-size) do not span nodes; start one server for each"
    if rollout.servers.colocated:
        return (
            "rollout.servers.colocated = true needs each server on the GPUs of one node; lower its tensor parallel "
            "size, or leave it out"
        )
    if rollout.weight_sync.method == "ipc":
        return "weight_sync.method = 'ipc' shares the memory of one node; set it to 'distributed' or 'disk'"
    if rollout.servers.count > 1:
        return f"rollout.servers.count = {rollout.servers.count}: a node has a part of one such server; set count = 1"
    return None
