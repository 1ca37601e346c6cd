"""End of a step: whether it is saved, and why the run stops after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.run import RunConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.process.stop_signal import Stopped, StopSignal
from megatron_dppo.process.time_limit import TimeLimit
from megatron_dppo.report.clock import PROGRESS
from megatron_dppo.run.checkpoints import Checkpoints
from megatron_dppo.run.run_state import RunState
from megatron_dppo.setup.failed_functions import AGENT_KEYS, REWARD_KEYS, FunctionsFailed


@dataclass(frozen=True)
class SavePlan:
    """Decision about a step that is done and logged."""

    is_due: bool
    """True if the step ends with a checkpoint: by its number, as the best one, or as the last one."""
    is_due_by_time: bool
    """True if a checkpoint is due by time, which may be written in the background, or be skipped without space."""
    reason_to_stop: TrainingStopped | Stopped | None
    """Raised after the save. None to go on."""

    @classmethod
    def decide(
        cls,
        config: Config,
        state: RunState,
        metrics: Mapping[str, float],
        checkpoints: Checkpoints,
        limit: TimeLimit,
        stop: StopSignal,
    ) -> SavePlan:
        """Decide for the step that ``state`` counts, and note its accuracy there; a collective of all ranks."""
        if state.step < config.run.num_steps and limit.leaves_no_step(
            save_seconds=checkpoints.save_seconds,
            evaluates_next=config.eval.is_due(state.step + 1, config.run.num_steps),
        ):
            stop.request_by_time_limit()
        # A collective: all ranks agree on whether to stop after this step.
        is_stopping = stop.requested()
        reason: TrainingStopped | Stopped | None = None
        if state.skipped_in_a_row >= config.train.max_skipped_updates:
            reason = _stuck_error(state.skipped_in_a_row, config.run, config.train)
        elif failures := failures_error(state.step, metrics, config.rollout, config.agent, config.reward):
            reason = failures
        elif is_stopping:
            text = f"by {stop.name} after step {state.step}. Rerun the same command to resume"
            reason = Stopped(text, exit_code=stop.exit_code)
        is_best = state.is_new_best(metrics.get("eval/accuracy")) and config.checkpoint.keep_best
        return cls(
            is_due=is_best or reason is not None or checkpoints.is_due(state),
            is_due_by_time=checkpoints.is_due_by_time(),
            reason_to_stop=reason,
        )

    def carry_out(self, checkpoints: Checkpoints, state: RunState) -> None:
        """Write the checkpoint that is due, report the previous one if it is complete, and raise the reason to stop."""
        if self.is_due or self.is_due_by_time:
            with PROGRESS.part("save"), checkpoints.timer.measure(by_time=not self.is_due):
                checkpoints.collector.free_gpus()
                if self.is_due:
                    checkpoints.save(state)
                else:
                    checkpoints.save_by_time(state)
        checkpoints.finish(wait=self.reason_to_stop is not None)
        if self.reason_to_stop is not None:
            raise self.reason_to_stop


def failures_error(
    step: int, metrics: Mapping[str, float], rollout: RolloutConfig, agent: AgentConfig, reward: RewardConfig
) -> TrainingStopped | None:
    """Return the error of a step in which too many rewards or agents failed, and more than one; None otherwise."""
    agents = metrics.get("rollout/agent/failed_fraction", 0.0)
    # The rewards of failed episodes count as failed, too.
    rewards = metrics["rollout/reward_failed_fraction"] - agents
    num_rollouts = rollout.prompts_per_step * rollout.samples_per_prompt

    def is_too_much(fraction: float, limit: float) -> bool:
        return fraction > limit and fraction * num_rollouts > 1.5

    if is_too_much(rewards, reward.max_failed_fraction):
        return FunctionsFailed(
            f"{rewards:.0%} of the rewards of step {step} failed, more than reward.max_failed_fraction = "
            f"{reward.max_failed_fraction:g}. The weights were saved. A warning above shows the first error. "
            "Fix the reward and rerun the same command to resume, or raise the limit",
            REWARD_KEYS,
        )
    if is_too_much(agents, agent.max_failed_fraction):
        return FunctionsFailed(
            f"{agents:.0%} of the agent's episodes of step {step} failed, more than agent.max_failed_fraction = "
            f"{agent.max_failed_fraction:g}. The weights were saved. The line of the step shows the first "
            "error. Fix the agent and rerun the same command to resume, or raise the limit",
            AGENT_KEYS,
        )
    return None


def _stuck_error(skipped: int, run: RunConfig, train: TrainConfig) -> TrainingStopped:
    """Return the error of a run whose updates are all skipped."""
    metrics = Path(run.output_dir) / "metrics.jsonl"
    return TrainingStopped(
        f"the gradient was not finite in {skipped} updates in a row (train.max_skipped_updates = "
        f"{train.max_skipped_updates}). None of them was applied, and the weights were saved. Check "
        f"train/ratio_max, train/prob_rise_max and train/grad_norm in {metrics}. Usual causes: rollout "
        "log-probabilities that do not fit the weights, a learning rate that is too high (to resume with a lower one: "
        "--optimizer.lr VALUE --allow-changed optimizer.lr), or overflow"
    )
