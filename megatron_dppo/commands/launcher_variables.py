"""Variables that torchrun and Slurm set for each process, checked before a command reads them."""

from __future__ import annotations

import os

from megatron_dppo.errors import ConfigError

_SMALLEST = {
    "WORLD_SIZE": 1,
    "LOCAL_WORLD_SIZE": 1,
    "RANK": 0,
    "LOCAL_RANK": 0,
    "MASTER_PORT": 0,  # 0: a process that runs alone has chosen a free port
    "SLURM_RESTART_COUNT": 0,
}
_LARGEST = 10_000_000


def check_launcher_variables() -> None:
    """Check that the variables that are set hold whole numbers, and that a rank is below its world size."""
    numbers = {}
    for name, smallest in _SMALLEST.items():
        text = os.environ.get(name)
        if text is None or (name == "SLURM_RESTART_COUNT" and not text):
            continue
        # int() also reads "1_0", " 1" and digits of other scripts, which launchers never write.
        if not (text.isascii() and text.isdigit() and smallest <= int(text[:9]) and int(text[:9]) < _LARGEST):
            raise ConfigError(
                f"{name} = {text[:40]!r} in the environment; expected a whole number of at least {smallest}. torchrun "
                "sets it; unset it to run one process"
            )
        numbers[name] = int(text)
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if rank in numbers and size in numbers and numbers[rank] >= numbers[size]:
            raise ConfigError(
                f"{rank} = {numbers[rank]} and {size} = {numbers[size]} in the environment; expected a rank below the "
                "size. torchrun sets both; unset them to run one process"
            )
