"""What the conversion tools share: arguments and error reports."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
from collections.abc import Callable
from pathlib import Path

from megatron_dppo.commands.main import report_error
from megatron_dppo.config.model import ParallelConfig
from megatron_dppo.errors import CheckpointError, ConfigError, UserError
from megatron_dppo.weights.quantization import FORMATS, Format

_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


def conversion_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the layout, in Megatron's words, and the dtype of the weights."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    return parser


def parallel_of(options: argparse.Namespace) -> ParallelConfig:
    """The layout that the arguments say.

    Raises:
        ConfigError: a size below 1.
    """
    sizes = {name: value for name in _SIZES if (value := getattr(options, name)) is not None}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: expected a number of ranks, at least 1")
    return ParallelConfig(**sizes)


def new_folder(path: str) -> Path:
    """The folder that a tool writes.

    Raises:
        CheckpointError: something of that name is there already.
    """
    if Path(path).exists():
        raise CheckpointError(f"{path} already exists; choose another folder or delete it")
    return Path(path)


def quantized_format(text: str) -> Format:
    """Return the format that ``--format`` or ``--quantize`` names.

    Raises:
        argparse.ArgumentTypeError: another one; with what to use for one that was removed.
    """
    if text in FORMATS:
        return text
    if text == "int4_awq":
        raise argparse.ArgumentTypeError(
            "int4_awq was removed. Fix: export without it, then run NVIDIA ModelOpt's hf_ptq.py --qformat int4_awq on "
            "the folder (docs/precision.md, Calibrated formats)"
        )
    raise argparse.ArgumentTypeError(f"expected {' or '.join(FORMATS)}, got {text!r}")


def reporting_errors(main: Callable[[], int]) -> Callable[[], int]:
    """Print on rank 0 only, and turn a UserError into its message and exit code."""

    @functools.wraps(main)
    def wrapper() -> int:
        is_first = os.environ.get("RANK", "0") == "0"
        try:
            with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(io.StringIO()):
                return main()
        except UserError as error:
            return report_error(error)

    return wrapper
