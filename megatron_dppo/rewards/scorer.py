"""Scoring of completions by one or several functions. A reward that fails or hangs affects only its sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from megatron_dppo.config.reward import RewardConfig, RewardFunctionConfig
from megatron_dppo.config.reward_options import BUILT_IN_REWARDS, CodeOptions, needs_label, read_options
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import RewardError
from megatron_dppo.rewards.functions import FunctionSpec
from megatron_dppo.rewards.item import MAX_REWARD, RewardItem, RewardResult, Shaping
from megatron_dppo.rewards.pool import FunctionPool, score_concurrently
from megatron_dppo.rewards.scoring import ScoringOutcome
from megatron_dppo.rewards.signatures import RunInfo


@dataclass(frozen=True)
class WeightedFunction:
    """One of several reward functions."""

    name: str
    """Name of its score in the log. Empty for a single function."""
    pool: FunctionPool
    weight: float = 1.0
    is_eval: bool = False
    """True if an evaluation counts only its score."""
    sources: Sequence[str] = ()
    """Names of the sources whose rows it scores. Empty for all."""

    def scores(self, item: RewardItem) -> bool:
        """Return True if the function scores the item's source."""
        return not self.sources or item.source in self.sources


class RewardScorer:
    """Scores items in worker processes; answers that need no parser are scored in this process.

    Samples of an async function run concurrently, ``async_concurrency`` per worker. A batch function gets an equal
    share of the samples in each worker. A batch that raises, hangs, or returns anything but one value per sample is
    split in two and each half is retried, until the samples at fault are alone. The worker is killed at the time limit
    of one sample, or of one call of a batch function.

    Raises:
        RewardError: The function cannot be loaded, its signature is unknown, or its options are wrong.
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
        self._functions: Sequence[WeightedFunction] = [WeightedFunction("", pool)]
        self._shaping = shaping or Shaping()

    @classmethod
    def from_functions(cls, functions: Sequence[WeightedFunction], shaping: Shaping | None = None) -> Self:
        """Create a scorer with the weighted sum of several functions, whose processes run concurrently.

        The sum is over the functions that score the item's source.

        A result's parts are ``score`` (the sum without shaping), each function's score under its name, and its own
        parts as ``NAME/PART``.
        """
        scorer = cls.__new__(cls)
        scorer._functions = list(functions)
        scorer._shaping = shaping or Shaping()
        return scorer

    @property
    def description(self) -> str:
        """The functions by their names in the configuration, for messages."""
        names = [function.name for function in self._functions]
        if all(names):
            return f"[reward.functions] ({', '.join(names)})"
        return f"reward.function = {self._functions[0].pool.spec.name!r}"

    def score(self, items: Sequence[RewardItem], *, is_batch: bool = True) -> list[RewardResult]:
        """Return one result per item, in order.

        With ``is_batch`` the items are enough to detect a broken function: one that fails on all of several items
        raises RewardError.
        """
        function_items = [[item for item in items if function.scores(item)] for function in self._functions]
        outcomes = score_concurrently([function.pool for function in self._functions], function_items)
        for function, function_outcomes in zip(self._functions, outcomes, strict=True):
            if is_batch and len(function_outcomes) > 1:
                self._require_success(function, function_outcomes)
        in_order = [iter([each[index] for index in range(len(each))]) for each in outcomes]
        final = []
        for item in items:
            pairs = zip(self._functions, in_order, strict=True)
            final.append(
                self._result(item, [(function, next(scored)) for function, scored in pairs if function.scores(item)])
            )
        if is_batch and len(final) > 1 and all(result.failed for result in final):
            raise RewardError(
                f"the rewards of all {len(final)} samples failed, so the step has no signal; first error: "
                f"{final[0].error}. Fix the reward function, then run the same command to resume"
            )
        return final

    @staticmethod
    def _require_success(function: WeightedFunction, outcomes: dict[int, ScoringOutcome]) -> None:
        if all(outcome.error for outcome in outcomes.values()):
            spec = function.pool.spec
            raise RewardError(
                f"{spec.table}.function = {spec.name!r} failed on all {len(outcomes)} samples; first error: "
                f"{outcomes[0].error}. Fix the function, then run the same command to resume"
            )

    def _result(self, item: RewardItem, pairs: Sequence[tuple[WeightedFunction, ScoringOutcome]]) -> RewardResult:
        # The function marked eval counts even if another function failed on this sample.
        eval_score = next((each.score for function, each in pairs if function.is_eval and not each.error), None)
        if errors := [(function.name, each.error) for function, each in pairs if each.error]:
            error = "; ".join(f"{name}: {text}" if name else text for name, text in errors)
            is_wrong_type = any(each.is_wrong_type for _, each in pairs)
            return RewardResult(
                reward=0.0, failed=True, error=error, is_wrong_type=is_wrong_type, eval_score=eval_score
            )
        parts: dict[str, float] = {}
        for function, each in pairs:
            prefix = f"{function.name}/" if function.name else ""
            parts |= {function.name: each.score} if function.name else {}
            parts |= {f"{prefix}{name}": value for name, value in each.parts.items()}
        # Shaping is added once to the weighted sum, not to each function.
        extra = self._shaping.parts(item)
        if duplicates := sorted(extra.keys() & parts.keys()):
            name = duplicates[0]
            problem = f"the function returned a part {name!r}, a name that reward.{name}* uses; rename the part"
            return RewardResult(reward=0.0, failed=True, error=problem, eval_score=eval_score)
        parts |= extra
        score = sum(function.weight * each.score for function, each in pairs)
        reward = score + sum(extra.values())
        if abs(reward) > MAX_REWARD:
            problem = f"the weighted sum must be between {-MAX_REWARD:g} and {MAX_REWARD:g}, got {reward:g}"
            return RewardResult(reward=0.0, failed=True, error=problem, eval_score=eval_score)
        return RewardResult(reward=reward, parts={"score": score, **parts} if parts else {}, eval_score=eval_score)

    def close(self) -> None:
        """Stop the workers."""
        for function in self._functions:
            function.pool.close()


def build_scorer(
    reward: RewardConfig,
    rollout: RolloutConfig,
    *,
    label_key: str | None,
    is_only_source: bool,
    started_at: datetime,
) -> RewardScorer:
    """Build the scorer of ``[reward]``. With ``is_only_source`` no agent and no ``rollout.generate`` gives rewards."""
    shaping = Shaping(
        max_new_tokens=rollout.max_new_tokens,
        format=reward.format,
        overlong_buffer_tokens=reward.overlong_buffer_tokens,
        overlong_penalty=reward.overlong_penalty,
    )
    slime_args: dict[str, object] = {
        "rollout_max_response_len": rollout.max_new_tokens,
        "rollout_temperature": rollout.temperature,
        "n_samples_per_prompt": rollout.samples_per_prompt,
        "reward_key": None,
    }
    run_info = RunInfo(label_key=label_key or "label", slime_args=slime_args, started_at=started_at)
    # An agent or rollout.generate may give the rewards itself, so missing labels are no error then.
    has_labels = label_key != "" or not is_only_source
    tables = {f"reward.functions.{name}": (name, each) for name, each in reward.functions.items()}
    if not tables:
        options = reward.options | ({"partial_credit": True} if reward.partial_credit else {})
        one = RewardFunctionConfig(function=reward.function, signature=reward.signature, options=options)
        tables = {"reward": ("", one)}
    functions = [
        WeightedFunction(
            name,
            _pool(reward, run_info, table, each, has_labels=has_labels),
            each.weight,
            each.eval,
            each.sources,
        )
        for table, (name, each) in tables.items()
    ]
    return RewardScorer.from_functions(functions, shaping)


def _pool(
    reward: RewardConfig, run_info: RunInfo, table: str, one: RewardFunctionConfig, *, has_labels: bool
) -> FunctionPool:
    name = one.function
    if not has_labels and needs_label(name, one.options):
        raise RewardError(
            f"{table}.function = {name!r} compares answers with labels, but data.label_key = '' means that the data "
            "has none; set data.label_key to the column with the labels, or use another reward function"
        )
    timeout = one.timeout_seconds or reward.timeout_seconds
    options = read_options(name, one.options) if name in BUILT_IN_REWARDS else None
    if isinstance(options, CodeOptions) and options.total_seconds + 2 > timeout:
        raise RewardError(
            f"{table}: options.total_seconds = {options.total_seconds:g} must be at least 2 s below timeout_seconds = "
            f"{timeout:g}, otherwise a slow program counts as failed (no gradient) instead of wrong"
        )
    return FunctionPool(
        FunctionSpec(name, one.signature, run_info, one.options, table),
        timeout,
        one.num_workers or reward.num_workers,
        async_concurrency=one.async_concurrency or reward.async_concurrency,
    )
