"""A run's folder as the report needs it."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.data.chat import load_tokenizer, token_texts
from megatron_dppo.errors import ConfigError, UserError
from megatron_dppo.losses import batch_statistics, policy_loss
from megatron_dppo.report.steps.files import recorded_steps
from megatron_dppo.report.steps.tokens import Decode, StepTokens
from megatron_dppo.setup.starts import load_run_config
from megatron_dppo.types import LossInputs
from megatron_dppo_report.build import ReportedRun

_RECORDED_INPUTS = {"rollout_logprobs", "sequence_ids", "token_weights"}
"""Inputs of a loss that a recorded step has."""


def open_run(folder: Path, name: str = "") -> ReportedRun:
    """Return a run for the report."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is not a folder; expected the folder of a run (run.output_dir)")
    loss = _loss(folder)
    cap = math.inf if loss is None else loss.ratio_limits[1]
    return ReportedRun(folder, _decoder(folder), name, cap, partial(other_masks, None if loss is None else loss.name))


def other_masks(name: str | None, step: StepTokens) -> dict[str, Any]:
    """Return which tokens ``[N]`` each loss but ``name`` would have masked with its defaults.

    Losses that need more than pi, mu, A, the sequences and the updates are left out. A recorded step has mu of the
    Top-K, but no pi at ids that were not sampled, so no Top-K divergence. It has no pi' either.
    """
    mu = torch.from_numpy(step.mu)
    known = torch.from_numpy(step.trained) & (mu > 0)
    inputs = LossInputs(
        logprobs=torch.from_numpy(step.pi).log(),
        rollout_logprobs=mu.where(known, 1.0).log(),
        advantages=torch.from_numpy(step.advantages),
        loss_mask=known,
        sequence_ids=torch.from_numpy(step.sample).long(),
        token_weights=torch.ones(len(step.ids)),
    )
    result = {}
    for other in loss_names():
        config = LossConfig(name=other)
        if other != name and config.required_inputs <= _RECORDED_INPUTS and not config.step_statistics():
            result[other] = (known & ~_keep_mask(step, inputs, config)).numpy()
    return result


def _keep_mask(step: StepTokens, inputs: LossInputs, loss: LossConfig) -> Tensor:
    """Return which tokens a loss keeps, by the statistics of their update if it reads any. Shape [N]."""
    if not loss.update_statistics():
        return policy_loss(inputs, loss).keep_mask
    numbers = torch.tensor([-1 if row["update"] is None else row["update"] for row in step.rows])
    updates = numbers[inputs.sequence_ids]
    keep = torch.zeros_like(inputs.loss_mask)
    for number in numbers.unique():
        of_update = replace(inputs, loss_mask=inputs.loss_mask & (updates == number))
        of_update = replace(of_update, statistics=batch_statistics(of_update, loss))
        keep |= policy_loss(of_update, loss).keep_mask & of_update.loss_mask
    return keep


def _loss(folder: Path) -> LossConfig | None:
    """Return the loss of the run; None if its configuration cannot be read."""
    try:
        return load_run_config(folder, []).loss
    except UserError:
        return None


def _decoder(folder: Path) -> Decode | None:
    """Return a function from token ids to texts. None without rollouts, and with a note without a tokenizer."""
    if not recorded_steps(folder):
        return None
    try:
        tokenizer = load_tokenizer(load_run_config(folder, []).model.path)
    except UserError as error:
        print(f"note     tokens are shown as ids: {error}", flush=True)
        return None
    return lambda ids: token_texts(tokenizer, ids)
