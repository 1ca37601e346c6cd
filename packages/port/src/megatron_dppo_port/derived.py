"""Parts of a run that other stacks derive from several settings: inference servers and adapters."""

from collections.abc import Sequence
from typing import get_args

from megatron_dppo.config.model import LORA_TARGETS, LoraTarget
from megatron_dppo_port.converters import integer
from megatron_dppo_port.draft import Draft, UnreadSettingError

_MEGATRON_TARGETS = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's names of linear layers, and PEFT's, which this package takes."""
_MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")


def put_server_count(draft: Draft, key: str, *, per_node: int, num_nodes: int, per_server: int) -> None:
    """Set the number of servers of a node: other stacks fill their GPUs with servers, here the number is a key."""
    if per_server > per_node * num_nodes:
        raise UnreadSettingError(key, f"a server of {per_server} GPUs does not fit on {num_nodes} * {per_node}")
    if per_server > per_node:
        raise UnreadSettingError(key, f"a server of {per_server} GPUs spans nodes of {per_node}: see docs/launch.md")
    count = per_node // per_server
    if count == 1 and num_nodes == 1:
        return
    note = f"{per_node} GPUs / {per_server} of a server"
    if num_nodes > 1:
        note += f", on each of {num_nodes} nodes; rollout.servers.urls lists all {count * num_nodes}"
    draft.put("rollout.servers.count", count, note=note)


def put_processes(draft: Draft, nodes: str, gpus_per_node: str) -> None:
    """Note the number of processes of the run."""
    # Without these numbers that of the servers is open, too.
    with draft.target("rollout.servers.count"):
        draft.num_processes = draft.read(nodes, integer) * draft.read(gpus_per_node, integer)
    for key in (nodes, gpus_per_node):
        draft.record(key, "ported", "torchrun's --nnodes and --nproc-per-node")


def put_targets(draft: Draft, names: Sequence[str], key: str, note: str = "") -> None:
    """Set the linear layers that get adapters, from the names of PEFT, Megatron or prime-rl. ``key`` lists them."""
    if list(names) == ["all-linear"]:
        draft.record(key, "ported", "lora.target_modules keeps its default, all linear layers of attention and MLPs")
        return
    targets: list[str] = []
    for name in names:
        # prime-rl names layers that only some models have. Here experts have the names of an MLP.
        if name in ("fc1_latent_proj", "fc2_latent_proj"):
            continue
        known = _MLP_TARGETS if name == "experts" else _MEGATRON_TARGETS.get(name, (name,))
        if not set(known) <= set(get_args(LoraTarget)):
            raise UnreadSettingError(key, f"{name!r} is no layer of lora.target_modules; list layers there")
        targets += [target for target in known if target not in targets]
    # Written in full only where it differs from the default.
    if set(targets) != set(LORA_TARGETS) or note:
        draft.put("lora.target_modules", targets, key, note=note)
    draft.record(key, "ported", "lora.target_modules keeps its default, the same layers")
