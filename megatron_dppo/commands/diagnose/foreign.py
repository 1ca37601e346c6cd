"""``megatron-dppo diagnose --rollouts``: the ledger of another stack's rollouts, by an fp32 copy of their weights.

Of such rollouts the tokens and the engine's log-probabilities are known, and what else the dump holds. What is not in
it is not separated: there is no engine here that could be asked again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dppo.commands.diagnose.dumps import DumpedSample, read_dump
from megatron_dppo.commands.diagnose.ledger import (
    ENGINE,
    HEAD,
    NOT_SEPARATED,
    OTHER_TRAINER,
    ROUTER_IDS,
    ROUTER_WEIGHTS,
    SAMPLER,
    STALENESS,
    UNEXPLAINED,
    CauseScoring,
    Ledger,
    make_ledger,
)
from megatron_dppo.data.routing import compact_routes
from megatron_dppo.engines.local.rescore import ForcedRoutes, rescore, with_filter
from megatron_dppo.errors import DataError
from megatron_dppo.hf.folder import (
    FolderWeights,
    build_hf_model,
    copy_into_model,
    model_shape,
    read_hf_config,
    routing_shape,
)
from megatron_dppo.parallel.platform import Platform
from megatron_dppo.types import RoutingShape, SamplingParams, TrainingSample

_TWICE = 2.0
"""How much nearer another reading of the numbers has to be than the declared one, to be believed"""


@dataclass(frozen=True)
class Declared:
    """How the rollouts were sampled, as the user says; training divides by the same temperature, and has no filter."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def diagnose_rollouts(path: Path, model: str, declared: Declared, limit: int | None) -> Ledger:
    """The ledger of a dump.

    Args:
        path: see ``read_dump``.
        model: Hugging Face folder of the weights that trained on it.
        declared: the sampling.
        limit: first samples that are looked at; None = all.

    Raises:
        UserError: the dump has no ids or log-probabilities, holds values that cannot be (``read_dump``), or does not
            fit the model; the model computes no numbers.
    """
    hf_config = read_hf_config(model)
    dumped = read_dump(path, limit, model_shape(hf_config).vocab_size)
    copy = build_hf_model(hf_config, torch.float32).to(Platform.detect().device)
    copy_into_model(copy, FolderWeights(model).stream(tied=hf_config.tie_word_embeddings))
    shape = routing_shape(hf_config)
    dumped = [_with_routes(each, shape) for each in dumped]
    return _Foreign(copy, shape, dumped, declared).ledger()


