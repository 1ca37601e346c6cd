"""Scorings of one batch by trainer and engine, with one cause of mismatch removed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_dppo.data.replayed_routes import with_all_routes
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.parallel.objects import all_gather_objects, is_leader
from megatron_dppo.types import Completion, RolloutGroup, TrainingSample, select_experts, with_weights
from megatron_dppo_doctor.diagnose.ledger import Cause, CauseScoring
from megatron_dppo_doctor.diagnose.rescore import rescore_by_engine

if TYPE_CHECKING:
    from megatron_dppo.config.schema import Config
    from megatron_dppo.mcore.host_memory import ReferenceWeights
    from megatron_dppo.policy.trainer import PolicyTrainer

_Replays = Literal["none", "ids", "weights"]
_Scores = list[Tensor]
"""Log-probabilities ``[num_tokens]`` of each sample."""


class Snapshots:
    """Copies of this rank's weights on the host, for each policy version that the engine received."""

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._weights: dict[int, ReferenceWeights] = {}

    def take(self) -> None:
        """Copy the weights of the current version."""
        # Its module imports Megatron, which must come after the shims.
        from megatron_dppo.mcore.host_memory import ReferenceWeights

        self._trainer.optimizer.finish_overlapped_gather()
        self._weights[self._trainer.policy_version] = ReferenceWeights(self._trainer.models)

    def each(self, versions: Sequence[int]) -> Iterator[int]:
        """Yield each version while the model has its weights. All ranks must pass the same versions."""
        for version in versions:
            if version == self._trainer.policy_version:
                yield version
                continue
            with self._weights[version].swapped_in():
                yield version


