"""Which prompts are under way, by which weights, and which groups are ready: the one owner of a run's rollouts.

Prompts come from one endless stream, addressed by one integer for the whole run. What changes that integer runs on all
ranks alike; everything else belongs to this rank. See docs/rollout.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import takewhile
from typing import TYPE_CHECKING

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import RewardError
from megatron_dppo.parallel.objects import from_each, from_leader, parts_from_leader
from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.batch import Ages, Collected, Needed, collected, has_signal
from megatron_dppo.rollout.engine import GroupState, RolloutEngine
from megatron_dppo.rollout.pending import Draw, GroupScoring, PromptSlot, Scored
from megatron_dppo.rollout.requests import Asking, Prompts, oversampled
from megatron_dppo.rollout.saved import SavedDraw, SavedStream
from megatron_dppo.rollout.store import Stored
from megatron_dppo.types import Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from megatron_dppo.parallel.groups import ParallelGroups


class Stream:
    """Draws prompts, has them sampled and scored, and hands each step its groups.

    Args:
        rollout: how prompts are drawn.
        params: see ``Asking``.
        prompts: of the run.
        groups: process groups of this rank.
        dp_rank: its data-parallel rank.
        dp: data-parallel size.
        engine: None on ranks that get their rollouts from the leader of their model-parallel group.
        scorer: of the rewards.
        num_steps: of the run; nothing is sampled for later ones.
        max_staleness: rollout steps that weights may be old.
        needed: what each rank of its replica needs of the rollouts.
        leads: see ``Asking``.
    """

    def __init__(
        self,
        *,
        rollout: RolloutConfig,
        params: SamplingParams,
        prompts: Prompts,
        groups: ParallelGroups,
        dp_rank: int,
        dp: int,
        engine: RolloutEngine | None,
        scorer: RewardScorer,
        num_steps: int,
        max_staleness: int,
        needed: Sequence[Needed] = (Needed(),),
        leads: bool = True,
    ) -> None:
        self._rollout, self._num_steps = rollout, num_steps
        self._prompts, self._groups = prompts, groups
        self._dp_rank, self._dp, self._engine = dp_rank, dp, engine
        self._needed = needed
        self._share = rollout.prompts_per_step // dp
        self._in_flight = rollout.engine != "local" and max_staleness > 0
        """whether requests go on when weights change"""
        self._one_by_one = self._in_flight and not rollout.abort_slowest
        """whether a step takes single groups, in place of all that were drawn for it"""
        self._by_completion = rollout.order == "completed"
        # A group that may be trained on one step after its turn is sampled for it one step less ahead.
        self._lookahead = max_staleness - 1 if self._by_completion else max_staleness
        self._ages = Ages(max_staleness + rollout.partial_rollouts)
        self._scorer = scorer
        self._scoring = GroupScoring(scorer)
        self._asking = Asking(
            rollout, params, prompts, engine, self._scoring, dp_rank, one_by_one=self._one_by_one, leads=leads
        )
        self.cursor = 0
        """prompts taken from the stream, by all ranks"""
        self._next = 0
        """the first step that nothing was drawn for"""
        self._waiting: list[list[PromptSlot]] = [[] for _ in range(dp)]
        """of each data-parallel rank, prompts that were taken and are to be drawn before others"""
        self._draws: list[Draw] = []
        """of this rank, in the order of the stream"""
        self._given_up = 0

    def collect(self, step: int, policy_version: int, clock: Clock) -> Collected:
        """This rank's scored groups of a step; afterwards the next ones are sampled in the background, if they may be.

        With dynamic sampling, groups whose rewards are all equal are replaced: by those of later steps, where these are
        under way one by one, and then by later prompts of the stream, sampled with the current weights, for at most
        ``max_refills`` rounds. A collective of all ranks.
        """
        rollout = self._rollout
        self._given_up = 0
        self._ages.begin_step(step, policy_version)
        self._draws = [self._asking.again(draw, self._share) for draw in self._draws]
        part = "prefetch_wait" if step < self._next else "rollout"
        if step >= self._next:
            with clock.part(part):  # an engine of all ranks samples at once
                self._draws += self._draw(step, step, [self._share] * self._dp, 0)
            self._next = step + 1
        if self._in_flight:  # servers that wait for the last responses of this step have room for more
            self._sample_ahead(step)
        if self._one_by_one:
            drawn = self._take_first(step, clock)
            self._require_rewards(drawn)
        else:
            due = [draw for draw in self._draws if draw.step == step]
            self._draws = [draw for draw in self._draws if draw.step > step]
            drawn = self._finish(due, clock, part)
        for attempt in range(1, rollout.max_refills + 1 if rollout.dynamic_sampling else 1):
            with clock.part("waiting"):  # for the slowest rank's rollouts
                lacking = from_each(max(0, self._share - sum(map(has_signal, drawn))), self._groups.dp)
            if not any(lacking):
                break
            drawn += self._finish(self._draw(step, step, lacking, attempt), clock, "rollout")
        self._sample_ahead(step)
        carried = len(self._waiting[self._dp_rank])
        return collected(drawn, self._share, self._ages, given_up=self._given_up, num_carried=carried)

    def ask(self, prompts: Sequence[Prompt], siblings: int, params: SamplingParams, step: int) -> Draw:
        """Groups of other prompts than those of the stream, as for an evaluation, by the current weights."""
        return self._asking.others(prompts, siblings, params, step)

    def answered(self, draw: Draw, clock: Clock) -> list[RolloutGroup]:
        """The groups that ``ask`` asked for; waits for them. A collective of each replica's ranks."""
        found = from_leader(lambda: draw.wait(clock, "rollout"), self._groups.replica)
        return [group for group in found if group is not None]

    def settle(self, clock: Clock) -> None:
        """Until the engine may get new weights: at once where it goes on with them, else when nothing is sampled.

        Raises:
            Exception: what failed in the background, as it was.
        """
        if self._in_flight:
            return
        for draw in self._draws:
            if draw.scored is not None:
                draw.wait(clock, "prefetch_wait")

    def saved(self) -> SavedStream:
        """Where this stream is; a collective of all ranks."""
        mine = [SavedDraw(draw.step, draw.sampled_at, list(draw.places)) for draw in self._draws]
        draws = from_each(mine, self._groups.dp)
        return SavedStream(self.cursor, self._next, self._ages.state(), [list(w) for w in self._waiting], draws)

    def contents(self) -> list[Stored]:
        """What was sampled of this rank's prompts and not trained on; what is under way goes on afterwards.

        Only on ranks with an engine.
        """
        assert self._engine is not None
        done = {id(draw) for draw in self._draws if draw.scored is not None and draw.scored.done()}
        unfinished = self._engine.unfinished()
        found: dict[int, RolloutGroup | GroupState | None] = {}
        for draw in self._draws:
            positions = [place.position for place in draw.places]
            if id(draw) not in done and all(position in unfinished for position in positions):
                found |= {position: unfinished[position] for position in positions}
                continue
            assert draw.scored is not None
            for position, group in zip(positions, draw.scored.result(), strict=True):
                found[position] = unfinished.get(position) if group is None else group
        found |= {p.position: unfinished.get(p.position) for p in self._waiting[self._dp_rank]}
        return [Stored(position, self._prompts[position], content) for position, content in found.items()]

    def restore(self, saved: SavedStream, contents: Mapping[int, Stored]) -> None:
        """Go on from a checkpoint, before the first step.

        Args:
            saved: for as many data-parallel ranks as there are.
            contents: by position; empty on ranks without an engine.
        """
        self.cursor, self._next = saved.cursor, saved.next
        self._waiting = [list(places) for places in saved.waiting]
        self._ages.restore(saved.ages)
        self._draws = [_restored(draw, contents) for draw in saved.draws[self._dp_rank]]
        if self._engine is not None:
            asked_again = [place for draw in self._draws if draw.scored is None for place in draw.places]
            positions = [place.position for place in (*asked_again, *self._waiting[self._dp_rank])]
            states = {position: _state(contents[position]) for position in positions if position in contents}
            self._engine.restore({position: state for position, state in states.items() if state is not None})

    def close(self) -> None:
        """Drop all results. The engine is to be closed before."""
        self._scoring.close()

    def _sample_ahead(self, step: int) -> None:
        """Ask for what may be sampled with the current weights. Prompts and seeds are fixed here and now."""
        last = min(step + self._lookahead, self._num_steps - 1)
        for later in range(self._next, last + 1):
            self._draws += self._draw(later, step, [self._share] * self._dp, 0)
            self._next = later + 1

    def _draw(self, step: int, sampled_at: int, enough: Sequence[int], attempt: int) -> list[Draw]:
        """Ask for groups: of each rank what it needs, times the oversampling; first of prompts that wait."""
        places = self._take_places(step, [oversampled(n, self._rollout.oversample) for n in enough])
        return self._asking.draws(step, sampled_at, places, enough[self._dp_rank], attempt)

    def _take_places(self, step: int, counts: Sequence[int]) -> list[PromptSlot]:
        mine: list[PromptSlot] = []
        for rank, count in enumerate(counts):
            waiting = self._waiting[rank]
            taken, self._waiting[rank] = waiting[:count], waiting[count:]
            fresh = count - len(taken)
            if rank == self._dp_rank:
                mine = [*taken, *(PromptSlot(self.cursor + i, step) for i in range(fresh))]
            self.cursor += fresh
        return mine

    def _finish(self, draws: Sequence[Draw], clock: Clock, part: str) -> list[RolloutGroup]:
        """The groups of draws, in order; what was stopped waits for its next turn, or is given up."""
        replica = self._groups.replica
        found = parts_from_leader(
            lambda: [group for draw in draws for group in draw.wait(clock, part)],
            replica,
            self._needed,
            lambda groups, needed: needed.of(groups),
        )
        if self._rollout.abort_slowest:
            asked = [(draw.step, place) for draw in draws for place in draw.places]
            stopped = [asked for asked, group in zip(asked, found, strict=True) if group is None]
            left = [place for step, place in stopped if self._asking.kept(step, [place])]
            self._given_up += len(stopped) - len(left)
            self._waiting = [
                [*new, *old] for new, old in zip(from_each(left, self._groups.dp), self._waiting, strict=True)
            ]
        return [group for group in found if group is not None]

    def _take_first(self, step: int, clock: Clock) -> list[RolloutGroup]:
        """The groups that are due, and then as many others as the step lacks; new ones are asked for in their place.

        Due are those of this step; with the order ``completed`` those of the step before, which are left. The others
        come in the order of the stream, or of completion. So each is trained on in its step, or one later.
        """
        positions = from_leader(lambda: self._first(step, clock), self._groups.replica)
        of = {draw.places[0].position: draw for draw in self._draws}
        taken = [of.pop(position) for position in positions]
        self._draws = list(of.values())
        drawn = self._finish(taken, clock, "prefetch_wait")
        usual = oversampled(self._share, self._rollout.oversample)
        with clock.part("waiting"):
            more = from_each(max(0, len(taken) - usual), self._groups.dp)
        if self._next > step + 1:
            places = self._take_places(self._next - 1, more)
            self._draws += self._asking.draws(self._next - 1, step, places, len(places))
        return drawn

    def _first(self, step: int, clock: Clock) -> list[int]:
        """Positions of the groups that a step takes; waits for them, on the rank whose engine samples."""
        due = [draw for draw in self._draws if draw.step + self._by_completion <= step]
        others = [draw for draw in self._draws if draw.step + self._by_completion > step]
        with clock.part("prefetch_wait"):
            wait([draw.scored for draw in due if draw.scored is not None])
            while True:
                ready = self._scoring.finished(others)
                if not self._by_completion:
                    ready = list(takewhile(set(ready).__contains__, others))
                taken, good = list(due), sum(map(self._counts, due))
                for draw in ready:
                    if good >= self._share:
                        break
                    taken.append(draw)
                    good += self._counts(draw)
                pending = [draw.scored for draw in others if draw.scored is not None and draw not in ready]
                if good >= self._share or not pending:
                    return [draw.places[0].position for draw in taken]
                wait(pending if self._by_completion else pending[:1], return_when=FIRST_COMPLETED)

    def _require_rewards(self, groups: Sequence[RolloutGroup]) -> None:
        """What the scorer checks where it gets all groups of a step at once."""
        failed = [rollout.reward_failed for group in groups for rollout in group.rollouts]
        if failed and all(failed):
            raise RewardError(f"{self._scorer.described} failed on all {len(failed)} samples of a step")

    def _counts(self, draw: Draw) -> bool:
        """Whether the group of a draw is one of those that a step needs."""
        assert draw.scored is not None
        (group,) = draw.scored.result()
        return group is not None and (not self._rollout.dynamic_sampling or has_signal(group))


def _restored(draw: SavedDraw, contents: Mapping[int, Stored]) -> Draw:
    """A draw of a checkpoint: with its groups, where it was complete, else to be asked for again."""
    stored = [contents.get(place.position) for place in draw.places]
    groups = [each.content for each in stored if each is not None and isinstance(each.content, RolloutGroup)]
    if not groups or len(groups) < len(stored):
        return Draw(draw.step, draw.sampled_at, draw.places)
    scored: Scored = Future()
    scored.set_result(list(groups))
    return Draw(draw.step, draw.sampled_at, draw.places, (), scored)


def _state(stored: Stored) -> GroupState | None:
    """The responses of a group that is not to be trained on as it is."""
    if isinstance(stored.content, RolloutGroup):
        return tuple(rollout.completion for rollout in stored.content.rollouts)
    return stored.content
