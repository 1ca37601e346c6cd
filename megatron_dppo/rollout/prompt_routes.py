"""The routes of a prompt's tokens, asked for once for all responses to it."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from torch import Tensor

from megatron_dppo.rollout.pool import ServerPool
from megatron_dppo.rollout.server import GenerateRequest
from megatron_dppo.types import Prompt, RoutingShape, SamplingParams

WORTH_ASKING_ONCE = 512
"""Tokens of a prompt: the routes of a shorter one, in each answer, cost less than one request more."""


class PromptRoutes:
    """What the siblings of one prompt have in common. Belongs to one event loop.

    A request for one token brings the routes, and the prompt into the server's prefix cache, before the siblings ask.

    Args:
        pool: the servers.
        prompt: of P tokens.
        params: of the responses.
        routing: the shape of routes.
        end: tokens after which a response is complete.
    """

    def __init__(
        self, pool: ServerPool, prompt: Prompt, params: SamplingParams, routing: RoutingShape, end: tuple[int, ...]
    ) -> None:
        self._pool, self._prompt, self._routing, self._end = pool, prompt, routing, end
        self._params = replace(params, max_new_tokens=1, topk_logprobs=0)
        self._known: dict[int, Tensor] = {}
        self._asking, self._numbers = asyncio.Lock(), itertools.count()

    async def by(self, version: int, name: str, affinity: str) -> Tensor | None:
        """Routes ``[P - 1, L, k]`` by the weights of a version; None = these are gone, or the request was stopped.

        That of the prompt's last token is not among them: each response reads it anew.

        Args:
            version: of the weights.
            name: begins that of a request.
            affinity: of the siblings.

        Raises:
            ServerError: see ``ServerPool.generate``.
        """
        async with self._asking:
            if version not in self._known and version == self._pool.version:
                request = GenerateRequest(
                    request_id=f"{name}-routes-{next(self._numbers)}",
                    token_ids=self._prompt.token_ids,
                    params=self._params,
                    stop_token_ids=self._end,
                    routing=self._routing,
                )
                found = await self._pool.generate(request, affinity)
                if found.routed_experts is not None:
                    self._known[found.versions[0].policy_version] = found.routed_experts[:-1].clone()
        return self._known.get(version)
