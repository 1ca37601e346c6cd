"""A stream in a checkpoint: what was sampled and not trained on, to the token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from megatron_dppo.config.data import DataConfig
from megatron_dppo.config.reward import RewardConfig
from megatron_dppo.config.rollout import AgentConfig, RolloutConfig
from megatron_dppo.config.section import Section
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.rollout.pending import PromptSlot
from megatron_dppo.rollout.store import Stored, load_groups, save_groups
from megatron_dppo.types import Prompt


@dataclass(frozen=True)
class SavedDraw:
    """Groups that were asked for together, by one data-parallel rank."""

    step: int
    sampled_at: int
    places: list[PromptSlot]


@dataclass(frozen=True)
class SavedStream:
    """What ``state.json`` says of a stream; the groups themselves are in a file of each data-parallel rank."""

    cursor: int
    next: int
    """the first step that nothing was drawn for"""
    ages: dict[str, int]
    waiting: list[list[PromptSlot]]
    """of each data-parallel rank"""
    draws: list[list[SavedDraw]]
    """of each data-parallel rank, in order"""
    dp: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dp", len(self.waiting))

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "cursor": self.cursor,
            "next": self.next,
            "ages": self.ages,
            "waiting": [[list(place) for place in of_rank] for of_rank in self.waiting],
            "draws": [
                [
                    {"step": d.step, "sampled_at": d.sampled_at, "places": [list(place) for place in d.places]}
                    for d in of_rank
                ]
                for of_rank in self.draws
            ],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SavedStream:
        """The inverse of ``plain``."""
        return cls(
            cursor=plain["cursor"],
            next=plain["next"],
            ages=plain["ages"],
            waiting=[[PromptSlot(*place) for place in of_rank] for of_rank in plain["waiting"]],
            draws=[
                [SavedDraw(d["step"], d["sampled_at"], [PromptSlot(*place) for place in d["places"]]) for d in of_rank]
                for of_rank in plain["draws"]
            ],
        )

    @property
    def num_prompts(self) -> int:
        """Prompts that were taken and not trained on."""
        drawn = sum(len(draw.places) for draws in self.draws for draw in draws)
        return drawn + sum(map(len, self.waiting))

    def on(self, dp: int) -> SavedStream:
        """The same for another number of data-parallel ranks: no prompt is lost."""
        if dp == self.dp:
            return self
        waiting = sorted(place for of_rank in self.waiting for place in of_rank)
        draws: list[list[SavedDraw]] = [[] for _ in range(dp)]
        every = sorted((d for of_rank in self.draws for d in of_rank), key=lambda d: (d.step, d.sampled_at))
        for (step, sampled_at), alike in groupby(every, key=lambda d: (d.step, d.sampled_at)):
            some = list(alike)
            places = sorted(place for draw in some for place in draw.places)
            single = max(len(draw.places) for draw in some) == 1
            for rank, mine in enumerate(_shares(places, dp)):
                parts = [[place] for place in mine] if single else [mine]
                draws[rank] += [SavedDraw(step, sampled_at, part) for part in parts if part]
        return SavedStream(self.cursor, self.next, self.ages, [waiting[rank::dp] for rank in range(dp)], draws)

    def without_draws(self, step: int) -> SavedStream:
        """All prompts that were drawn wait again, to be sampled anew from ``step`` on."""
        waiting = [
            sorted([*(place for draw in draws for place in draw.places), *waits])
            for draws, waits in zip(self.draws, self.waiting, strict=True)
        ]
        return SavedStream(self.cursor, step, self.ages, waiting, [[] for _ in self.draws])

    def from_the_first(self, step: int) -> SavedStream:
        """Another stream, of which nothing was drawn yet: the first prompts are for ``step``."""
        return SavedStream(0, step, self.ages, [[] for _ in self.waiting], [[] for _ in self.draws])


def why_unusable(
    saved: SavedStream,
    was: Mapping[str, Any],
    train: TrainConfig,
    *,
    data: DataConfig,
    rollout: RolloutConfig,
    agent: AgentConfig,
    reward: RewardConfig,
) -> str:
    """Why the groups of a checkpoint cannot be trained on by this run; empty when they can.

    Args:
        saved: the stream.
        was: the configuration of the run that wrote it, as JSON.
        train: staleness and routes of this run.
        data: this run's, which has to be the same; so have the others.
        rollout: this run's.
        agent: this run's.
        reward: this run's.
    """
    if any(d.step - d.sampled_at > train.max_staleness for of_rank in saved.draws for d in of_rank):
        return f"they are older than train.max_staleness = {train.max_staleness} allows"
    if train.needs_engine_routing and was["train"].get("router_replay") not in ("rollout", "compare"):
        return "they were sampled without the experts that train.router_replay needs"
    weights = train.router_replay_weights
    if train.needs_engine_routing and was["train"].get("router_replay_weights", False) != weights:
        words = "without the weights that it needs" if weights else "with weights that it does not use"
        return f"train.router_replay_weights has changed: they were sampled {words}"
    now: dict[str, Section] = {"data": data, "rollout": rollout, "agent": agent, "reward": reward}
    before = {"agent": AgentConfig().model_dump(mode="json"), **was}
    changed = [name for name, section in now.items() if before[name] != section.model_dump(mode="json")]
    return f"the section [{changed[0]}] has changed" if changed else ""


def save_contents(groups: Sequence[Stored], dp_rank: int, checkpoint: Path) -> None:
    """Write what was sampled of this data-parallel rank's prompts into a checkpoint's folder, if anything was."""
    if groups:
        save_groups(_file(checkpoint, dp_rank), groups)


def load_contents(
    saved: SavedStream, dp: int, dp_rank: int, checkpoint: Path, prompt_at: Callable[[int], Prompt]
) -> dict[int, Stored]:
    """What was sampled of the prompts of a rank of now, by position.

    Raises:
        CheckpointError: a file is missing or damaged, or the data set is another one.
    """
    before = [dp_rank] if dp == saved.dp else range(saved.dp)
    found: dict[int, Stored] = {}
    for rank in before:
        # A rank without groups has written none.
        if saved.draws[rank] or (saved.waiting[rank] and _file(checkpoint, rank).exists()):
            found |= {stored.position: stored for stored in load_groups(_file(checkpoint, rank), prompt_at)}
    return found


def _file(checkpoint: Path, dp_rank: int) -> Path:
    return checkpoint / f"rollouts_{dp_rank:05d}.safetensors"


def _shares(places: list[PromptSlot], dp: int) -> list[list[PromptSlot]]:
    """Consecutive parts whose sizes differ by one at most."""
    edges = [len(places) * rank // dp for rank in range(dp + 1)]
    return [places[start:end] for start, end in pairwise(edges)]