@dataclass(frozen=True, kw_only=True)
class RunScorer:
    """Scorer of a run's rollouts. Its methods are collective.

    The trainer replays routes with combine weights (``train.router_replay_weights``) if the engine returns them.
    """

    trainer: PolicyTrainer
    snapshots: Snapshots
    config: Config
    replays: _Replays
    """Routes that the run replays in training."""
    engine: LocalEngine | None
    """Engine of this rank. None without one."""
    exact: LocalEngine | None
    """Unperturbed fp32 engine on the same ranks."""
    is_local: bool
    """True if the engine can score tokens again. The same on all ranks."""
    has_linear_attention: bool

    @property
    def has_hidden_filter(self) -> bool:
        """True if the sampling masks belong to a filter that is hidden from training."""
        return self.config.rollout.perturbation.unrecorded_top_p < 1

    def chain(self, groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample]) -> tuple[_Scores, Chain]:
        """Score this rank's samples along the chain from trainer to engine.

        Return the log-probabilities of training, and the scorings from there to the engine's. Valid on replica leaders
        only.
        """
        segments = [s for group in groups for rollout in group.rollouts for s in rollout.completion.segments]
        versions = [token_versions(c, s) for c, s in zip(segments, samples, strict=True)]
        # Keep the Top-K ids: the head's order of summation depends on them.
        plain = list(samples)
        as_trained = [replace(sample, sampling_mask=None) for sample in plain] if self.has_hidden_filter else plain
        trained = self._scores(as_trained, self.replays)
        chain: Chain = [(Cause.STALENESS, self._score_at_versions(versions, as_trained, self.replays))]
        if self.has_hidden_filter:
            chain.append((Cause.SAMPLER, self._score_at_versions(versions, plain, self.replays)))
        if self.trainer.routing_shape is not None and plain[0].routed_experts is not None:
            if self.replays == "none":
                chain.append((Cause.ROUTER_IDS, self._score_at_versions(versions, plain, "ids")))
            # Routes have combine weights.
            if self.config.train.router_replay_weights and self.replays != "weights":
                chain.append((Cause.ROUTER_WEIGHTS, self._score_at_versions(versions, plain, "weights")))
        if self.is_local:
            chain += self._score_by_engine(plain, versions)
        reported = [sample.rollout_logprobs for sample in samples]
        assert all(row is not None for row in reported)
        last = Cause.ENGINE if self.is_local else Cause.NOT_SEPARATED
        chain.append((last, [row for row in reported if row is not None]))
        return trained, chain

    def _score_by_engine(self, plain: Sequence[TrainingSample], versions: Sequence[Tensor]) -> Chain:
        """Score the sequences with the engines: exact, with an fp32 head, in one pass, with the engine's recurrence."""
        # Between an fp32 trainer and the exact engine no cause is known.
        causes = [Cause.UNEXPLAINED if self.config.model.dtype == "fp32" else Cause.TRAINER, Cause.ENGINE, Cause.HEAD]
        if self.has_linear_attention:
            causes.append(Cause.RECURRENCE)

        def score() -> list[_Scores]:
            scores: list[_Scores] = []
            for index, cause in enumerate(causes):
                engine = self.exact if index == 0 else self.engine
                if engine is None:
                    scores.append([])
                else:
                    options = {"fp32_head": cause == Cause.ENGINE, "token_by_token": cause == Cause.RECURRENCE}
                    scores.append(rescore_by_engine(engine, plain, self.config.rollout.temperature, **options))
            return scores

        return list(zip(causes, self._score_with_engines(versions, score), strict=True))

    def _score_with_engines(self, versions: Sequence[Tensor], score: Callable[[], list[_Scores]]) -> list[_Scores]:
        """Load each version into both engines, score, and select for each token the score of its version."""
        scores: list[list[_Scores]] = []
        needed = self._all_versions(versions)
        for version in self.snapshots.each(needed):
            for engine in (self.engine, self.exact):
                weights = self.trainer.export_weights()
                # The export is a collective, so a rank without an engine takes part.
                if engine is None:
                    for _ in weights:
                        pass
                else:
                    engine.update_weights(weights, version)
            scores.append(score())
        num_scorings = len(scores[0])
        return [_select_by_version([each[i] for each in scores], needed, versions) for i in range(num_scorings)]

    def _score_at_versions(
        self, versions: Sequence[Tensor], samples: Sequence[TrainingSample], replays: _Replays
    ) -> _Scores:
        """Score each token with the weights that sampled it."""
        needed = self._all_versions(versions)
        scores = [self._scores(samples, replays) for _ in self.snapshots.each(needed)]
        return _select_by_version(scores, needed, versions)

    def _all_versions(self, versions: Sequence[Tensor]) -> list[int]:
        local = sorted({int(v) for row in versions for v in row.unique().tolist()} - {_NO_VERSION})
        return sorted(set().union(*all_gather_objects(local, self.trainer.groups.world)))

    def without_weights(self, sample: TrainingSample) -> TrainingSample:
        """Return the sample with routes that have no combine weights."""
        shape, routes = self.trainer.routing_shape, sample.routed_experts
        if shape is None or routes is None or not shape.weights:
            return sample
        missing = torch.full((*routes.shape[:-1], shape.topk), torch.nan)
        return replace(sample, routed_experts=with_weights(select_experts(routes, shape), missing))

    def _scores(self, samples: Sequence[TrainingSample], replays: _Replays) -> _Scores:
        """Return the trainer's log-probabilities, also on a replica leader that does not compute them itself."""
        trainer = self.trainer
        samples = [self.without_weights(sample) if replays == "ids" else sample for sample in samples]
        if replays == "none":
            samples = [replace(sample, routed_experts=None) for sample in samples]
        elif trainer.routing_shape is not None:
            layers = trainer.replayed_layers
            shape = trainer.routing_shape
            local = shape if layers is None else replace(shape, num_layers=len(layers))
            samples = with_all_routes(samples, shape, local)
        packed = trainer.pack(samples, self.config.train.micro_batch_tokens)
        rows, _ = trainer.token_logprobs(packed.batches, None if replays == "none" else "replay")
        logprobs: list[Any] = [None] * len(samples)
        for i, where, number in packed.positions(samples) if rows else ():
            logprobs[i] = rows[number].logprobs[where].float().cpu().clone()
        # Only the last pipeline stage has log-probabilities.
        gathered = all_gather_objects(logprobs, trainer.groups.replica)
        computed = [scores for scores in gathered if scores and scores[0] is not None]
        return list(computed[0])

    def gather_trained(self, values: Sequence[Tensor], samples: Sequence[TrainingSample]) -> Tensor:
        """Gather the values of tokens with a loss from all data-parallel ranks, ``[num_tokens]``, on every rank."""
        local = None
        if is_leader(self.trainer.groups.replica):
            local = torch.cat([row[s.loss_mask] for row, s in zip(values, samples, strict=True)])
        return torch.cat([part for part in all_gather_objects(local, self.trainer.groups.world) if part is not None])

    def scorings(self, chain: Chain, samples: Sequence[TrainingSample]) -> list[CauseScoring]:
        """Return the chain with the tokens of all ranks."""
        return [CauseScoring(cause, self.gather_trained(values, samples)) for cause, values in chain]


Chain = list[tuple[str, _Scores]]
_NO_VERSION = -1
"""Version of tokens without a loss."""


def token_versions(completion: Completion, sample: TrainingSample) -> Tensor:
    """Return the policy version that sampled each label, ``[num_tokens]``, ``-1`` for tokens without a loss."""
    result = torch.full((sample.num_tokens,), _NO_VERSION)
    first = sample.num_tokens - len(completion.token_ids)
    result[first:] = completion.policy_version
    for span in completion.policy_versions:
        result[first + span.start : first + span.end] = span.policy_version
    return torch.where(sample.loss_mask, result, _NO_VERSION)


def _select_by_version(scores: Sequence[_Scores], needed: Sequence[int], versions: Sequence[Tensor]) -> _Scores:
    """Select for each token the score by the weights of its version. Empty on ranks without scores."""
    result = [row.clone() for row in scores[0]]
    for version_scores, version in zip(scores[1:], needed[1:], strict=True):
        for selected, row, token_version in zip(result, version_scores, versions, strict=bool(result)):
            is_version = token_version == version
            selected[is_version] = row[is_version]
    return result
