"""``megatron-dppo eval`` and ``megatron-dppo generate``: responses of a run's or a Hugging Face folder's weights."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new
from megatron_dppo.report.printable import printable
from megatron_dppo.run.named_functions import OPTION_HELP, SAMPLING, require_permission

if TYPE_CHECKING:
    from megatron_dppo.run.offline import Offline


def add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``eval``; unknown arguments are overrides of the configuration."""
    _add_weights_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics as JSON")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="also write all responses as JSON lines")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``; unknown arguments are overrides of the configuration."""
    _add_weights_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="a single prompt")
    source.add_argument("--prompts", metavar="SOURCE", help="prompts, as in data.train (default: data.train)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write JSON lines (default: print the responses)")
    parser.add_argument("--score", action="store_true", help="also compute the rewards")


def run_eval(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate the weights and print the metrics.

    Raises:
        UserError: See ``offline_config``, ``open_offline`` and ``evaluate``.
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
    """Generate responses and print them or write them to a file.

    Raises:
        UserError: See ``offline_config``, ``open_offline`` and ``generate``.
    """
    from megatron_dppo.run.offline import generate, offline_config, single_prompt_template, write_lines

    require_new(options.output, "--output")
    if options.prompt is not None and options.score:
        raise ConfigError("--score needs labels, and --prompt has none. Fix: use --prompts FILE")
    with tempfile.TemporaryDirectory() as folder:
        source = options.prompts
        key_overrides: list[str] = []
        if options.prompt is not None:
            # The single prompt goes through the data pipeline of files, so that chat template and limits apply.
            source = f"{folder}/prompt.jsonl"
            is_chat, reason = single_prompt_template(offline_config(options.target, overrides), options.model)
            print(f"prompt   {'with the chat template' if is_chat else 'as plain text'}: {reason}", flush=True)
            key_overrides = ["--data.prompt_key", "prompt", "--data.label_key", ""]
            key_overrides += ["--data.apply_chat_template", str(is_chat).lower()]
            Path(source).write_text(json.dumps({"prompt": options.prompt}) + "\n", encoding="utf-8")
        with _open(options, [*overrides, *key_overrides]) as offline:
            rows = generate(offline, source or offline.config.data.train, scored=options.score)
            if options.output is None:
                _print_responses(rows)
            else:
                count = write_lines(options.output, map(json.dumps, rows))
                print(f"{count} responses in {options.output}")
    return 0


def _print_responses(rows: Iterator[dict[str, Any]]) -> None:
    for row in rows:
        reward = f" [{row['reward']:.4g}]" if "reward" in row else ""
        text = f"--- {row['prompt_id']} ({row['finish_reason']}){reward}\n{row['response']}"
        # A pipe or a file gets the response as it is.
        print(printable(text) if sys.stdout.isatty() else text, flush=True)


def _add_weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, help="TOML configuration file, or the folder of a run (run.output_dir)")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--model", type=Path, metavar="FOLDER", help="use the weights of this Hugging Face folder")
    weights.add_argument("--step", type=int, help="use the run's checkpoint of this step (default: its newest one)")
    parser.add_argument("--run-functions", action="store_true", help=OPTION_HELP)


@contextmanager
def _open(options: argparse.Namespace, overrides: Sequence[str]) -> Iterator[Offline]:
    from megatron_dppo.run.offline import offline_config, open_offline

    is_run = options.target.is_dir()
    if options.step is not None and not is_run:
        raise ConfigError(
            f"--step {options.step} needs the folder of a run, got {str(options.target)!r}. Fix: give run.output_dir"
        )
    config = offline_config(options.target, overrides)
    is_scored = options.command == "eval" or options.score
    sections = (*SAMPLING, "reward") if is_scored else SAMPLING
    require_permission(config, sections, options.command, is_given=options.run_functions)
    run = options.target if is_run else None
    with open_offline(config, run=run, model=options.model, step=options.step) as offline:
        yield offline
