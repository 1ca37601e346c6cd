"""One batch of a run, scored by trainer and engine with one cause of their difference removed after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_dppo.commands.diagnose.ledger import (
    ENGINE,
    HEAD,
    NOT_SEPARATED,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    SAMPLER,
    STALENESS,
    TRAINER,
    UNEXPLAINED,
    CauseScoring,
)
from megatron_dppo.data.routing import with_all_routes
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.parallel.objects import from_each, is_leader
from megatron_dppo.types import Completion, RolloutGroup, TrainingSample, experts_of, with_weights

if TYPE_CHECKING:
    from megatron_dppo.mcore.host_memory import ReferenceWeights
    from megatron_dppo.policy.trainer import PolicyTrainer

_Scores = list[Tensor]
"""[T] of each sample"""


class Snapshots:
    """This rank's shard of the weights of each version that an engine was given, on the host.

    Args:
        trainer: the policy.
    """

    def __init__(self, trainer: PolicyTrainer) -> None:
        self._trainer = trainer
        self._of: dict[int, ReferenceWeights] = {}

    def take(self) -> None:
        """Copy the weights of the current version."""
        # Its module imports Megatron, which must come after the shims.
        from megatron_dppo.mcore.host_memory import ReferenceWeights

        self._trainer.optimizer.finish_overlapped_gather()
        self._of[self._trainer.policy_version] = ReferenceWeights(self._trainer.models)

    def each(self, versions: Sequence[int]) -> Iterator[int]:
        """Each of the versions while the model has its weights; all ranks ask for the same ones."""
        for version in versions:
            if version == self._trainer.policy_version:
                yield version
                continue
            with self._of[version].swapped_in():
                yield version


@dataclass(frozen=True, kw_only=True)
class RunScorer:
    """Scores the tokens of a run's rollouts. All ranks call its methods alike.

    ``trainer`` replays routes with weights (``train.router_replay_weights``) where the engine gives them.
    """

    trainer: PolicyTrainer
    snapshots: Snapshots
    budget: int
    """tokens of a micro-batch"""
    temperature: float
    replays: Literal["none", "ids", "weights"]
    """what the run itself replays"""
    has_weights: bool
    """whether the routes have combine weights"""
    hides_filter: bool
    """whether the sampling masks are those of a filter that training is not told of"""
    engine: LocalEngine | None
    """None on ranks without one"""
    exact: LocalEngine | None
    """an fp32 copy without perturbation, on the same ranks"""
    is_local: bool
    """whether the engine can score again; the same on all ranks"""
    fp32: bool
    """whether the trainer computes in fp32"""

    def chain(self, groups: Sequence[RolloutGroup], samples: Sequence[TrainingSample]) -> tuple[_Scores, Chain]:
        """What training computes first, and the scorings from there to what the engine reported; of this rank's
        samples, meaningful on leaders of replicas."""
        completions = [rollout.completion for group in groups for rollout in group.rollouts]
        versions = [token_versions(c, s) for c, s in zip(completions, samples, strict=True)]
        # Top-K ids stay: the head adds up a row's mass in an order that depends on them.
        plain = list(samples)
        told = [replace(sample, sampling_mask=None) for sample in plain] if self.hides_filter else plain
        as_run = {"none": self._live, "ids": self._ids, "weights": self._both}[self.replays]
        trained = as_run(told)
        chain: Chain = [(STALENESS, self._at(versions, lambda: as_run(told)))]
        if self.hides_filter:
            chain.append((SAMPLER, self._at(versions, lambda: as_run(plain))))
        if self.trainer.routing_shape is not None and plain[0].routed_experts is not None:
            if self.replays == "none":
                chain.append((ROUTER_IDS, self._at(versions, lambda: self._ids(plain))))
            if self.has_weights and self.replays != "weights":
                chain.append((ROUTER_WEIGHTS, self._at(versions, lambda: self._both(plain))))
        if self.is_local:
            chain += self._by_engine(plain, versions)
        reported = [sample.rollout_logprobs for sample in samples]
        assert all(row is not None for row in reported)
        last = ENGINE if self.is_local else NOT_SEPARATED
        chain.append((last, [row for row in reported if row is not None]))
        return trained, chain

    def _by_engine(self, plain: Sequence[TrainingSample], versions: Sequence[Tensor]) -> Chain:
        """The engine's own scorings of the whole sequences, exact first."""
        names = ("exact", "fp32 head", "engine")

        def score() -> list[_Scores]:
            found: list[_Scores] = []
            for name in names:
                engine = self.exact if name == "exact" else self.engine
                if engine is None:
                    found.append([])
                else:
                    found.append(engine.rescore(plain, self.temperature, fp32_head=name == "fp32 head"))
            return found

        exact, head, own = self._with_engines(versions, score)
        return [(UNEXPLAINED if self.fp32 else TRAINER, exact), (ENGINE, head), (HEAD, own)]

    def _with_engines(self, versions: Sequence[Tensor], score: Callable[[], list[_Scores]]) -> list[_Scores]:
        """``score`` with both engines at the weights of each version, and of each token what its version says."""
        found: list[list[_Scores]] = []
        wanted = self._versions(versions)
        for version in self.snapshots.each(wanted):
            for engine in (self.engine, self.exact):
                weights = self.trainer.export_weights()
                if engine is None:
                    for _ in weights:
                        pass
                else:
                    engine.update_weights(weights, version)
            found.append(score())
        return [_chosen([of[i] for of in found], wanted, versions) for i in range(len(found[0]))]

    def _at(self, versions: Sequence[Tensor], score: Callable[[], _Scores]) -> _Scores:
        """``score`` of each token at the weights that sampled it."""
        wanted = self._versions(versions)
        return _chosen([score() for _ in self.snapshots.each(wanted)], wanted, versions)

    def _versions(self, versions: Sequence[Tensor]) -> list[int]:
        """Of all ranks' tokens."""
        own = sorted({int(v) for row in versions for v in row.unique().tolist()} - {_NONE})
        return sorted(set().union(*from_each(own, self.trainer.groups.world)))

    def _live(self, samples: Sequence[TrainingSample]) -> _Scores:
        return self._scores(samples, None)

    def _ids(self, samples: Sequence[TrainingSample]) -> _Scores:
        return self._scores([self.without_weights(sample) for sample in samples], "replay")

    def _both(self, samples: Sequence[TrainingSample]) -> _Scores:
        return self._scores(samples, "replay")

    def without_weights(self, sample: TrainingSample) -> TrainingSample:
        """The sample with routes whose combine weights are missing, where they have any."""
        shape, routes = self.trainer.routing_shape, sample.routed_experts
        if shape is None or routes is None or not shape.weights:
            return sample
        missing = torch.full((*routes.shape[:-1], shape.topk), torch.nan)
        return replace(sample, routed_experts=with_weights(experts_of(routes, shape), missing))

    def _scores(self, samples: Sequence[TrainingSample], mode: Literal["replay"] | None) -> _Scores:
        """The trainer's log-probabilities; on the leader of a replica also when another rank computes them."""
        trainer, samples = self.trainer, list(samples)
        if mode is None:
            samples = [replace(sample, routed_experts=None) for sample in samples]
        elif trainer.routing_shape is not None:
            layers = trainer.replayed_layers
            shape = trainer.routing_shape
            own = shape if layers is None else replace(shape, num_layers=len(layers))
            samples = with_all_routes(samples, shape, own)
        packed = trainer.pack(samples, self.budget)
        rows, _ = trainer.token_logprobs(packed.batches, mode)
        mine: list[Any] = [None] * len(samples)
        for part, row in zip(packed.bins, rows, strict=False):
            lengths = [trainer.row_shape.padded(samples[i].num_tokens) for i in part]
            for i, start in zip(part, accumulate([0, *lengths]), strict=False):
                mine[i] = row.logprobs[start : start + samples[i].num_tokens].float().cpu().clone()
        computed = [found for found in from_each(mine, trainer.groups.replica) if found and found[0] is not None]
        return list(computed[0])

    def gathered(self, values: Sequence[Tensor], samples: Sequence[TrainingSample]) -> Tensor:
        """[N] of the tokens with a loss of all samples of all data-parallel ranks, on every rank."""
        own = None
        if is_leader(self.trainer.groups.replica):
            own = torch.cat([row[s.loss_mask] for row, s in zip(values, samples, strict=True)])
        return torch.cat([part for part in from_each(own, self.trainer.groups.world) if part is not None])

    def scorings(self, chain: Chain, samples: Sequence[TrainingSample]) -> list[CauseScoring]:
        """The chain over the tokens of all ranks."""
        return [CauseScoring(cause, self.gathered(values, samples)) for cause, values in chain]


Chain = list[tuple[str, _Scores]]
_NONE = -1
"""the version of tokens without a loss"""


def token_versions(completion: Completion, sample: TrainingSample) -> Tensor:
    """``[T]`` the version of the weights that sampled each label, ``-1`` where the sample has no loss."""
    found = torch.full((sample.num_tokens,), _NONE)
    first = sample.num_tokens - len(completion.token_ids)
    found[first:] = completion.policy_version
    for span in completion.policy_versions:
        found[first + span.start : first + span.end] = span.policy_version
    return torch.where(sample.loss_mask, found, _NONE)


def _chosen(scores: Sequence[_Scores], wanted: Sequence[int], versions: Sequence[Tensor]) -> _Scores:
    """Of each token the score by the weights of its version; empty on ranks that have none."""
    result = [row.clone() for row in scores[0]]
    for of_version, version in zip(scores[1:], wanted[1:], strict=True):
        for own, row, places in zip(result, of_version, versions, strict=bool(result)):
            own[places == version] = row[places == version]
    return result
