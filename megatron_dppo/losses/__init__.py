"""Policy losses: tensors in, sums out. Pure torch, without collectives, files or Megatron.

A file of this folder with a class that has a ``name`` is one loss, or several that differ in one place. Start with
``dppo``, which also defines the terms. ``user_loss`` runs a user-defined function. The other files hold what losses
share. ``rule`` has the form of every loss, ``objective`` applies it.

Importing this package does not import torch: the names below load their modules on first use, so that the
configuration of a loss can be read without torch.
"""

# The imports below are the table of the names that this package exports.
# mypy: implicit-reexport
# ruff: noqa: F401

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_dppo.config.user_functions import needs
    from megatron_dppo.losses.adaptive import adapted_limits
    from megatron_dppo.losses.decision import (
        Decision,
        clipped_surrogate,
        policy_term,
        ratio_keep_mask,
        weigh_by_ratio,
        with_value,
    )
    from megatron_dppo.losses.divergence import binary_kl, binary_tv, topk_kl, topk_sums, topk_tv
    from megatron_dppo.losses.example import show
    from megatron_dppo.losses.loss_metrics import with_cosines
    from megatron_dppo.losses.mismatch import mismatch_keep_mask, mismatch_log_ratio
    from megatron_dppo.losses.objective import (
        SUPERVISED,
        Objective,
        no_policy_loss,
        policy_loss,
        policy_objective,
        supervised_loss,
    )
    from megatron_dppo.losses.predictive import divergence_rate, predictive_sums
    from megatron_dppo.losses.reduce import BatchTotals, per_sequence, sequence_weight, token_weights
    from megatron_dppo.losses.rule import Loss
    from megatron_dppo.losses.sequences import prefix_keep_mask, sequence_keep_mask
    from megatron_dppo.losses.statistics import BatchTokens, batch_statistics, compute_statistics
    from megatron_dppo.losses.tokens import Tokens
    from megatron_dppo.losses.user_functions import call_user_loss
else:

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}. It has: {', '.join(__all__)}")
        return getattr(import_module(_MODULES[name]), name)


def _imported_names(source: str) -> dict[str, str]:
    """Return the module of each name that the block for type checkers imports."""
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


_MODULES = _imported_names(Path(__file__).read_text(encoding="utf-8"))
__all__ = sorted(_MODULES)
