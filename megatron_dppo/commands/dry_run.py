"""``train --dry-run``: every check of the start of a run, and all that is wrong in one message."""

from __future__ import annotations

import math
import os
from pathlib import Path

from megatron_dppo.config.describe import resolved_defaults
from megatron_dppo.config.io import LoadedConfig, dump_toml, invalid_config
from megatron_dppo.config.layout import format_layout
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, ErrorCollector
from megatron_dppo.run.preflight import Start, find_problems
from megatron_dppo.run.resume import ResumePoint, find_resume_point


def dry_run(path: str | Path, found: LoadedConfig, world_size: int | None) -> int:
    """Print the resolved configuration and what was checked; nothing is created.

    Args:
        path: of the configuration file.
        found: what was read from it.
        world_size: processes of the run that is meant; None = those that there are, and without WORLD_SIZE the fewest
            that the layout can have.

    Raises:
        UserError: everything that would stop the run.
    """
    problems = ErrorCollector()
    for text in found.problems:
        problems.add(ConfigError(text))
    if found.config is None:
        raise invalid_config(path, found.problems)
    size = _world_size(found.config) if world_size is None else world_size
    if size < 1:
        raise ConfigError(f"--world-size {size}: expected a number of processes, at least 1")
    rank = int(os.environ.get("RANK", "0"))
    start = Start(found.config, size, rank, dry_run=True, unreliable_sections=found.unreliable_sections)
    for error in find_problems(start):
        problems.add(error)
    point = None
    if start.inputs is not None and not start.config.run.overwrite and not found.problems:
        # A run looks at its checkpoints with all ranks and under the lock of the folder.
        point = problems.attempt(find_resume_point, start.config, start.inputs)
    if problems.errors and rank == 0:
        print("\n".join(start.notes))
    problems.raise_if_any()
    assert start.inputs is not None
    if rank == 0:
        print(dump_toml(start.config))
        defaults = resolved_defaults(start.config, start.inputs.layout)
        print("\n".join(["by the rules of defaults:", *(f"  {key} = {value}" for key, value in defaults.items()), ""]))
        if world_size is None and "WORLD_SIZE" not in os.environ:
            print(f"for {size} process(es), the fewest of this layout; --world-size N checks it for N")
        print(
            "\n".join([format_layout(start.inputs.layout, start.config.batch), start.inputs.data_summary, *start.notes])
        )
        if point is not None:
            print("\n".join(_resumes(point)))
    return 0


def _resumes(point: ResumePoint) -> list[str]:
    passed = [f"         {each.checkpoint.name} is passed over: {each.reason}" for each in point.passed_over]
    return [f"resume   from {point.checkpoint}", *passed, *(f"         changed: {change}" for change in point.changes)]


def _world_size(config: Config) -> int:
    """Of the processes that there are, or the least multiple of all groups."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    sizes = config.parallel
    tensor, experts = sizes.tensor_model_parallel_size, sizes.expert_model_parallel_size
    of_experts = sizes.expert_tensor_parallel_size or (tensor if experts == 1 else 1)
    return sizes.pipeline_model_parallel_size * math.lcm(tensor * sizes.context_parallel_size, experts * of_experts)
