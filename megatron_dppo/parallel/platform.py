"""Device, collective backend, dtypes and threads of this process."""

import os
from dataclasses import dataclass
from typing import Self

import torch

from megatron_dppo.errors import ConfigError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BY_PRECISION = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Platform:
    """The device of this process and the backend of its collectives."""

    device: torch.device
    backend: str
    """``nccl`` on CUDA, ``gloo`` on CPU."""

    @property
    def is_cuda(self) -> bool:
        """True if training runs on CUDA."""
        return self.device.type == "cuda"

    @classmethod
    def detect(cls, local_rank: int | None = None, *, force_cpu: bool = False) -> Self:
        """Choose CUDA device ``local_rank`` on a machine with CUDA, else the CPU. None: the one that torchrun names."""
        if local_rank is None:
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available() and not force_cpu:
            count = torch.cuda.device_count()
            if local_rank >= count:
                raise ConfigError(
                    f"local rank {local_rank} has no CUDA device: {count} are visible here; start at most {count} "
                    "processes on this machine (--nproc-per-node), or make more devices visible"
                )
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
            return cls(device, "nccl")
        return cls(torch.device("cpu"), "gloo")


def coarser(first: str, second: str) -> str:
    """Return the one of two dtypes with the lower precision.

    Example:
        >>> coarser("fp16", "bf16")
        'bf16'
    """
    return max(first, second, key=_BY_PRECISION.index)


def require_devices(local_world_size: int) -> None:
    """Check that each process of this machine has a CUDA device, if the machine has CUDA."""
    if torch.cuda.is_available() and local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"{local_world_size} processes on this machine, but {torch.cuda.device_count()} CUDA devices are visible "
            "here; start one process per device (--nproc-per-node), or make more devices visible"
        )


def count_local_processes() -> int:
    """Return the number of processes that this machine can run: one a CUDA device, or one a core without CUDA."""
    return torch.cuda.device_count() if torch.cuda.is_available() else len(os.sched_getaffinity(0))


def pin_threads(threads: int | None, local_world_size: int) -> int:
    """Limit this process to ``threads``, or to its share of the cores, and return the number."""
    count = threads or max(1, len(os.sched_getaffinity(0)) // max(1, local_world_size))
    torch.set_num_threads(count)
    return count
