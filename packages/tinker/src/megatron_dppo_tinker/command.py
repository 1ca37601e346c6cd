"""``megatron-dppo tinker CONFIG``: serve the Tinker API with the model of a configuration."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.errors import ConfigError

HELP = "serve the Tinker API on this machine"
HAS_OVERRIDES = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``tinker``; unknown arguments are overrides of the configuration."""
    parser.add_argument("config", type=Path, help="TOML configuration file: [model], [lora], [rollout] and [run] count")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)")
    parser.add_argument("--port", type=int, default=0, help="port (default: a free one)")
    parser.add_argument("--base-model", metavar="NAME", help="name of the model for clients (default: model.path)")
    parser.add_argument("--max-models", type=int, default=2, metavar="N", help="models in memory (default 2)")
    parser.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="largest request (default 64)")
    parser.add_argument(
        "--key-env",
        default="TINKER_API_KEY",
        metavar="NAME",
        help="environment variable with the key (default TINKER_API_KEY; unset: a new key in run.output_dir)",
    )


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Serve until a signal."""
    if (world_size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise ConfigError(
            f"WORLD_SIZE = {world_size}: the Tinker server runs in one process so far. Fix: start it without torchrun "
            "or srun"
        )
    for name in ("max_models", "max_body_mb"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: expected 1 or more")
    from megatron_dppo.config.io import load_config
    from megatron_dppo.setup.preflight import check_flags
    from megatron_dppo_tinker.serve import ServeOptions, check_config, serve

    config = load_config(options.config, overrides)
    check_flags(config.model, config.train)
    check_config(config)
    served = ServeOptions(
        host=options.host,
        port=options.port,
        base_model=options.base_model,
        max_models=options.max_models,
        max_body_bytes=options.max_body_mb << 20,
        key_variable=options.key_env,
    )
    serve(config, served, lambda line: print(line, flush=True))
    return 0
