"""``megatron-dppo eval``: metrics of a run's or a Hugging Face folder's weights."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.commands.inference import add_weights_arguments, open_weights
from megatron_dppo.errors import ConfigError
from megatron_dppo.files import require_new, write_new_files

HELP = "evaluate a run's weights, or a Hugging Face folder"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``eval``; unknown arguments are overrides of the configuration."""
    add_weights_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the metrics as JSON")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="also write all responses as JSON lines")


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Evaluate the weights and print the metrics."""
    from megatron_dppo.run.offline import evaluate

    require_new(options.json, "--json")
    require_new(options.answers, "--answers")
    if options.json is not None and options.json == options.answers:
        raise ConfigError(f"--json and --answers are both {str(options.json)!r}. Fix: name two files")
    with open_weights(options, overrides, is_scored=True) as offline:
        values, rows = evaluate(offline)
    width = max(map(len, values))
    print(f"{offline.weights}\n" + "\n".join(f"  {name:<{width}}  {value:.4f}" for name, value in values.items()))
    summary = json.dumps({"weights": offline.weights, **values}, indent=2) + "\n"
    outputs = [(options.answers, (json.dumps(row) + "\n" for row in rows)), (options.json, [summary])]
    write_new_files((file, parts) for file, parts in outputs if file is not None)
    return 0
