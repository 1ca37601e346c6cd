"""Made-up policies and the answers that right and wrong servers of them would give to a probe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron_dppo.types import RoutingShape, VersionSpan
from megatron_dppo.weights.probe_requests import ProbeExpectation, ProbeResponse, RouteCounts, TrainerReading
from megatron_dppo_engines.route_checks import count_differences
from megatron_dppo_engines.server import Generation, ServerInfo
from megatron_dppo_engines.servers.wire import append_sampled_token

VOCAB, K, TOKENS = 50, 4, 64
ROUTING = RoutingShape(num_layers=3, num_experts=8, topk=2)
EXPECTED = ProbeExpectation(
    prompt="p",
    prompt_token_ids=(1, 2),
    vocab_size=VOCAB,
    end_tokens=(5,),
    temperature=0.7,
    dtype="fp32",
    topk_logprobs=K,
)
NOISE = {"fp32": 2e-7, "bf16": 4e-3}
"""Error of each logit, relative to the largest ones."""


@dataclass(frozen=True)
class Policy:
    """A trainer's distributions, and a server that computes the same with rounding errors."""

    sharpness: float
    seed: int = 0
    dtype: Literal["fp32", "bf16"] = "fp32"
    temperature: float = 0.7
    parts: int = 2
    """responses"""

    @property
    def expected(self) -> ProbeExpectation:
        return replace(EXPECTED, dtype=self.dtype, temperature=self.temperature)

    def _generator(self, purpose: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 10 + purpose)

    def logits(self) -> Tensor:
        """[R, V] of the trainer, before the temperature."""
        return torch.randn(TOKENS, VOCAB, generator=self._generator(0), dtype=torch.float64) * self.sharpness

    def server_logits(self) -> Tensor:
        """Those of a right server."""
        noise = torch.randn(TOKENS, VOCAB, generator=self._generator(1), dtype=torch.float64)
        return self.logits() + noise * NOISE[self.dtype] * self.sharpness * 2

    def tokens(self) -> Tensor:
        """[R] sampled by the server."""
        probabilities = (self.server_logits() / self.temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=self._generator(2)).squeeze(1)

    def routes(self) -> Tensor:
        """[R, L, k] that both sides choose."""
        scores = torch.rand(TOKENS, ROUTING.num_layers, ROUTING.num_experts, generator=self._generator(3))
        return scores.topk(ROUTING.topk).indices.to(ROUTING.dtype)

    def reading(self, ids: Tensor) -> TrainerReading:
        """The trainer's, for the Top-K ids [R, K] that a server gave."""
        scaled, raw = (self.logits() / t for t in (self.temperature, 1.0))
        at_t, at_one = scaled.log_softmax(-1), raw.log_softmax(-1)
        labels = self.tokens()[:, None]
        return TrainerReading(
            logprobs=at_t.gather(1, labels).squeeze(1).numpy(),
            raw_logprobs=at_one.gather(1, labels).squeeze(1).numpy(),
            topk_logprobs=at_t.gather(1, ids.long()).numpy(),
            raw_topk_logprobs=at_one.gather(1, ids.long()).numpy(),
            best_logprobs=at_t.topk(K).values.numpy(),
        )


Change = Callable[[dict[str, Any]], None]


def ask(
    policy: Policy, change: Change | None = None, *, engine: Literal["sglang", "vllm"] = "sglang", routed: bool = False
) -> tuple[ProbeResponse, ProbeExpectation, list[TrainerReading]]:
    """Return the input of ``judge``. ``change`` may alter columns of the server's answer: ``logprobs [R]``, ``ids`` and
    ``values [R, K]``, ``routes [R, L, k]``."""
    logprobs = (policy.server_logits() / policy.temperature).log_softmax(-1)
    values, ids = logprobs.topk(K)
    tokens = policy.tokens()
    columns: dict[str, Any] = {
        "logprobs": logprobs.gather(1, tokens[:, None]).squeeze(1).float().double().numpy(),
        "ids": ids.int().numpy(),
        "values": values.float().numpy(),
        "routes": policy.routes(),
    }
    if change is not None:
        change(columns)
    whole = policy.reading(torch.from_numpy(columns["ids"]))
    generations, readings = [], []
    for part in np.array_split(np.arange(TOKENS), policy.parts):
        where = slice(int(part[0]), int(part[-1]) + 1)
        reading = TrainerReading(**{n: v if v is None else v[where] for n, v in vars(whole).items()})
        if routed:
            reading = _with_routes(reading, columns["routes"][where], policy.routes()[where])
        readings.append(reading)
        generations.append(_generation(columns, tokens.numpy(), where))
    info = ServerInfo(engine=engine, engine_version="1", model="/m", policy_version=3, max_context=64, world_size=1)
    return ProbeResponse(info=info, url="http://s", generations=tuple(generations)), policy.expected, readings


def _generation(columns: dict[str, Any], tokens: Any, where: slice) -> Generation:
    own, logprobs = tokens[where].astype(np.int32), columns["logprobs"][where].astype(np.float32)
    ids, values = append_sampled_token(columns["ids"][where], columns["values"][where], own, logprobs)
    return Generation(
        token_ids=torch.from_numpy(own),
        logprobs=torch.from_numpy(logprobs),
        finish_reason="length",
        versions=(VersionSpan(3, 0, len(own)),),
        topk_token_ids=ids,
        topk_logprobs=values,
        routed_experts=columns["routes"][where],
    )


def _with_routes(reading: TrainerReading, given: Tensor, live: Tensor) -> TrainerReading:
    """Each wrong expert moves the replayed log-probability by 0.4."""
    wrong = (given.sort(-1).values != live.sort(-1).values).any(-1).sum(-1).numpy()
    counts = RouteCounts(count_differences(given, live).numpy())
    return replace(reading, routes=counts, replayed_logprobs=reading.logprobs - 0.4 * wrong)
