"""``train --dry-run``: all checks that precede a run, with every problem in one message."""

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


def dry_run(path: str | Path, loaded: LoadedConfig, world_size: int | None, *, verbose: bool = False) -> int:
    """Run all checks and print layout, batch sizes, data and resume point; create nothing.

    Args:
        path: Configuration file.
        loaded: Configuration read from it.
        world_size: Processes of the planned run. None uses WORLD_SIZE, or the smallest number that fits the layout.
        verbose: Also print the resolved configuration.

    Raises:
        UserError: Everything that would stop the run.
    """
    problems = ErrorCollector()
    for text in loaded.problems:
        problems.add(ConfigError(text))
    if loaded.config is None:
        raise invalid_config(path, loaded.problems)
    size = _default_world_size(loaded.config) if world_size is None else world_size
    if size < 1:
        raise ConfigError(f"--world-size {size}: expected a number of processes, at least 1")
    rank = int(os.environ.get("RANK", "0"))
    start = Start(loaded.config, size, rank, dry_run=True, unreliable_sections=loaded.unreliable_sections)
    for error in find_problems(start):
        problems.add(error)
    resume_point = None
    if start.inputs is not None and not start.config.run.overwrite and not loaded.problems:
        # A run searches its checkpoints on all ranks, holding the lock of the folder. A dry run only reads them.
        resume_point = problems.attempt(find_resume_point, start.config, start.inputs)
    if problems.errors and rank == 0:
        print("\n".join(start.notes))
    problems.raise_if_any()
    assert start.inputs is not None
    if rank == 0:
        if verbose:
            print(dump_toml(start.config))
        if world_size is None and "WORLD_SIZE" not in os.environ:
            print(f"for {size} process(es), the fewest of this layout; --world-size N checks it for N")
        print(
            "\n".join([format_layout(start.inputs.layout, start.config.batch), start.inputs.data_summary, *start.notes])
        )
        if resume_point is not None:
            print("\n".join(_resume_lines(resume_point)))
        defaults = resolved_defaults(start.config, start.inputs.layout)
        print("\ndefaults that depend on other keys:")
        print("\n".join(f"  {key} = {value}" for key, value in defaults.items()))
        if not verbose:
            print("\nAll checks passed. --verbose prints the resolved configuration.")
    return 0


def _resume_lines(point: ResumePoint) -> list[str]:
    skipped = [f"         {each.checkpoint.name} is skipped: {each.reason}" for each in point.skipped_checkpoints]
    changes = [f"         changed: {change}" for change in point.changes]
    return [f"resume   from {point.checkpoint}", *skipped, *changes]


def _default_world_size(config: Config) -> int:
    """Return WORLD_SIZE, or the least common multiple of the sizes of all groups."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    parallel = config.parallel
    tensor = parallel.tensor_model_parallel_size
    expert = parallel.expert_model_parallel_size
    # The same rule as in config/layout.py.
    expert_tensor = parallel.expert_tensor_parallel_size or (tensor if expert == 1 else 1)
    ranks_per_stage = math.lcm(tensor * parallel.context_parallel_size, expert * expert_tensor)
    return parallel.pipeline_model_parallel_size * ranks_per_stage
