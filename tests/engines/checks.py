"""Checks of responses of any engine against transformers."""

from __future__ import annotations

import asyncio

import torch

from megatron_dppo.types import VersionSpan
from megatron_dppo_engines.server import Generation, InferenceServer
from tests.engines.calls import LONG, SHORT, ask, call
from tests.engines.servers import Engine
from tests.engines.tiny import END, Reference, difference


def check_logprobs(engine: Engine, model: Reference, temperature: float) -> None:
    """Those of transformers at the sampling temperature."""
    requests = [ask(prompt, 40, temperature=temperature) for prompt in (SHORT, LONG, SHORT)]

    async def use(server: InferenceServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    for request, answer in zip(requests, call(engine, use), strict=True):
        # Greedy decoding reports the unscaled distribution.
        expected = model.logprobs(request.token_ids, answer.token_ids.tolist(), temperature or 1.0)
        assert len(answer.token_ids) == 40 or answer.token_ids[-1] == END
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] == END else "length")
        assert answer.versions == (VersionSpan(-1, 0, len(answer.token_ids)),)
        assert difference(answer.logprobs, expected) < 1e-5


def check_topk(engine: Engine, model: Reference) -> None:
    """The most probable tokens, and always the sampled one."""
    request = ask(SHORT, 120, temperature=0.7, topk=5)
    answer = call(engine, lambda server: server.generate(request))
    assert answer.topk_token_ids is not None and answer.topk_logprobs is not None
    expected = model.distributions(SHORT, answer.token_ids.tolist(), 0.7)
    values = expected.topk(5).values
    assert difference(answer.topk_logprobs[:, :5], values) < 1e-5
    # Two tokens may trade places where they are equally probable.
    assert difference(expected.gather(1, answer.topk_token_ids[:, :5].long()), values) < 1e-5
    sampled = answer.token_ids[:, None]
    outside = ~(answer.topk_token_ids[:, :5] == sampled).any(1)
    assert outside.any() and not outside.all(), "the case needs sampled tokens inside and outside of the Top-K"
    assert torch.equal(answer.topk_token_ids[:, 5], torch.where(outside, sampled.squeeze(1), -1).int())
    torch.testing.assert_close(answer.topk_logprobs[:, 5], torch.where(outside, answer.logprobs, 0.0), atol=0, rtol=0)
    assert (answer.topk_token_ids == sampled).sum(1).eq(1).all()


def check_stop(engine: Engine) -> None:
    """A token of the request ends the response, and is its last one."""
    greedy = call(engine, lambda server: server.generate(ask(SHORT, 12, temperature=0)))
    tokens = greedy.token_ids.tolist()
    stop = tokens[5]
    answer = call(engine, lambda server: server.generate(ask(SHORT, 12, temperature=0, stop=(stop,))))
    assert answer.finish_reason == "stop"
    assert answer.token_ids.tolist() == tokens[: tokens.index(stop) + 1]


def check_filters(engine: Engine) -> None:
    """Without sampling masks, as evaluation has them: filters that leave one token give the greedy answer."""
    narrow: tuple[dict[str, float], ...] = ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999})
    requests = [ask(SHORT, 12, temperature=0), *(ask(SHORT, 12, **filters) for filters in narrow)]

    async def use(server: InferenceServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(request) for request in requests))

    greedy, *result = (answer.token_ids.tolist() for answer in call(engine, use))
    assert result == [greedy] * 3
