"""``train --dry-run``: all checks that precede a run, with every problem in one message."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_dppo.commands.preview import RewardTrial, model_lines, preview_lines, try_reward
from megatron_dppo.config.io import LoadedConfig, dump_toml, invalid_config
from megatron_dppo.config.layout import Layout, format_layout, unchecked_layout
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import ConfigError, ErrorCollector
from megatron_dppo.report.printable import printable
from megatron_dppo.setup.contents import read_contents
from megatron_dppo.setup.preflight import Start, find_problems
from megatron_dppo.setup.resume import ResumePoint, find_resume_point


def dry_run(path: str | Path, loaded: LoadedConfig, world_size: int | None, *, verbose: bool = False) -> int:
    """Run all checks; print layout, data, a prompt, a reward and sizes, then the problems; create nothing."""
    problems = ErrorCollector()
    for text in loaded.problems:
        problems.add(ConfigError(text))
    if loaded.config is None:
        raise invalid_config(path, loaded.problems)
    size = _default_world_size(loaded.config.parallel) if world_size is None else world_size
    if size < 1:
        raise ConfigError(f"--world-size {size}: expected a number of processes, at least 1")
    rank = int(os.environ.get("RANK", "0"))
    start = Start(loaded.config, size, rank, dry_run=True, unreliable_sections=loaded.unreliable_sections)
    for error in find_problems(start):
        problems.add(error)
    resume_point = None
    if start.inputs is not None and not start.config.run.overwrite and not loaded.problems:
        # A run searches its checkpoints on all ranks, holding the lock of the folder. A dry run only reads them.
        from megatron_dppo.setup.served_models import read_served_models

        contents = read_contents(start.config.model_dump(mode="json")).contents
        served = read_served_models(start.config.distillation, start.config.reward).models
        resume_point = problems.attempt(find_resume_point, start.config, start.inputs, contents, served)
    trial = None
    if rank == 0:
        if start.inputs is not None and not problems.errors:
            trial = try_reward(start.config, start.inputs.train_prompts[0])
            if trial is not None and trial.error is not None:
                problems.add(trial.error)
        if verbose and not problems.errors:
            print(dump_toml(start.config))
        if world_size is None and "WORLD_SIZE" not in os.environ:
            print(f"for {size} process(es), the fewest of this layout; --world-size N checks it for N")
        print(printable("\n".join(_summary(start, size, trial))))
        if resume_point is not None:
            print("\n".join(_resume_lines(resume_point)))
    problems.raise_if_any()
    assert start.inputs is not None
    if rank == 0:
        defaults = resolved_defaults(start.config, start.inputs.layout)
        print("\ndefaults that depend on other keys:")
        print("\n".join(_in_columns([f"{key} = {value}" for key, value in defaults.items()])))
        failed = trial is not None and trial.failed
        passed = "All checks passed but the warning: this answer has no reward." if failed else "All checks passed."
        print(f"\n{passed}" + ("" if verbose else " --verbose prints the resolved configuration."))
    return 0


def _summary(start: Start, world_size: int, trial: RewardTrial | None) -> list[str]:
    """Return layout and batch arithmetic, which need no model and no data, and whatever else could be read."""
    config = start.config
    lines = []
    if not start.unreliable_sections & {"run", "rollout", "parallel", "train"}:
        layout = start.layout or unchecked_layout(config.parallel, world_size)
        lines.append(format_layout(layout, config.batch))
    if start.model is not None and not start.unreliable_sections & {"run", "checkpoint", "model"}:
        lines += model_lines(config, start.model)
    if start.inputs is not None:
        lines += preview_lines(config, start.inputs)
    if trial is not None:
        lines.append(trial.line)
    return [*lines, *start.notes]


def _in_columns(texts: Sequence[str]) -> Iterator[str]:
    """Yield two texts a line."""
    width = max(map(len, texts), default=0)
    for index in range(0, len(texts), 2):
        yield "  " + "  ".join(f"{text:<{width}}" for text in texts[index : index + 2]).rstrip()


def _resume_lines(point: ResumePoint) -> list[str]:
    skipped = [f"         {each.checkpoint.name} is skipped: {each.reason}" for each in point.skipped_checkpoints]
    changes = [f"         changed: {change}" for change in point.changes]
    return [f"resume   from {point.checkpoint}", *skipped, *changes]


def _default_world_size(parallel: ParallelConfig) -> int:
    """Return WORLD_SIZE, or the least common multiple of the sizes of all groups."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    tensor = parallel.tensor_model_parallel_size
    expert = parallel.expert_model_parallel_size
    # The same rule as in config/layout.py.
    expert_tensor = parallel.expert_tensor_parallel_size or (tensor if expert == 1 else 1)
    ranks_per_stage = math.lcm(tensor * parallel.context_parallel_size, expert * expert_tensor)
    return parallel.pipeline_model_parallel_size * ranks_per_stage


_RESOLVERS: Mapping[str, Callable[[Config, Layout], object]] = {
    "parallel.expert_tensor_parallel_size": lambda config, layout: layout.etp,
    "parallel.sequence_parallel": lambda config, layout: layout.sequence_parallel,
    "parallel.overlap_p2p_comm": lambda config, layout: layout.overlap_p2p_comm,
    "eval.max_new_tokens": lambda config, layout: config.eval_max_new_tokens,
    "eval.overlap_training": lambda config, layout: config.evaluates_beside_training,
    "run.hang_minutes": lambda config, layout: 0.9 * config.run.timeout_minutes,
}
"""Functions that compute the value in effect of a key whose default depends on other keys."""


def resolved_defaults(config: Config, layout: Layout) -> dict[str, object]:
    """Return the value in effect of each key that is not set and has an effect in this run.

    Example: ``{"loss.divergence_threshold_low": 0.15, "parallel.sequence_parallel": False}`` and more for
    DPPO-Binary-TV on one process.
    """
    unused = config.loss.unused_keys()
    values = {
        f"loss.{key}": value
        for key, value in config.loss.resolved_defaults().items()
        if key not in unused and getattr(config.loss, key) is None
    }
    for path, rule in _RESOLVERS.items():
        section, _, key = path.partition(".")
        if getattr(getattr(config, section), key) is None:
            values[path] = rule(config, layout)
    return values
