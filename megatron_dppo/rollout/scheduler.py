"""Scheduler of a run's rollouts: prompts in flight, their weight versions, and the groups that are ready.

Prompts come from one endless stream, and one integer for the whole run is the position in it. Code that changes this
integer runs on all ranks alike; everything else belongs to one rank. See docs/rollout.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.errors import RewardError
from megatron_dppo.parallel.objects import all_gather_objects, broadcast_object, scatter_object
from megatron_dppo.report.clock import Clock
from megatron_dppo.rewards.scorer import RewardScorer
from megatron_dppo.rollout.batch import (
    CollectedRollouts,
    PolicyAges,
    RankColumns,
    has_signal,
    select_rollouts,
    with_greedy,
)
from megatron_dppo.rollout.engine import GroupState, RolloutEngine
from megatron_dppo.rollout.pending import GroupScoring, PromptSlot, ScoredFuture, Submission
from megatron_dppo.rollout.request_scheduler import Prompts, RequestScheduler, oversampled
from megatron_dppo.rollout.saved import SavedSubmission, SchedulerState
from megatron_dppo.rollout.store import StoredRollouts
from megatron_dppo.types import Prompt, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from megatron_dppo.parallel.groups import ParallelGroups


class RolloutScheduler:
    """Submits prompts, has them sampled and scored, and returns the groups of each step.

    Ranks that receive their rollouts from the leader of their model-parallel group have no engine. Nothing is sampled
    for steps from ``num_steps`` on. ``greedy`` samples one more response for each group that a step takes.
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
        rank_columns: Sequence[RankColumns] = (RankColumns(),),
        leads: bool = True,
        reward_parts: Sequence[str] = (),
        greedy: SamplingParams | None = None,
    ) -> None:
        self._rollout = rollout
        self._reward_parts = reward_parts
        self._greedy = greedy
        self._num_steps = num_steps
        self._prompts = prompts
        self._groups = groups
        self._dp_rank = dp_rank
        self._dp = dp
        self._engine = engine
        self._rank_columns = rank_columns
        self._share = rollout.prompts_per_step // dp
        """Groups that a step needs on this rank."""
        self._survives_updates = rollout.engine != "local" and max_staleness > 0
        """True if requests continue when the weights change."""
        self._one_by_one = self._survives_updates and not rollout.abort_slowest
        """True if a step takes single groups instead of all groups that were submitted for it."""
        self._by_completion = rollout.order == "completed"
        # A group that may be trained on one step after its turn is sampled one step less ahead.
        self._lookahead = max_staleness - 1 if self._by_completion else max_staleness
        self._ages = PolicyAges(max_staleness + rollout.partial_rollouts)
        self._scorer = scorer
        self._scoring = GroupScoring(scorer)
        self._requests = RequestScheduler(
            rollout, params, prompts, engine, self._scoring, dp_rank, one_by_one=self._one_by_one, leads=leads
        )
        self.cursor = 0
        """Number of prompts that all ranks together have taken from the stream."""
        self._next_step = 0
        """First step that nothing was submitted for."""
        self._waiting: list[list[PromptSlot]] = [[] for _ in range(dp)]
        """Prompts of each data-parallel rank that were taken and are submitted before new ones."""
        self._submissions: list[Submission] = []
        """Pending submissions of this rank, in the order of the stream."""
        self._num_canceled = 0

    def collect(self, step: int, policy_version: int, clock: Clock) -> CollectedRollouts:
        """Return this rank's scored groups of a step and submit the next ones. A collective of all ranks.

        With dynamic sampling, groups whose rewards are all equal are replaced: first by groups of later steps, where
        these are submitted one by one. Then later prompts of the stream are sampled with the current weights, for at
        most ``max_refills`` rounds.

        The greedy responses of ReMax are sampled with the current weights, for the groups that the step trains on.
        """
        rollout = self._rollout
        self._num_canceled = 0
        self._ages.begin_step(step, policy_version)
        # Only after a resume is there something to submit again: what the checkpoint found in flight.
        self._submissions = [self._requests.resubmit(each, self._share) for each in self._submissions]

        # Submit this step, unless it was submitted ahead.
        part = "prefetch_wait" if step < self._next_step else "rollout"
        if step >= self._next_step:
            with clock.part(part):  # a collective engine samples within this call
                self._submissions += self._submit(step, step, [self._share] * self._dp, 0)
            self._next_step = step + 1
        if self._survives_updates:  # servers that finish the last responses of this step have room for more
            self._submit_ahead(step)

        # Wait for the groups of this step.
        if self._one_by_one:
            sampled = self._take_single_groups(step, clock)
        else:
            due = [each for each in self._submissions if each.step == step]
            self._submissions = [each for each in self._submissions if each.step > step]
            sampled = self._finish(due, clock, part)
        self._require_rewards(sampled)

        # Refill: replace groups without signal by new prompts.
        for attempt in range(1, rollout.max_refills + 1 if rollout.dynamic_sampling else 1):
            with clock.part("waiting"):  # for the rollouts of the slowest rank
                # All ranks need all counts, because the cursor moves by the prompts of every rank.
                usable = sum(has_signal(group, self._reward_parts) for group in sampled)
                missing = all_gather_objects(max(0, self._share - usable), self._groups.dp)
            if not any(missing):
                break
            sampled += self._finish(self._submit(step, step, missing, attempt), clock, "rollout")
        collected = select_rollouts(
            sampled, self._share, self._ages, canceled=self._num_canceled, parts=self._reward_parts
        )
        prompts = [group.prompt for group in collected.groups]
        greedy = None if self._greedy is None else self.submit(prompts, 1, self._greedy, step)
        # Requests that do not survive an update are sampled ahead only now, after everything that this step needs. They
        # begin with the carried groups, which wait no longer then.
        num_carried = len(self._waiting[self._dp_rank])
        self._submit_ahead(step)
        if greedy is not None:
            collected = with_greedy(collected, self.wait_for(greedy, clock))
        return replace(collected, num_carried=num_carried)

    def submit(self, prompts: Sequence[Prompt], siblings: int, params: SamplingParams, step: int) -> Submission:
        """Submit prompts outside the stream, such as those of an evaluation, to the current weights."""
        return self._requests.submit_prompts(prompts, siblings, params, step)

    def wait_for(self, submission: Submission, clock: Clock) -> list[RolloutGroup]:
        """Wait for the groups of ``submit`` and return them. A collective of each replica's ranks."""
        groups = broadcast_object(lambda: submission.wait(clock, "rollout"), self._groups.replica)
        return [group for group in groups if group is not None]

    def wait_before_update(self, clock: Clock) -> None:
        """Wait until nothing is in flight and the engine may get new weights; not at all if requests survive that."""
        if self._survives_updates:
            return
        for submission in self._submissions:
            if submission.scored is not None:
                submission.wait(clock, "prefetch_wait")

    def state(self) -> SchedulerState:
        """Return the position in the stream and the pending submissions. A collective of all ranks."""
        local = [SavedSubmission(each.step, each.sampled_at, list(each.slots)) for each in self._submissions]
        submissions = all_gather_objects(local, self._groups.dp)
        waiting = [list(slots) for slots in self._waiting]
        return SchedulerState(self.cursor, self._next_step, self._ages.state(), waiting, submissions)

    def stored_rollouts(self) -> list[StoredRollouts]:
        """Return everything that was sampled for this rank's prompts and not trained on.

        Requests in flight continue afterwards. Call it only on ranks with an engine.
        """
        assert self._engine is not None
        # A group that completes between these two calls is not in ``unfinished``; its score is awaited below.
        done = {id(each) for each in self._submissions if each.scored is not None and each.scored.done()}
        unfinished = self._engine.unfinished()
        contents: dict[int, RolloutGroup | GroupState | None] = {}
        for submission in self._submissions:
            positions = [slot.position for slot in submission.slots]
            if id(submission) not in done and all(position in unfinished for position in positions):
                contents |= {position: unfinished[position] for position in positions}
                continue
            assert submission.scored is not None
            for position, group in zip(positions, submission.scored.result(), strict=True):
                # None: the group was canceled. Its tokens are held if it is carried to a later step.
                contents[position] = unfinished.get(position) if group is None else group
        contents |= {slot.position: unfinished.get(slot.position) for slot in self._waiting[self._dp_rank]}
        return [StoredRollouts(position, self._prompts[position], content) for position, content in contents.items()]

    def restore(self, state: SchedulerState, contents: Mapping[int, StoredRollouts]) -> None:
        """Continue from a checkpoint, before the first step."""
        self.cursor = state.cursor
        self._next_step = state.next_step
        self._waiting = [list(slots) for slots in state.waiting]
        self._ages.restore(state.ages)
        self._submissions = [_restored(saved, contents) for saved in state.submissions[self._dp_rank]]
        if self._engine is not None:
            # ``collect`` submits these again, and the engine continues their tokens. Scored submissions need no
            # engine.
            resubmitted = [slot for each in self._submissions if each.scored is None for slot in each.slots]
            positions = [slot.position for slot in (*resubmitted, *self._waiting[self._dp_rank])]
            states = {position: _group_state(contents[position]) for position in positions if position in contents}
            self._engine.restore({position: held for position, held in states.items() if held is not None})

    def close(self) -> None:
        """Drop all results. Close the engine first."""
        self._scoring.close()

    def _submit_ahead(self, step: int) -> None:
        """Submit every later step that may be sampled with the current weights; this fixes its prompts and seeds."""
        last = min(step + self._lookahead, self._num_steps - 1)
        for later in range(self._next_step, last + 1):
            self._submissions += self._submit(later, step, [self._share] * self._dp, 0)
            self._next_step = later + 1

    def _submit(self, step: int, sampled_at: int, enough: Sequence[int], attempt: int) -> list[Submission]:
        """Submit ``enough`` groups of each rank times the oversampling; waiting prompts go first."""
        slots = self._take_slots(step, [oversampled(count, self._rollout.oversample) for count in enough])
        return self._requests.submit(step, sampled_at, slots, enough[self._dp_rank], attempt)

    def _take_slots(self, step: int, counts: Sequence[int]) -> list[PromptSlot]:
        """Take the prompts of all ranks from the stream and return those of this rank."""
        local: list[PromptSlot] = []
        for rank, count in enumerate(counts):
            waiting = self._waiting[rank]
            taken = waiting[:count]
            self._waiting[rank] = waiting[count:]
            num_new = count - len(taken)
            if rank == self._dp_rank:
                local = [*taken, *(PromptSlot(self.cursor + i, step) for i in range(num_new))]
            # Every rank advances the cursor by the prompts of all ranks, so it stays equal without communication.
            self.cursor += num_new
        return local

    def _finish(self, submissions: Sequence[Submission], clock: Clock, part: str) -> list[RolloutGroup]:
        """Return the complete groups of submissions, in order; canceled ones wait for a later step or are given up."""
        replica = self._groups.replica
        groups = scatter_object(
            lambda: [group for each in submissions for group in each.wait(clock, part)],
            replica,
            self._rank_columns,
            lambda groups, columns: columns.select(groups),
        )
        if self._rollout.abort_slowest:
            slots = [(each.step, slot) for each in submissions for slot in each.slots]
            canceled = [slot for slot, group in zip(slots, groups, strict=True) if group is None]
            carried = [slot for step, slot in canceled if self._requests.carried_positions(step, [slot])]
            self._num_canceled += len(canceled) - len(carried)
            # A collective of the data-parallel ranks: they share one cursor, so each must know what the others carry.
            carried_by_rank = all_gather_objects(carried, self._groups.dp)
            # Carried prompts go first: they hold tokens, which get older with each step.
            self._waiting = [[*new, *old] for new, old in zip(carried_by_rank, self._waiting, strict=True)]
        return [group for group in groups if group is not None]

    def _take_single_groups(self, step: int, clock: Clock) -> list[RolloutGroup]:
        """Return the groups that are due and as many later ones as the step lacks; submit replacements for those.

        Due are the groups of this step; with the order ``completed``, the remaining groups of the step before. So each
        group is trained on in its step, or one later.
        """
        # Which groups are scored by now is a matter of timing, so one rank of the replica decides for all.
        positions = broadcast_object(lambda: self._wait_for_positions(step, clock), self._groups.replica)
        by_position = {each.slots[0].position: each for each in self._submissions}
        taken = [by_position.pop(position) for position in positions]
        self._submissions = list(by_position.values())
        sampled = self._finish(taken, clock, "prefetch_wait")
        expected = oversampled(self._share, self._rollout.oversample)
        with clock.part("waiting"):
            extra = all_gather_objects(max(0, len(taken) - expected), self._groups.dp)
        # Later groups move one place forward, so it is the last submitted step that now lacks some.
        if self._next_step > step + 1:
            last_step = self._next_step - 1
            slots = self._take_slots(last_step, extra)
            self._submissions += self._requests.submit(last_step, step, slots, len(slots))
        return sampled

    def _wait_for_positions(self, step: int, clock: Clock) -> list[int]:
        """Wait on the rank whose engine samples; return the positions of the groups that a step takes."""
        # In the order ``completed`` a group is due one step after its own: True counts as 1.
        due = [each for each in self._submissions if each.step + self._by_completion <= step]
        later = [each for each in self._submissions if each.step + self._by_completion > step]
        with clock.part("prefetch_wait"):
            wait([each.scored for each in due if each.scored is not None])
            while True:
                ready = self._scoring.select_scored(later)
                if not self._by_completion:
                    # In the order of the stream, a group is ready only if all before it are.
                    ready = list(takewhile(set(ready).__contains__, later))
                # Due groups are taken whatever their rewards are, so that none waits for more than one step.
                taken = list(due)
                usable = sum(map(self._is_usable, due))
                for submission in ready:
                    if usable >= self._share:
                        break
                    taken.append(submission)
                    usable += self._is_usable(submission)
                pending = [each.scored for each in later if each.scored is not None and each not in ready]
                if usable >= self._share or not pending:
                    return [each.slots[0].position for each in taken]
                # In the order of the stream, only the first pending group can make more of them ready.
                wait(pending if self._by_completion else pending[:1], return_when=FIRST_COMPLETED)

    def _require_rewards(self, groups: Sequence[RolloutGroup]) -> None:
        """Raise an error if every reward of a rank's step failed: single groups are scored without this check."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        # Episodes that failed have no reward because of the agent, which has a limit of its own.
        failed = [rollout.reward_failed for rollout in rollouts if not rollout.completion.failure]
        if len(failed) > 1 and all(failed):
            raise RewardError(
                f"{self._scorer.description} failed on all {len(failed)} samples of a step. A warning above has the "
                "first error. Fix the function, then run the same command to resume"
            )

    def _is_usable(self, submission: Submission) -> bool:
        """Return True if a single group counts toward the groups that a step needs."""
        assert submission.scored is not None
        (group,) = submission.scored.result()
        return group is not None and (not self._rollout.dynamic_sampling or has_signal(group, self._reward_parts))


def _restored(saved: SavedSubmission, contents: Mapping[int, StoredRollouts]) -> Submission:
    """Return a submission of a checkpoint: scored if all its groups are complete, otherwise to be resubmitted."""
    stored = [contents.get(slot.position) for slot in saved.slots]
    groups = [each.content for each in stored if each is not None and isinstance(each.content, RolloutGroup)]
    # One incomplete group reopens the submission; its complete groups become finished responses (``_group_state``).
    if not groups or len(groups) < len(stored):
        return Submission(saved.step, saved.sampled_at, saved.slots)
    scored: ScoredFuture = Future()
    scored.set_result(list(groups))
    return Submission(saved.step, saved.sampled_at, saved.slots, (), scored)


def _group_state(stored: StoredRollouts) -> GroupState | None:
    """Return the responses of a group that is sampled further."""
    if isinstance(stored.content, RolloutGroup):
        return tuple(rollout.completion for rollout in stored.content.rollouts)
    return stored.content
