"""Megatron's warnings at import, which nobody can act on, out of the way of those of the run."""

from __future__ import annotations

import sys
import warnings

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


def quiet_megatron() -> None:
    """Filter them, unless the user asks for warnings by ``-W`` or PYTHONWARNINGS."""
    if sys.warnoptions:
        return
    for message, category, module in _NOISE:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
