from __future__ import annotations

import os

import pytest
import torch

from megatron_dppo.errors import ConfigError
from megatron_dppo.parallel.platform import Platform, pin_threads


def test_without_cuda_or_when_told_so_training_runs_on_the_cpu_over_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        platform = Platform.detect(3, force_cpu=available)
        assert (platform.device.type, platform.backend, platform.is_cuda) == ("cpu", "gloo", False)


def test_each_local_rank_takes_its_own_cuda_device_over_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    platform = Platform.detect(1)
    assert platform.device == torch.device("cuda", 1) and platform.backend == "nccl" and platform.is_cuda
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Platform.detect() == platform and chosen == [platform.device] * 2
    with pytest.raises(ConfigError, match=r"local rank 2 .*2 are"):
        Platform.detect(2)


def test_threads_are_the_number_asked_for_or_the_share_of_the_cores() -> None:
    before, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        assert pin_threads(3, 8) == torch.get_num_threads() == 3
        assert pin_threads(None, 1) == torch.get_num_threads() == cores
        assert pin_threads(None, 10 * cores) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
