"""One process of ``check_devices``: ``python -m tests.gpu.devices_rank STORE JSON``; rank 0's last line is what was
found."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_dppo.parallel.platform import Platform


def main() -> None:
    given, rank = json.loads(sys.argv[2]), int(os.environ["RANK"])
    platform = Platform.detect(rank, force_cpu=not given["cuda"])
    torch.set_num_threads(1)
    result = transferred(platform, given["port"]) if "port" in given else parity(platform, given["cases"])
    if rank == 0:
        print(json.dumps(result), flush=True)


def parity(platform: Platform, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The worst error of any rank."""
    from megatron_dppo.mcore.shims import apply_shims

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    apply_shims(platform)
    from megatron.core import parallel_state

    from tests.distributed.parity import Case, measure

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, device = dist.FileStore(sys.argv[1], world), platform.device if platform.is_cuda else None
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world, device_id=device)
    worst = []
    for case in cases:
        errors = measure(Case(**case["case"]), platform, case["dtype"])
        parallel_state.destroy_model_parallel()
        values = torch.tensor(list(errors.values()), dtype=torch.float64, device=platform.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        worst.append(dict(zip(errors, values.tolist(), strict=True)))
    dist.destroy_process_group()
    return worst


def transferred(platform: Platform, port: int) -> float:
    """A tensor from rank 0, which has a default group of its own bound to its device, as a trainer has."""
    from megatron_dppo.weights.transfer_group import open_transfer_group

    rank, device = int(os.environ["RANK"]), platform.device if platform.is_cuda else None
    dist.init_process_group(platform.backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    group = open_transfer_group(
        "127.0.0.1", port, name="weights", rank=rank, world_size=2, backend=platform.backend, timeout=60
    )
    expected = torch.arange(1 << 20, dtype=torch.float32)
    sent = expected.to(platform.device) if rank == 0 else torch.zeros(1 << 20, device=platform.device)
    dist.broadcast(sent, group_src=0, group=group)
    back = (sent.cpu() != expected).sum().to(platform.device)
    dist.broadcast(back, group_src=1, group=group, async_op=True).wait(timedelta(seconds=60))
    return float(back)


if __name__ == "__main__":
    main()
