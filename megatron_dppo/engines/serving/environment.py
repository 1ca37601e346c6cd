"""Environment variables of trainer ranks and servers: which both must share, and which only ranks get."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from megatron_dppo.config.rollout import RolloutConfig

TRANSFER_VARIABLES: Mapping[str, str] = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
"""Variables that must be equal on all ranks of an NCCL communicator, and their values unless the user sets them.

They determine how two processes on one machine exchange memory. NCCL's own default is on. SGLang switches both off in
its process (srt/entrypoints/engine.py, ``_set_envs_and_config``). A communicator with both kinds of ranks fails with
"invalid argument".
"""
_EXPANDABLE = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def shares_communicator(rollout: RolloutConfig) -> bool:
    """Return True if servers join a communicator of the trainer."""
    return rollout.engine != "local" and rollout.weight_sync.method == "distributed"


def shares_memory(rollout: RolloutConfig) -> bool:
    """Return True if servers open memory of the trainer, or use its GPUs."""
    return rollout.engine != "local" and (rollout.weight_sync.method == "ipc" or rollout.servers.colocated)


def transfer_variables(rollout: RolloutConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ``TRANSFER_VARIABLES`` that this run needs and the user has not set."""
    if not shares_communicator(rollout):
        return {}
    return {name: value for name, value in TRANSFER_VARIABLES.items() if name not in environ}


def rank_variables(rollout: RolloutConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a launcher sets for trainer ranks. A value of the user takes precedence."""
    variables = transfer_variables(rollout, environ)
    has_allocator = any(environ.get(name) for name in _ALLOCATOR_VARIABLES)
    # Packed rows differ in length from step to step, which leaves holes between segments of fixed size. Other processes
    # open memory of expandable segments by pidfd_getfd, which most systems refuse between unrelated processes.
    if not has_allocator and not shares_memory(rollout):
        variables["PYTORCH_CUDA_ALLOC_CONF"] = _EXPANDABLE
    return variables


def server_network(rollout: RolloutConfig) -> list[str]:
    """Return hosts on the network between trainer and servers, if servers join a communicator of the trainer."""
    if not shares_communicator(rollout):
        return []
    hosts = [urlsplit(url).hostname for url in rollout.servers.resolved_urls]
    return [rollout.weight_sync.host, *dict.fromkeys(host for host in hosts if host)]


def expandable_segments_variable(environ: Mapping[str, str]) -> str | None:
    """Return ``NAME=VALUE`` of the variable that turns on expandable segments. None if they are off."""
    for name in _ALLOCATOR_VARIABLES:
        settings = [setting.replace(" ", "").lower() for setting in environ.get(name, "").split(",")]
        if _EXPANDABLE.lower() in settings:
            return f"{name}={environ[name]}"
    return None
