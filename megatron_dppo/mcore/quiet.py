"""Megatron's warnings that nobody can act on, out of the way of those of the run."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import partial

_NOISE = (
    # Optional packages that are not installed (the doctor tells), and Megatron's own deprecated settings.
    ("", UserWarning, r"megatron\."),
    ("", DeprecationWarning, r"megatron\."),
    ("", FutureWarning, r"megatron\."),
    # Megatron's calls of collectives that torch has renamed.
    (r".*torch\.distributed\.\w+. is deprecated", FutureWarning, r"torch\.distributed\."),
    # torch's planners of checkpoints about their own use of ShardedTensor.
    ("", FutureWarning, r"torch\.distributed\.checkpoint\."),
)
_NOISY_LOGS = {
    # Megatron Core 0.19.2 about its own classes.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.transformer.transformer_layer": "Rewrapping ModuleSpec",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param_layout not provided",
    # Megatron Core 0.17 and newer imports it, also where nothing is compiled for CUDA.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""Logger -> start of the message."""


def quiet_megatron() -> None:
    """Filter log records, and Python's warnings unless the user asks for those by ``-W`` or PYTHONWARNINGS."""
    for name, start in _NOISY_LOGS.items():
        logging.getLogger(name).addFilter(partial(_is_other, start))
    if sys.warnoptions:
        return
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


def _is_other(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
