"""Scores batches of completions by one function or several; a reward that fails or hangs costs that sample only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.reward import RewardConfig, RewardFunctionConfig
from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, CodeOptions, needs_label, read_options
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import RewardItem, RewardResult, Shaping
from megatron_dppo.rewards.pool import FunctionPool, score_at_once
from megatron_dppo.rewards.scoring import ScoringOutcome
from megatron_dppo.rewards.signatures import RunFacts


@dataclass(frozen=True)
class RewardPart:
    """One of several functions."""

    name: str
    """of its score in the log"""
    pool: FunctionPool
    weight: float = 1.0
    is_eval: bool = False
    """whether an evaluation counts its score alone"""


class RewardScorer:
    """Scores items in worker processes; answers that need no parser are scored here.

    Samples of an async function run at the same time, ``async_concurrency`` in a worker. A function for batches gets
    an equal share of the samples in each worker, so all of them with one worker. A batch that raises, hangs or returns
    something else than one value a sample is split in two and each half is tried again, until the samples at fault
    stand alone.

    Args:
        function: the function, or just its name.
        timeout_seconds: limit for one sample, or one call of a function for batches; the worker is killed then.
        num_workers: processes.
        async_concurrency: samples of an async function that one worker has under way.
        shaping: what is added to the score.

    Raises:
        RewardError: the function cannot be loaded, its signature is not known, or its options do not fit.
    """

    def __init__(
        self,
        function: FunctionSpec | str,
        timeout_seconds: float,
        num_workers: int,
        *,
        async_concurrency: int = 64,
        shaping: Shaping | None = None,
    ) -> None:
        spec = FunctionSpec(function) if isinstance(function, str) else function
        pool = FunctionPool(spec, timeout_seconds, num_workers, async_concurrency=async_concurrency)
        self._members: Sequence[RewardPart] = [RewardPart("", pool)]
        self._shaping = shaping or Shaping()

    @classmethod
    def of_several(cls, members: Sequence[RewardPart], shaping: Shaping | None = None) -> RewardScorer:
        """A scorer by the weighted sum of several functions, whose processes work at the same time.

        A result's parts are ``score`` (the sum without shaping), each function's score under its name, and its own
        parts as ``NAME/PART``.
        """
        scorer = cls.__new__(cls)
        scorer._members, scorer._shaping = list(members), shaping or Shaping()
        return scorer

    @property
    def described(self) -> str:
        """The functions by their names in the configuration, for messages."""
        names = [member.name for member in self._members]
        if all(names):
            return f"[reward.functions] ({', '.join(names)})"
        return f"reward.function = {self._members[0].pool.spec.name!r}"

    def score(self, items: Sequence[RewardItem], *, is_batch: bool = True) -> list[RewardResult]:
        """One result an item, in order.

        Args:
            items: what is scored.
            is_batch: they are enough to judge the functions by.

        Raises:
            RewardError: a function failed on every one of several items of a batch, so it is broken itself.
        """
        found = score_at_once([member.pool for member in self._members], items)
        if is_batch and len(items) > 1:
            for member, outcomes in zip(self._members, found, strict=True):
                self._require_some(member, outcomes)
        final = [self._result(item, [outcomes[place] for outcomes in found]) for place, item in enumerate(items)]
        if is_batch and len(final) > 1 and all(result.failed for result in final):
            raise RewardError(f"the rewards of all {len(final)} samples failed; first error: {final[0].error}")
        return final

    @staticmethod
    def _require_some(member: RewardPart, outcomes: dict[int, ScoringOutcome]) -> None:
        if all(outcome.error for outcome in outcomes.values()):
            spec = member.pool.spec
            raise RewardError(
                f"{spec.table}.function = {spec.name!r} failed on all {len(outcomes)} samples; first error: "
                f"{outcomes[0].error}"
            )

    def _result(self, item: RewardItem, outcomes: Sequence[ScoringOutcome]) -> RewardResult:
        pairs = list(zip(self._members, outcomes, strict=True))
        alone = next((each.score for member, each in pairs if member.is_eval and not each.error), None)
        if errors := [(member.name, each.error) for member, each in pairs if each.error]:
            error = "; ".join(f"{name}: {text}" if name else text for name, text in errors)
            return RewardResult(reward=0.0, failed=True, error=error, eval_score=alone)
        parts: dict[str, float] = {}
        for member, each in pairs:
            prefix = f"{member.name}/" if member.name else ""
            parts |= {member.name: each.score} if member.name else {}
            parts |= {f"{prefix}{name}": value for name, value in each.parts.items()}
        extra = self._shaping.parts(item)
        if both := sorted(extra.keys() & parts.keys()):
            problem = f"the function returned a part named {both[0]!r}, which is that of reward.{both[0]}*; rename it"
            return RewardResult(reward=0.0, failed=True, error=problem, eval_score=alone)
        parts |= extra
        score = sum(member.weight * each.score for member, each in pairs)
        reward = score + sum(extra.values())
        return RewardResult(reward=reward, parts={"score": score, **parts} if parts else {}, eval_score=alone)

    def close(self) -> None:
        """Stop the workers."""
        for member in self._members:
            member.pool.close()


def build_scorer(
    reward: RewardConfig, rollout: RolloutConfig, *, label_key: str | None, is_only_source: bool
) -> RewardScorer:
    """Build the scorer of ``[reward]``; no process starts before the first sample.

    Args:
        reward: functions, options and shaping.
        rollout: lengths and numbers that functions are told.
        label_key: ``data.label_key``.
        is_only_source: only the functions give rewards, no agent and no ``rollout.generate``.

    Raises:
        RewardError: a function cannot be loaded, its signature is not known, its options do not fit, or there are no
            labels for it.
    """
    shaping = Shaping(
        max_new_tokens=rollout.max_new_tokens,
        format=reward.format,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
    )
    facts = _facts(rollout, label_key)
    has_labels = label_key != "" or not is_only_source
    if reward.functions:
        members = [
            RewardPart(
                name,
                _pool(reward, facts, f"reward.functions.{name}", each, has_labels=has_labels),
                each.weight,
                each.eval,
            )
            for name, each in reward.functions.items()
        ]
        return RewardScorer.of_several(members, shaping)
    options = reward.options | ({"partial_credit": True} if reward.partial_credit else {})
    one = RewardFunctionConfig(function=reward.function, signature=reward.signature, options=options)
    return RewardScorer.of_several(
        [RewardPart("", _pool(reward, facts, "reward", one, has_labels=has_labels))], shaping
    )


def _pool(
    reward: RewardConfig, facts: RunFacts, table: str, one: RewardFunctionConfig, *, has_labels: bool
) -> FunctionPool:
    name = one.function
    if not has_labels and needs_label(name, one.options):
        raise RewardError(
            f"{table}.function = {name!r} compares answers with labels, but data.label_key = '' says that "
            "there are none; name the column of the labels, or a reward function of your own"
        )
    timeout = one.timeout_seconds or reward.timeout_seconds
    options = read_options(name, one.options) if name in BUILT_IN_REWARDS else None
    if isinstance(options, CodeOptions) and options.total_seconds + 2 > timeout:
        raise RewardError(
            f"{table}: options.total_seconds = {options.total_seconds:g} must stay 2 s below timeout_seconds = "
            f"{timeout:g}, or a slow program would count as failed (no gradient) instead of as wrong"
        )
    return FunctionPool(
        FunctionSpec(name, one.signature, facts, one.options, table),
        timeout,
        one.num_workers or reward.num_workers,
        async_concurrency=one.async_concurrency or reward.async_concurrency,
    )


def _facts(rollout: RolloutConfig, label_key: str | None) -> RunFacts:
    slime_args: dict[str, Any] = {
        "rollout_max_response_len": rollout.max_new_tokens,
        "rollout_temperature": rollout.temperature,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "reward_key": None,
    }
    return RunFacts(label_key=label_key or "label", slime_args=slime_args)
