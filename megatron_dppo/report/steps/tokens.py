"""Flat columns of a step's tokens, for statistics over many tokens."""

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
from megatron_dppo.types import VersionSpan, token_ages, version_spans
from megatron_dppo.types.stored_record import StoredRecord

Decode = Callable[[Sequence[int]], list[str]]
"""Function that returns the text of each token id."""
_LISTS = ("response_ids", "loss_mask", "keep", "logprobs", "rollout_logprobs", "advantages")
_SCALARS = ("sample", "prompt_id", "prompt", "label", "reward", "reward_failed", "finish_reason", "update")
_VERSIONS = ("policy_version", "policy_versions", "trained_policy_version")
"""Columns that the ages of tokens are computed from."""
_OPTIONAL = ("failure", "reward_parts", "segment_lengths", "tool_times", "sampled")
"""Columns that files of older versions lack."""
UNKNOWN_AGE = -1
_MIN_RESPONSES = 3
"""Minimum number of responses with, and without, a token for a comparison of their rewards."""
_CRITICAL_FRACTION = 0.25
"""Fraction of the step's reward range by which these means must differ for a reward-critical token."""


@dataclass(frozen=True)
class StepTokens:
    """The N response tokens of a step's samples, concatenated. Probabilities are at the rollout's temperature."""

    ids: NDArray[np.int32]
    """Token ids. Shape [N]."""
    sample: NDArray[np.int32]
    """Index of each token's row. Shape [N]."""
    trained: NDArray[np.bool_]
    """Loss mask. Shape [N]."""
    masked: NDArray[np.bool_]
    """True for tokens of the loss mask with an advantage but without a gradient. Shape [N]."""
    pi: NDArray[np.float32]
    """Probability under the policy when it trained on the token, 0 if unknown. Shape [N]."""
    mu: NDArray[np.float32]
    """Probability under the rollout policy. Shape [N]."""
    advantages: NDArray[np.float32]
    """Advantages. Shape [N]."""
    given: NDArray[np.bool_]
    """True for tokens that were not sampled. Shape [N]."""
    ages: NDArray[np.int32]
    """Age in updates, as ``types.token_ages`` counts it for ``loss.threshold_age``. ``UNKNOWN_AGE`` for samples without
    a training update, and in files of older versions, which lack ``trained_policy_version``. Shape [N]."""
    starts: NDArray[np.int64]
    """Start of each sample's tokens. Shape [samples + 1]."""
    rows: list[StoredRecord]
    """Scalars of each sample: ``sample prompt_id prompt label reward reward_failed finish_reason update``, and if
    the file has them ``failure reward_parts segment_lengths tool_times``."""


@dataclass(frozen=True, kw_only=True)
class MaskedToken:
    """Statistics of one masked token id with one sign of the advantage."""

    token_id: int
    sign: int
    """Sign of the advantage, 1 or -1."""
    count: int
    """Number of times that it was masked."""
    share: float
    """Fraction of all masked tokens with this sign."""
    of: int
    """Number of times that it occurs in the step with this sign."""
    pi: float
    """Mean of pi over the masked occurrences."""
    mu: float
    """Mean of mu over the masked occurrences."""
    reward_gap: float | None
    """Mean reward of responses with the token minus that of the others. None below three of either."""
    critical: bool
    """True if that gap is at least a quarter of the step's reward range."""


def read_tokens(file: Path) -> StepTokens:
    """Return the tokens of one of ``files.recorded_steps``."""
    arrow = require_pyarrow("reading rollouts")
    try:
        parquet = import_module("pyarrow.parquet")
        names = set(parquet.read_schema(file).names)
        optional = [name for name in _OPTIONAL if name in names]
        versions = list(_VERSIONS) if names.issuperset(_VERSIONS) else []
        table = parquet.read_table(file, columns=[*_LISTS, *_SCALARS, *optional, *versions])
        lists = {name: table.column(name).combine_chunks() for name in _LISTS}
    except (arrow.ArrowException, OSError, KeyError) as error:
        raise DataError(f"{file} cannot be read as a step's rollouts: {error}") from error
    rows = table.select([*_SCALARS, *(name for name in optional if name != "sampled")]).to_pylist()
    counts = [len(ids) for ids in lists["response_ids"]]
    given = np.zeros(sum(counts), dtype=np.bool_)
    if "sampled" in optional:
        given = ~_flat(table.column("sampled").combine_chunks(), counts, np.bool_, True)
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
        given=given,
        ages=_ages(table.select(versions).to_pylist() if versions else [{}] * len(counts), counts),
        starts=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        rows=rows,
    )


