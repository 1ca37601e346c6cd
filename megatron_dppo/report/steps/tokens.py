"""A step's file as flat columns of tokens, for those who look at many of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_dppo.errors import DataError
from megatron_dppo.report.steps.files import require_pyarrow

Decode = Callable[[Sequence[int]], list[str]]
"""Ids of tokens to the text of each."""
_LISTS = ("response_ids", "loss_mask", "keep", "logprobs", "rollout_logprobs", "advantages")
_SCALARS = ("sample", "prompt_id", "prompt", "label", "reward", "reward_failed", "finish_reason", "age", "update")
_FEW = 3
"""Responses with, and without, a token from which on their rewards are compared."""
_CRITICAL = 0.25
"""Of the reward's range in the step: how far those means are apart for a token that counts as reward-critical."""


@dataclass(frozen=True)
class StepTokens:
    """The N response tokens of a step's samples, end to end; probabilities at the rollout's temperature."""

    ids: NDArray[np.int32]
    """[N]"""
    sample: NDArray[np.int32]
    """[N] index of the row that a token is of"""
    trained: NDArray[np.bool_]
    """[N] the loss mask"""
    masked: NDArray[np.bool_]
    """[N] in the loss mask with an advantage, and without a gradient"""
    pi: NDArray[np.float32]
    """[N] the policy's probability when it trained on the token; 0 where that is not known"""
    mu: NDArray[np.float32]
    """[N] the rollout's"""
    advantages: NDArray[np.float32]
    """[N]"""
    starts: NDArray[np.int64]
    """[samples + 1] where the tokens of each sample begin"""
    rows: list[dict[str, Any]]
    """what there is once a sample: ``sample prompt_id prompt label reward reward_failed finish_reason age update``"""


@dataclass(frozen=True, kw_only=True)
class MaskedToken:
    """What a step masked of one token and one sign of the advantage."""

    token_id: int
    sign: int
    """of the advantage: 1 or -1"""
    count: int
    """how often it was masked"""
    share: float
    """of all that was masked with this sign"""
    of: int
    """how often it stands in the step with this sign"""
    pi: float
    """means over the masked ones"""
    mu: float
    reward_gap: float | None
    """mean reward of the responses that have the token less that of the others; None = fewer than three of either"""
    critical: bool
    """whether that gap is a quarter or more of the rewards' range in the step"""


def read_tokens(file: Path) -> StepTokens:
    """The tokens of one of ``files.recorded_steps``.

    Raises:
        DataError: it cannot be read.
    """
    arrow = require_pyarrow("reading rollouts")
    try:
        table = import_module("pyarrow.parquet").read_table(file, columns=[*_LISTS, *_SCALARS])
        lists = {name: table.column(name).combine_chunks() for name in _LISTS}
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file} cannot be read as a step's rollouts: {error}") from error
    rows = table.select(_SCALARS).to_pylist()
    counts = [len(ids) for ids in lists["response_ids"]]
    ids = _flat(lists["response_ids"], counts, np.int32, 0)
    trained = _flat(lists["loss_mask"], counts, np.bool_, False)
    keep = _flat(lists["keep"], counts, np.bool_, True)
    advantages = _flat(lists["advantages"], counts, np.float32, 0.0)
    pi = np.exp(_flat(lists["logprobs"], counts, np.float32, np.nan))
    mu = np.exp(_flat(lists["rollout_logprobs"], counts, np.float32, np.nan))
    return StepTokens(
        ids=ids,
        sample=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        trained=trained & np.isfinite(pi),
        masked=trained & (advantages != 0) & ~keep,
        pi=np.nan_to_num(pi, posinf=0.0),
        mu=np.nan_to_num(mu, posinf=0.0),
        advantages=advantages,
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        rows=rows,
    )


def _flat(column: Any, counts: Sequence[int], dtype: Any, fill: Any) -> NDArray[Any]:
    """The lists of a column end to end; ``fill`` for a row that has none."""
    if column.null_count:
        parts = [np.full(n, fill) if row is None else np.asarray(row) for row, n in zip(column.to_pylist(), counts)]  # noqa: B905
        return np.concatenate([np.empty(0), *parts]).astype(dtype)
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).astype(dtype)


def masked_tokens(step: StepTokens, most: int = 40) -> list[MaskedToken]:
    """What the step masked, the most frequent first.

    Args:
        step: the tokens.
        most: how many are returned.
    """
    signs = np.sign(step.advantages[step.masked]).astype(int)
    found = Counter(zip(step.ids[step.masked].tolist(), signs.tolist(), strict=True))
    totals = {sign: int((signs == sign).sum()) for sign in (1, -1)}
    rewards = np.array([row["reward"] for row in step.rows], dtype=float)
    return [
        _masked(step, token, sign, count, totals[sign], rewards) for (token, sign), count in found.most_common(most)
    ]


def _masked(
    step: StepTokens, token: int, sign: int, count: int, total: int, rewards: NDArray[np.float64]
) -> MaskedToken:
    here = step.ids == token
    alike = here & step.trained & (np.sign(step.advantages) == sign)
    masked = alike & step.masked
    having = np.zeros(len(rewards), dtype=bool)
    having[step.sample[here]] = True
    gap = None
    if min(having.sum(), (~having).sum()) >= _FEW:
        gap = float(rewards[having].mean() - rewards[~having].mean())
    spread = float(np.ptp(rewards)) if len(rewards) else 0.0
    return MaskedToken(
        token_id=token,
        sign=sign,
        count=count,
        share=count / total,
        of=int(alike.sum()),
        pi=float(step.pi[masked].mean()) if masked.any() else 0.0,
        mu=float(step.mu[masked].mean()) if masked.any() else 0.0,
        reward_gap=gap,
        critical=gap is not None and spread > 0 and abs(gap) >= _CRITICAL * spread,
    )


TABLE_COLUMNS = ("token", "advantage", "masked", "of", "share", "mean pi", "mean mu", "reward gap", "reward-critical")


def masked_table(found: Sequence[MaskedToken], decode: Decode) -> list[list[Any]]:
    """Rows under ``TABLE_COLUMNS``, for TensorBoard and Weights & Biases."""
    texts = decode([each.token_id for each in found])
    return [
        [
            *(text, "+" if each.sign > 0 else "-", each.count, each.of, round(each.share, 4)),
            *(round(each.pi, 4), round(each.mu, 4), None if each.reward_gap is None else round(each.reward_gap, 4)),
            each.critical,
        ]
        for each, text in zip(found, texts, strict=True)
    ]
