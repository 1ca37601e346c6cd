"""``train --dry-run``: every check of the start of a run, and all that is wrong in one message."""

from __future__ import annotations

import os
from pathlib import Path

from megatron_dppo.config.io import Read, dump_toml, unusable
from megatron_dppo.config.layout import describe
from megatron_dppo.errors import ConfigError, Problems
from megatron_dppo.run.preflight import Start, find_problems
from megatron_dppo.run.resume import find_resume_point


def dry_run(path: str | Path, found: Read, world_size: int | None) -> int:
    """Print the resolved configuration and what was checked; nothing is created.

    Args:
        path: of the configuration file.
        found: what was read from it.
        world_size: processes of the run that is meant; None = those that there are.

    Raises:
        UserError: everything that would stop the run.
    """
    problems = Problems()
    for text in found.problems:
        problems.add(ConfigError(text))
    if found.config is None:
        raise unusable(path, found.problems)
    size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if size < 1:
        raise ConfigError(f"--world-size {size}: expected a number of processes, at least 1")
    rank = int(os.environ.get("RANK", "0"))
    start = Start(found.config, size, rank, dry_run=True, unsure=found.unsure)
    for error in find_problems(start):
        problems.add(error)
    if start.inputs is not None and not start.config.run.overwrite and not found.problems:
        # A run looks at its checkpoints with all ranks and under the lock of the folder.
        problems.attempt(find_resume_point, start.config, start.inputs)
    if problems.errors and rank == 0:
        print("\n".join(start.notes))
    problems.raise_if_any()
    assert start.inputs is not None
    if rank == 0:
        print(dump_toml(start.config))
        print("\n".join([describe(start.inputs.layout, start.config), start.inputs.data_summary, *start.notes]))
    return 0
