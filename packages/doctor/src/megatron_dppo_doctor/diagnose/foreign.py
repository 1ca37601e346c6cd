"""``megatron-dppo diagnose --rollouts``: ledger of another stack's rollouts, scored by an fp32 copy of its weights.

Such rollouts have tokens and the engine's log-probabilities, and sometimes more columns. There is no engine to score
them again, so causes without a column are not separated.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.errors import DataError
from megatron_dppo.hf.folder import (
    build_hf_model,
    copy_into_model,
    model_shape,
    read_hf_config,
    routing_shape,
    stream_folder,
)
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import RoutingShape, SamplingParams, TrainingSample
from megatron_dppo_doctor.diagnose.dumps import DumpedSample, read_dump
from megatron_dppo_doctor.diagnose.ledger import Cause, CauseScoring, Ledger, make_ledger
from megatron_dppo_doctor.diagnose.rescore import ForcedRoutes, rescore, with_filter
from megatron_dppo_engines.route_checks import compact_routes

_MIN_IMPROVEMENT = 2.0
"""Factor by which another interpretation of the log-probabilities must fit better than the declared one."""


def diagnose_rollouts(path: Path, model: str, declared: SamplingParams, limit: int | None) -> Ledger:
    """Return the ledger of a dump, whose training has the temperature that the user declares, and no filter."""
    hf_config = read_hf_config(model)
    dumped = read_dump(path, limit, model_shape(hf_config).vocab_size)
    copy = build_hf_model(hf_config, torch.float32).to(Platform.detect().device)
    copy_into_model(copy, stream_folder(model, hf_config, "the model"))
    shape = routing_shape(hf_config)
    dumped = [_with_routes(each, shape) for each in dumped]
    return _RolloutScorer(copy, shape, dumped, declared).ledger()


class _RolloutScorer:
    """Scorer of another stack's rollouts with one fp32 model."""

    def __init__(
        self, model: Any, shape: RoutingShape | None, dumped: Sequence[DumpedSample], declared: SamplingParams
    ) -> None:
        self._model = model
        self._shape = shape
        self._dumped = dumped
        self._declared = declared
        self._has_routes = shape is not None and all(d.sample.routed_experts is not None for d in dumped)
        self._has_masks = all(d.sample.sampling_mask is not None for d in dumped)
        self._reported = self._gather_trained([_require_tensor(d.sample.rollout_logprobs) for d in dumped])

    def ledger(self) -> Ledger:
        """Score the chain from the trainer's log-probabilities to those that the engine reported."""
        temperature_declared = self._declared.temperature
        absent: dict[str, str] = {}
        notes: list[str] = []
        samples = [each.sample for each in self._dumped]
        # Sampling masks in the dump are used by its trainer too.
        declared = samples if self._has_masks else [replace(sample, sampling_mask=None) for sample in samples]
        live = self._score(declared, temperature_declared, routes=False)
        chain: list[CauseScoring] = []
        trained = live
        if all(each.trained is not None for each in self._dumped):
            trained = self._gather_trained([_require_tensor(each.trained) for each in self._dumped])
            chain.append(CauseScoring(Cause.OTHER_TRAINER, live))
        # Engines differ in what they report: try what the declared parameters allow.
        name, read, temperature = self._find_interpretation(declared)
        if name:
            chain.append(CauseScoring(Cause.SAMPLER, self._score(read, temperature, routes=False)))
            notes.append(
                f"sampler: the reported log-probabilities are {name}, which fit more than {_MIN_IMPROVEMENT:g} times "
                "better"
            )
        else:
            absent[Cause.SAMPLER] = "the reported log-probabilities are those of the declared distribution"
        if self._has_routes:
            chain.append(CauseScoring(Cause.ROUTER_IDS, self._score(read, temperature, routes=True)))
        else:
            dense = "a dense model has none"
            absent[Cause.ROUTER_IDS] = dense if self._shape is None else "not separable: the dump has no routed experts"
        chain.append(CauseScoring(Cause.NOT_SEPARATED, self._reported))
        elsewhere = f"not separable: see {str(Cause.NOT_SEPARATED)!r}"
        absent[Cause.ROUTER_WEIGHTS] = "a dense model has none" if self._shape is None else elsewhere
        absent |= dict.fromkeys((Cause.STALENESS, Cause.HEAD, Cause.ENGINE, Cause.UNEXPLAINED), elsewhere)
        # Last, because it turns the model into bf16.
        notes.append(self._bf16_note(read, temperature))
        return make_ledger(trained, chain, absent, notes)

    def _find_interpretation(self, declared: Sequence[TrainingSample]) -> tuple[str, Sequence[TrainingSample], float]:
        """Return the distribution that fits the reported log-probabilities: name, samples, temperature.

        The name is empty for the declared distribution.
        """
        sampling = self._declared
        plain = [replace(sample, sampling_mask=None) for sample in declared]
        alternatives: list[tuple[str, Sequence[TrainingSample], float]] = []
        if sampling.temperature != 1:
            alternatives.append(("those of temperature 1 (raw)", plain, 1.0))
        if self._has_masks:
            alternatives.append(("those before the filter", plain, sampling.temperature))
        if sampling.has_filters:
            filtered = [
                with_filter(self._model, sample, sampling, each.responses)
                for sample, each in zip(plain, self._dumped, strict=True)
            ]
            alternatives.append(("those after the filter", filtered, sampling.temperature))
        best = ("", declared, sampling.temperature)
        # A better fit may be chance unless it is much nearer.
        nearest = self._distance(*best[1:]) / _MIN_IMPROVEMENT
        for other in alternatives:
            if (distance := self._distance(*other[1:])) < nearest:
                best, nearest = other, distance
        return best

    def _distance(self, samples: Sequence[TrainingSample], temperature: float) -> float:
        logprobs = self._score(samples, temperature, routes=self._has_routes)
        return float((logprobs - self._reported).abs().mean())

    def _bf16_note(self, samples: Sequence[TrainingSample], temperature: float) -> str:
        """Return a note with the error of bf16 for these weights and tokens."""
        exact = self._score(samples, temperature, routes=self._has_routes)
        self._model.to(torch.bfloat16)
        rough = self._score(samples, temperature, routes=self._has_routes)
        return (
            f"for scale: a bf16 copy of these weights differs from the fp32 copy by {(rough - exact).abs().mean():.1e} "
            "nats on average; this is not the engine and not part of the table"
        )

    def _score(self, samples: Sequence[TrainingSample], temperature: float, *, routes: bool) -> Tensor:
        forced = ForcedRoutes(self._model, self._shape) if routes and self._shape is not None else None
        logprobs = self._gather_trained(rescore(self._model, samples, temperature=temperature, forced=forced))
        if wrong := int((~logprobs.isfinite()).sum()):
            raise DataError(
                f"the model's log-probabilities of {wrong} of the {len(logprobs)} tokens are not finite at temperature "
                f"{temperature:g}: the weights of --model are damaged, or --temperature is too near 0"
            )
        return logprobs

    def _gather_trained(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the values of tokens with a loss, ``[num_tokens]``."""
        return torch.cat([row[each.sample.loss_mask] for row, each in zip(rows, self._dumped, strict=True)])


def _require_tensor(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def _with_routes(dumped: DumpedSample, shape: RoutingShape | None) -> DumpedSample:
    if dumped.routes is None or shape is None:
        return dumped
    tokens = dumped.sample.num_tokens
    try:
        routes = compact_routes(dumped.routes, shape, tokens=tokens, request=dumped.location)
    except ValueError as error:
        raise DataError(
            f"the routed experts of the dump do not fit the model: {error}. Fix: pass the --model that sampled it"
        ) from error
    return replace(dumped, sample=replace(dumped.sample, routed_experts=routes))
