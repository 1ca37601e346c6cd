"""``megatron-dppo tasks CONFIG FILE``: write the tasks of ``agent.environment`` as rows of data."""

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import write_new

HELP = "write the tasks of agent.environment as data"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tasks``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", help="TOML configuration file with agent.environment")
    parser.add_argument("file", type=Path, help="JSONL file to write, for data.train; it must not exist")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Write one row for each task: its key, prompt and name."""
    from megatron_dppo.config.io import load_config
    from megatron_dppo_agents.environment import EnvironmentAgent

    agent = load_config(options.config, overrides).agent
    if agent.environment is None:
        raise ConfigError("tasks needs agent.environment, such as 'verifiers:TASKSET' (docs/agents.md)")
    if options.file.exists():
        raise ConfigError(f"{options.file} exists; name another file, or delete it")
    with closing(EnvironmentAgent(agent)) as environment:
        rows = environment.tasks()
    write_new(options.file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{options.file}: {len(rows)} tasks of {agent.environment}")
    return 0
