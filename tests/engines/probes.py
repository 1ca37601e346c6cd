"""Probing a real server, with transformers as the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_dppo.rollout.probe import Expectation, ProbeResult, Recompute, probe
from megatron_dppo.rollout.server import InferenceServer
from tests.engines.calls import call
from tests.engines.servers import Engine
from tests.engines.tiny import SPECIAL, Reference, byte_tokenizer

TEXT = "One request before the run starts. " * 6


def expectation(**changes: object) -> Expectation:
    ids = tuple(byte_tokenizer(SPECIAL).encode(TEXT))
    base = Expectation(
        prompt=TEXT, prompt_token_ids=ids, vocab_size=512, temperature=0.7, dtype="fp32", topk_logprobs=4
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def trainer(model: Reference) -> Recompute:
    async def recompute(prompt: Sequence[int], response: Sequence[int], temperature: float) -> list[float]:
        return model.logprobs(prompt, response, temperature).tolist()

    return recompute


def run(engine: Engine, expected: Expectation, model: Reference) -> ProbeResult:
    async def use(server: InferenceServer) -> ProbeResult:
        return await probe(server, expected, trainer(model))

    return call(engine, use)
