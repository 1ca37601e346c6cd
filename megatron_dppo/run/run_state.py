"""Counters of a run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_dppo.run.guard_state import GuardState
from megatron_dppo.types import StepResult


@dataclass
class RunState:
    """Counters of a run, stored in a checkpoint beside the policy and the rollouts."""

    step: int = 0
    skipped_in_a_row: int = 0
    """Updates that were skipped since the last applied one, because their gradient was not finite."""
    best: tuple[float, int] | None = None
    """Best accuracy of an evaluation during training, and its step. None before the first one."""
    evaluation_due: bool = False
    """True if an evaluation ran beside training when the checkpoint was written. A resume repeats it."""
    guard: GuardState = field(default_factory=GuardState)

    def count_skipped(self, results: Sequence[StepResult]) -> None:
        """Count updates with a non-finite gradient in a row. Updates that lower the loss scale do not count."""
        for result in results:
            is_failure = result.skipped and not result.has_lower_scale
            self.skipped_in_a_row = self.skipped_in_a_row + 1 if is_failure else 0

    def is_new_best(self, accuracy: float | None) -> bool:
        """Record an evaluation's accuracy and return True if it is the best so far. None stands for no evaluation."""
        if accuracy is None or (self.best is not None and accuracy <= self.best[0]):
            return False
        self.best = (accuracy, self.step)
        return True

    def has_reached(self, accuracy: float | None) -> bool:
        """Return True if an evaluation has reached this accuracy. None is never reached."""
        return accuracy is not None and self.best is not None and self.best[0] >= accuracy
