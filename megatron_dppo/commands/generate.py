"""``megatron-dppo generate``: responses of a run's or a Hugging Face folder's weights."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.commands.inference import add_weights_arguments, open_weights
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new
from megatron_dppo.report.printable import printable

HELP = "generate responses with a run's weights, or a Hugging Face folder's"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``generate``; unknown arguments are overrides of the configuration."""
    add_weights_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="a single prompt")
    source.add_argument("--prompts", metavar="SOURCE", help="prompts, as in data.train (default: data.train)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write JSON lines (default: print the responses)")
    parser.add_argument("--score", action="store_true", help="also compute the rewards")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Generate responses and print them or write them to a file."""
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
            config = offline_config(options.target, overrides)
            is_chat, reason = single_prompt_template(config.data, options.model or config.model.path)
            print(f"prompt   {'with the chat template' if is_chat else 'as plain text'}: {reason}", flush=True)
            key_overrides = ["--data.prompt_key", "prompt", "--data.label_key", ""]
            key_overrides += ["--data.apply_chat_template", str(is_chat).lower()]
            Path(source).write_text(json.dumps({"prompt": options.prompt}) + "\n", encoding="utf-8")
        with open_weights(options, [*overrides, *key_overrides], is_scored=options.score) as offline:
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