def _ages(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> NDArray[np.int32]:
    """Return the age of each token [N] from the columns ``_VERSIONS`` of each sample; empty rows lack them."""
    ages = [np.empty(0)]
    for row, count in zip(rows, counts, strict=True):
        trained_version = row.get("trained_policy_version")
        if trained_version is None:
            ages.append(np.full(count, UNKNOWN_AGE))
        else:
            recorded = (VersionSpan(**span) for span in row["policy_versions"])
            spans = version_spans(recorded, row["policy_version"], count)
            ages.append(token_ages(spans, count, trained_version).numpy())
    return np.concatenate(ages).astype(np.int32)


def _flat(column: Any, counts: Sequence[int], dtype: Any, fill: Any) -> NDArray[Any]:
    """Return the concatenated lists of a column; ``fill`` for a row that has none."""
    if column.null_count:
        parts = [np.full(n, fill) if row is None else np.asarray(row) for row, n in zip(column.to_pylist(), counts)]  # noqa: B905
        return np.concatenate([np.empty(0), *parts]).astype(dtype)
    return np.asarray(column.flatten().to_numpy(zero_copy_only=False)).astype(dtype)


def masked_tokens(step: StepTokens, most: int = 40) -> list[MaskedToken]:
    """Return the masked tokens of a step, the most frequent first."""
    signs = np.sign(step.advantages[step.masked]).astype(int)
    counts = Counter(zip(step.ids[step.masked].tolist(), signs.tolist(), strict=True))
    totals = {sign: int((signs == sign).sum()) for sign in (1, -1)}
    rewards = np.array([row["reward"] for row in step.rows], dtype=float)
    return [
        _masked(step, token, sign, count, totals[sign], rewards) for (token, sign), count in counts.most_common(most)
    ]


def _masked(
    step: StepTokens, token: int, sign: int, count: int, total: int, rewards: NDArray[np.float64]
) -> MaskedToken:
    is_token = step.ids == token
    same_sign = is_token & step.trained & (np.sign(step.advantages) == sign)
    masked = same_sign & step.masked
    has_token = np.zeros(len(rewards), dtype=bool)
    has_token[step.sample[is_token]] = True
    # Compare rewards of responses with and without the token, wherever it stands in them.
    gap = None
    if min(has_token.sum(), (~has_token).sum()) >= _MIN_RESPONSES:
        gap = float(rewards[has_token].mean() - rewards[~has_token].mean())
    spread = float(np.ptp(rewards)) if len(rewards) else 0.0
    return MaskedToken(
        token_id=token,
        sign=sign,
        count=count,
        share=count / total,
        of=int(same_sign.sum()),
        pi=float(step.pi[masked].mean()) if masked.any() else 0.0,
        mu=float(step.mu[masked].mean()) if masked.any() else 0.0,
        reward_gap=gap,
        critical=gap is not None and spread > 0 and abs(gap) >= _CRITICAL_FRACTION * spread,
    )


TABLE_COLUMNS = ("token", "advantage", "masked", "of", "share", "mean pi", "mean mu", "reward gap", "reward-critical")


def masked_table(tokens: Sequence[MaskedToken], decode: Decode) -> list[list[object]]:
    """Return rows under ``TABLE_COLUMNS``, for TensorBoard and Weights & Biases."""
    texts = decode([each.token_id for each in tokens])
    return [
        [
            *(text, "+" if each.sign > 0 else "-", each.count, each.of, round(each.share, 4)),
            *(round(each.pi, 4), round(each.mu, 4), None if each.reward_gap is None else round(each.reward_gap, 4)),
            each.critical,
        ]
        for each, text in zip(tokens, texts, strict=True)
    ]
