"""State of the rollout scheduler in a checkpoint: every rollout that was sampled and not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path

from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.config.section import Section
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.rollout.pending import PromptSlot
from megatron_dppo.rollout.store import StoredRollouts, load_groups, save_groups
from megatron_dppo.types import Prompt
from megatron_dppo.types.stored_record import StoredRecord


@dataclass(frozen=True)
class SavedSubmission:
    """Groups that one data-parallel rank submitted together."""

    step: int
    sampled_at: int
    slots: list[PromptSlot]


@dataclass(frozen=True)
class SchedulerState:
    """Scheduler state in ``state.json``; the rollouts are in one file per data-parallel rank."""

    cursor: int
    next_step: int
    """First step that nothing was submitted for."""
    ages: dict[str, int]
    waiting: list[list[PromptSlot]]
    """Prompts of each data-parallel rank that were taken and are submitted before new ones."""
    submissions: list[list[SavedSubmission]]
    """Pending submissions of each data-parallel rank, in order."""
    dp: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp", len(self.waiting))

    # The JSON keys are part of the checkpoint format and keep their names.

    def to_json(self) -> dict[str, object]:
        """Return the state as JSON values."""
        return {
            "cursor": self.cursor,
            "next": self.next_step,
            "ages": self.ages,
            "waiting": [[list(slot) for slot in slots] for slots in self.waiting],
            "draws": [
                [
                    {"step": each.step, "sampled_at": each.sampled_at, "places": [list(slot) for slot in each.slots]}
                    for each in submissions
                ]
                for submissions in self.submissions
            ],
        }

    @classmethod
    def from_json(cls, values: StoredRecord) -> SchedulerState:
        """Return the state that ``to_json`` wrote."""
        return cls(
            cursor=values["cursor"],
            next_step=values["next"],
            ages=values["ages"],
            waiting=[[PromptSlot(*slot) for slot in slots] for slots in values["waiting"]],
            submissions=[
                [
                    SavedSubmission(each["step"], each["sampled_at"], [PromptSlot(*slot) for slot in each["places"]])
                    for each in submissions
                ]
                for submissions in values["draws"]
            ],
        )

    @property
    def num_prompts(self) -> int:
        """Number of prompts that were taken and not trained on."""
        num_submitted = sum(len(each.slots) for submissions in self.submissions for each in submissions)
        return num_submitted + sum(map(len, self.waiting))

    def with_data_parallel_size(self, dp: int) -> SchedulerState:
        """Return the state for another data-parallel size, with every prompt."""
        if dp == self.dp:
            return self
        waiting = sorted(slot for slots in self.waiting for slot in slots)
        resharded: list[list[SavedSubmission]] = [[] for _ in range(dp)]
        ordered = sorted(
            (each for submissions in self.submissions for each in submissions),
            key=lambda each: (each.step, each.sampled_at),
        )
        # All ranks submit alike, so the submissions of one step and version are one set of prompts to split again.
        for (step, sampled_at), alike in groupby(ordered, key=lambda each: (each.step, each.sampled_at)):
            merged = list(alike)
            slots = sorted(slot for each in merged for slot in each.slots)
            # Submissions of single groups stay single, because a step takes them one by one.
            one_by_one = max(len(each.slots) for each in merged) == 1
            for rank, share in enumerate(_split_evenly(slots, dp)):
                parts = [[slot] for slot in share] if one_by_one else [share]
                resharded[rank] += [SavedSubmission(step, sampled_at, part) for part in parts if part]
        return SchedulerState(
            self.cursor, self.next_step, self.ages, [waiting[rank::dp] for rank in range(dp)], resharded
        )

    def without_submissions(self, step: int) -> SchedulerState:
        """Return the state in which all submitted prompts wait, to be sampled anew from ``step`` on."""
        waiting = [
            sorted([*(slot for each in submissions for slot in each.slots), *slots])
            for submissions, slots in zip(self.submissions, self.waiting, strict=True)
        ]
        return SchedulerState(self.cursor, step, self.ages, waiting, [[] for _ in self.submissions])

    def restarted(self, step: int) -> SchedulerState:
        """Return the state at the start of another prompt stream, whose first prompts are for ``step``."""
        return SchedulerState(0, step, self.ages, [[] for _ in self.waiting], [[] for _ in self.submissions])


def describe_incompatibility(
    state: SchedulerState,
    saved_config: StoredRecord,
    train: TrainConfig,
    sections: Mapping[str, Section],
) -> str:
    """Return why this run, with these ``sections``, cannot train on the groups of a checkpoint; empty if it can."""
    submissions = [each for submissions in state.submissions for each in submissions]
    if any(each.step - each.sampled_at > train.max_staleness for each in submissions):
        return f"they are older than train.max_staleness = {train.max_staleness} allows"
    saved_train = saved_config["train"]
    if train.needs_engine_routing and saved_train.get("router_replay") not in ("rollout", "compare"):
        return "they were sampled without the experts that train.router_replay needs"
    weights = train.router_replay_weights
    if train.needs_engine_routing and saved_train.get("router_replay_weights", False) != weights:
        words = "without the weights that it needs" if weights else "with weights that it does not use"
        return f"train.router_replay_weights has changed: they were sampled {words}"
    # Checkpoints from before [agent] existed lack the section.
    saved = {"agent": AgentConfig().model_dump(mode="json"), **saved_config}
    changed = [name for name, section in sections.items() if saved[name] != section.model_dump(mode="json")]
    return f"the section [{changed[0]}] has changed" if changed else ""


def save_rollouts(groups: Sequence[StoredRollouts], dp_rank: int, checkpoint: Path) -> None:
    """Write the rollouts of this data-parallel rank into a checkpoint's folder; nothing if there are none."""
    if groups:
        save_groups(_rollouts_file(checkpoint, dp_rank), groups)


def load_rollouts(
    state: SchedulerState, dp: int, dp_rank: int, checkpoint: Path, prompt_at: Callable[[int], Prompt]
) -> dict[int, StoredRollouts]:
    """Return the stored rollouts by position: of ``dp_rank``, or of all ranks if the data-parallel size differs."""
    saved_ranks = [dp_rank] if dp == state.dp else range(state.dp)
    rollouts: dict[int, StoredRollouts] = {}
    for rank in saved_ranks:
        file = _rollouts_file(checkpoint, rank)
        # A rank without groups has written no file. Waiting prompts may have no rollouts; submitted ones always do.
        if state.submissions[rank] or (state.waiting[rank] and file.exists()):
            rollouts |= {stored.position: stored for stored in load_groups(file, prompt_at)}
    return rollouts


def _rollouts_file(checkpoint: Path, dp_rank: int) -> Path:
    return checkpoint / f"rollouts_{dp_rank:05d}.safetensors"


def _split_evenly(slots: list[PromptSlot], dp: int) -> list[list[PromptSlot]]:
    """Split into consecutive parts whose sizes differ by at most one."""
    edges = [len(slots) * rank // dp for rank in range(dp + 1)]
    return [slots[start:end] for start, end in pairwise(edges)]
