"""SIGTERM as a request to stop after the current step."""

from __future__ import annotations

import signal
from types import FrameType

import torch
import torch.distributed as dist


class StopSignal:
    """Remembers SIGTERM, so that a step can end and be saved before the process exits."""

    def __init__(self) -> None:
        self._received = False

    def __enter__(self) -> StopSignal:
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def requested(self) -> bool:
        """Whether any rank was asked to stop; equal on all ranks (a collective)."""
        device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
        flag = torch.tensor(int(self._received), device=device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)
