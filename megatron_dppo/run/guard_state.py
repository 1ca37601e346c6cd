"""State of the guard of first updates over a run, and the numbers that it gathers from all ranks for a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_dppo.config.distillation import DistillationConfig
from megatron_dppo.config.rollout import RolloutConfig
from megatron_dppo.config.schema import Config
from megatron_dppo.config.train import TrainConfig
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.parallel.groups import ParallelGroups
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.report.metrics import reduce_over_samples
from megatron_dppo.rollout.batch import CollectedRollouts
from megatron_dppo.rollout.repeats import RepeatSums
from megatron_dppo.run.guard import FirstUpdateGuard, GuardEvidence, GuardHistory, count_nonfinite_tokens
from megatron_dppo.run.sampling_test import GREEDY, SamplingTest, SelectionShares
from megatron_dppo.types import DropReason, FinishReason, Metric, Rollout
from megatron_dppo_engines.sampling_sums import RankSums
from megatron_dppo_engines.sums import add_by_key


@dataclass
class GuardState:
    """State of the guard over a run, the same on every rank."""

    history: GuardHistory = field(default_factory=GuardHistory)
    sampling: SamplingTest | None = None
    """None: ``train.sampling_test`` is off, or the engine is perturbed on purpose."""
    excluded: dict[str, str] = field(default_factory=dict)
    """Reasons of the servers that the run does not use any more, by URL."""
    _reported: set[str] = field(default_factory=set)

    @classmethod
    def from_config(cls, rollout: RolloutConfig, train: TrainConfig) -> GuardState:
        """Return the state at the start of a run."""
        num_servers = 1 if rollout.engine == "local" else len(rollout.servers.resolved_urls)
        # With filters the trainer's entropy and the server's candidates are of different sets of ids.
        is_comparable = not (rollout.perturbation.is_active or rollout.has_filters or train.layer_noise.std)
        is_tested = train.sampling_test and is_comparable
        return cls(
            history=GuardHistory(evidence=GuardEvidence(num_servers)),
            sampling=SamplingTest(num_servers) if is_tested else None,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the state for a checkpoint. A resumed run tries excluded servers again."""
        return {
            "prob_diffs": self.history.prob_diffs,
            "stale_prob_diffs": self.history.stale_prob_diffs,
            "evidence": {} if self.sampling is None else self.sampling.state(),
            "server_evidence": self.history.evidence.state(),
        }

    def restore(self, record: Mapping[str, Any]) -> None:
        """Restore what ``to_json`` returned."""
        self.history.prob_diffs = list(record["prob_diffs"])
        self.history.stale_prob_diffs = list(record["stale_prob_diffs"])
        # Older checkpoints have none.
        self.history.evidence.restore(record.get("server_evidence", {}))
        if self.sampling is not None:
            self.sampling.restore(record["evidence"])

    def begin_step(
        self, config: Config, groups: ParallelGroups, collected: CollectedRollouts, ranks: Mapping[str, RankSums]
    ) -> FirstUpdateGuard:
        """Test how the servers sampled, and return the guard of the step's first update; a collective of all ranks.

        A TrainingStopped if a server does not sample from what it reports, and there is no other one.
        """
        if self.sampling is not None:
            self._test_sampling(self.sampling, groups, collected, ranks)
        shares = _step_shares(config.train, config.distillation, groups, collected)
        return FirstUpdateGuard.from_config(
            config.train,
            config.rollout,
            config.model,
            nonfinite_fraction=shares["nonfinite"],
            is_on_policy=shares["oldest"] == 0,
            is_topk=config.loss.is_topk,
            history=self.history,
            sampling=self.sampling,
            selection=SelectionShares(
                # In the order of completion fast groups come first: a selection that no count shows.
                groups=max(shares["groups_left_out"], 0.5 * (config.rollout.order == "completed")),
                responses=shares["responses_left_out"],
                group_size=config.rollout.samples_per_prompt,
            ),
            left_out=self._unreported,
        )

    @property
    def _unreported(self) -> dict[str, str]:
        return {url: problem for url, problem in self.excluded.items() if url not in self._reported}

    def take_excluded(self) -> dict[str, str]:
        """Return the servers that were excluded since the last call, by URL with the reason."""
        unreported = self._unreported
        self._reported |= unreported.keys()
        return unreported

    def exclude(self, servers: Mapping[str, str], in_use: frozenset[str]) -> None:
        """Use servers no more. ``servers`` has the reason by URL, ``in_use`` the servers of this step."""
        self.excluded |= servers
        # "" stands for an engine without servers, which cannot be left out.
        if in_use <= self.excluded.keys() or "" in servers:
            raise TrainingStopped(
                "the tokens of this run are not samples of the policy; nothing was learned from this step:\n"
                + "\n".join(f"  - {server + ': ' if server else ''}{problem}" for server, problem in servers.items())
                + "\nIf the servers are right, train.sampling_test = false disables this test"
            )

    def _test_sampling(
        self,
        test: SamplingTest,
        groups: ParallelGroups,
        collected: CollectedRollouts,
        ranks: Mapping[str, RankSums],
    ) -> None:
        # The ranks of a replica have the same groups, and one engine.
        local = (dict(ranks), dict(collected.repeats)) if is_leader(groups.replica) else ({}, {})
        all_ranks: dict[str, RankSums] = {}
        all_repeats: dict[str, RepeatSums] = {}
        for rank_part, repeat_part in all_gather_objects(local, groups.world):
            add_by_key(all_ranks, rank_part)
            add_by_key(all_repeats, repeat_part)
        problems = test.add_ranks(all_ranks)
        for server, problem in test.add_repeats(all_repeats).items():
            # Copies are no independent samples of the ranks, which call them a filter. Greedy decoding makes copies.
            if not problems.get(server, "").startswith(GREEDY):
                problems[server] = problem
        if problems:
            self.exclude(problems, frozenset(all_repeats) | frozenset(all_ranks))


def leaves_loss(rollout: Rollout, train: TrainConfig, *, has_teacher: bool) -> bool:
    """Return True for a response outside the loss: failed without a teacher, or truncated and masked."""
    has_no_signal = rollout.reward_failed and not has_teacher
    return has_no_signal or (train.mask_truncated and rollout.completion.finish_reason == FinishReason.LENGTH)


def _step_shares(
    train: TrainConfig, distillation: DistillationConfig, groups: ParallelGroups, collected: CollectedRollouts
) -> dict[str, float]:
    """Return shares of this step's rollouts over all ranks, and the age of the oldest token."""
    num_left_out = sum(collected.dropped_groups.get(reason, 0) for reason in DropReason) + collected.num_carried
    num_groups = len(collected.groups)
    has_teacher = distillation.is_enabled
    left_out = [
        leaves_loss(rollout, train, has_teacher=has_teacher) for group in collected.groups for rollout in group.rollouts
    ]
    local = {
        "nonfinite": count_nonfinite_tokens(collected.groups),
        "oldest": Metric(max(collected.token_ages, default=0), kind="max"),
        "groups_left_out": Metric(num_left_out, num_left_out + num_groups),
        "responses_left_out": Metric(sum(left_out), len(left_out)),
    }
    return {"nonfinite": 0.0, "groups_left_out": 0.0, "responses_left_out": 0.0} | reduce_over_samples(groups, local)
