"""``megatron-dppo eval`` and ``megatron-dppo generate``: answers of a run's weights, or of a Hugging Face folder's."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new

if TYPE_CHECKING:
    from megatron_dppo.run.offline import Offline


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``eval``; all others are overrides of the configuration."""
    _add_weights_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the values as JSON")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="also write every answer, as JSON lines")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``generate``; all others are overrides of the configuration."""
    _add_weights_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="answer this one")
    source.add_argument("--prompts", metavar="SOURCE", help="answer these, as in data.train (default: data.train)")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON lines there (default: print the answers)"
    )
    parser.add_argument("--score", action="store_true", help="ask the reward function, too")


def run_eval(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print the values.

    Raises:
        UserError: see ``offline_config``, ``open_offline`` and ``evaluate``.
    """
    from megatron_dppo.run.offline import evaluate

    require_new(options.json, "--json")
    require_new(options.answers, "--answers")
    with _open(options, overrides) as offline:
        values = evaluate(offline, options.answers)
    width = max(map(len, values))
    print(f"{offline.weights}\n" + "\n".join(f"  {name:<{width}}  {value:.4f}" for name, value in values.items()))
    if options.json is not None:
        write_new(options.json, json.dumps({"weights": offline.weights, **values}, indent=2) + "\n")
    return 0


def run_generate(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Print answers, or write them to a file.

    Raises:
        UserError: see ``offline_config``, ``open_offline`` and ``generate``.
    """
    from megatron_dppo.run.offline import generate, write_lines

    require_new(options.output, "--output")
    if options.prompt is not None and options.score:
        raise ConfigError("--score compares with labels, and --prompt has none; use --prompts FILE")
    with tempfile.TemporaryDirectory() as folder:
        source, labels = options.prompts, []
        if options.prompt is not None:
            source, labels = f"{folder}/prompt.jsonl", ["--data.prompt_key", "prompt", "--data.label_key", ""]
            Path(source).write_text(json.dumps({"prompt": options.prompt}) + "\n", encoding="utf-8")
        with _open(options, [*overrides, *labels]) as offline:
            rows = generate(offline, source or offline.config.data.train, scored=options.score)
            if options.output is None:
                _print(rows)
            else:
                count = write_lines(options.output, map(json.dumps, rows))
                print(f"{count} answers in {options.output}")
    return 0


def _print(rows: Iterator[dict[str, Any]]) -> None:
    for row in rows:
        reward = f" [{row['reward']:.4g}]" if "reward" in row else ""
        print(f"--- {row['prompt_id']} ({row['finish_reason']}){reward}\n{row['response']}", flush=True)


def _add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="TOML configuration file, or the folder of a run (run.output_dir)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="FOLDER", help="weights: this Hugging Face folder")
    which.add_argument("--step", type=int, help="weights: this checkpoint of the run (default: its newest one)")


@contextmanager
def _open(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Offline]:
    from megatron_dppo.run.offline import offline_config, open_offline

    is_run = options.target.is_dir()
    if options.step is not None and not is_run:
        raise ConfigError(f"--step {options.step} is for the folder of a run, and {str(options.target)!r} is none")
    config = offline_config(options.target, overrides)
    run = options.target if is_run else None
    with open_offline(config, run=run, model=options.model, step=options.step) as offline:
        yield offline