class _Foreign:
    def __init__(self, model: Any, shape: RoutingShape | None, dumped: Sequence[DumpedSample], said: Declared) -> None:
        self._model, self._shape, self._dumped, self._said = model, shape, dumped, said
        self._has_routes = shape is not None and all(d.sample.routed_experts is not None for d in dumped)
        self._has_sets = all(d.sample.sampling_mask is not None for d in dumped)
        self._reported = self._column([_given(d.sample.rollout_logprobs) for d in dumped])

    def ledger(self) -> Ledger:
        """From what the trainer computes to what the engine reported."""
        said, absent, notes = self._said, {}, []
        samples = [each.sample for each in self._dumped]
        # Sets that are in the dump are those that its trainer uses.
        declared = samples if self._has_sets else [replace(sample, sampling_mask=None) for sample in samples]
        live = self._score(declared, said.temperature, routes=False)
        chain: list[CauseScoring] = []
        trained = live
        if all(each.trained is not None for each in self._dumped):
            trained = self._column([_given(each.trained) for each in self._dumped])
            chain.append(CauseScoring(OTHER_TRAINER, live))
        name, read, temperature = self._read_as(declared)
        if name:
            chain.append(CauseScoring(SAMPLER, self._score(read, temperature, routes=False)))
            notes.append(
                f"sampler: the reported numbers are {name}, which fits them more than {_TWICE:g} times as well"
            )
        else:
            absent[SAMPLER] = "the reported numbers are those of the declared distribution"
        if self._has_routes:
            chain.append(CauseScoring(ROUTER_IDS, self._score(read, temperature, routes=True)))
        else:
            dense = "a dense model has none"
            absent[ROUTER_IDS] = dense if self._shape is None else "not separable: the dump has no routed experts"
        chain.append(CauseScoring(NOT_SEPARATED, self._reported))
        weights = "a dense model has none" if self._shape is None else f"not separable: see {NOT_SEPARATED!r}"
        absent |= {ROUTER_WEIGHTS: weights}
        absent |= dict.fromkeys((STALENESS, HEAD, ENGINE, UNEXPLAINED), f"not separable: see {NOT_SEPARATED!r}")
        notes.append(self._scale(read, temperature))
        return make_ledger(trained, chain, absent, notes)

    def _read_as(self, declared: Sequence[TrainingSample]) -> tuple[str, Sequence[TrainingSample], float]:
        """What the reported numbers are the log-probabilities of: name (empty = as declared), samples, temperature."""
        said, plain = self._said, [replace(sample, sampling_mask=None) for sample in declared]
        others: list[tuple[str, Sequence[TrainingSample], float]] = []
        if said.temperature != 1:
            others.append(("those of temperature 1 (raw)", plain, 1.0))
        if self._has_sets:
            others.append(("those before the filter", plain, said.temperature))
        if said.top_p < 1 or said.top_k or said.min_p:
            params = SamplingParams(max_new_tokens=1, **vars(said))
            cut = [
                with_filter(self._model, sample, params, each.responses)
                for sample, each in zip(plain, self._dumped, strict=True)
            ]
            others.append(("those of what the filter left", cut, said.temperature))
        best = ("", declared, said.temperature)
        nearest = self._distance(*best[1:]) / _TWICE
        for other in others:
            if (distance := self._distance(*other[1:])) < nearest:
                best, nearest = other, distance
        return best

    def _distance(self, samples: Sequence[TrainingSample], temperature: float) -> float:
        found = self._score(samples, temperature, routes=self._has_routes)
        return float((found - self._reported).abs().mean())

    def _scale(self, samples: Sequence[TrainingSample], temperature: float) -> str:
        """What bf16 alone costs with these weights and tokens, to compare with."""
        exact = self._score(samples, temperature, routes=self._has_routes)
        self._model.to(torch.bfloat16)
        rough = self._score(samples, temperature, routes=self._has_routes)
        return (
            f"for scale: a bf16 copy of these weights differs from the fp32 copy by {(rough - exact).abs().mean():.1e} "
            "nats on average; it is not the engine, and no part of the table"
        )

    def _score(self, samples: Sequence[TrainingSample], temperature: float, *, routes: bool) -> Tensor:
        forced = ForcedRoutes(self._model, self._shape) if routes and self._shape is not None else None
        found = self._column(rescore(self._model, samples, temperature=temperature, forced=forced))
        if wrong := int((~found.isfinite()).sum()):
            raise DataError(
                f"the model's log-probabilities of {wrong} of the {len(found)} tokens are not finite at temperature "
                f"{temperature:g}: the weights of --model are damaged, or --temperature is too near 0"
            )
        return found

    def _column(self, rows: Sequence[Tensor]) -> Tensor:
        """[N] of the tokens that train."""
        return torch.cat([row[each.sample.loss_mask] for row, each in zip(rows, self._dumped, strict=True)])


def _given(values: Tensor | None) -> Tensor:
    assert values is not None
    return values


def _with_routes(dumped: DumpedSample, shape: RoutingShape | None) -> DumpedSample:
    if dumped.routes is None or shape is None:
        return dumped
    tokens = dumped.sample.num_tokens
    try:
        routes = compact_routes(dumped.routes, shape, tokens=tokens, request=dumped.place)
    except ValueError as error:
        raise DataError(f"the routed experts of the dump do not fit the model: {error}") from error
    return replace(dumped, sample=replace(dumped.sample, routed_experts=routes))
