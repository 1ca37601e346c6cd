"""The memory of servers that are on the trainer's GPUs: released before the trainer uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_dppo.errors import PublishError, ServerError
from megatron_dppo.rollout.attempt import ask_each
from megatron_dppo.rollout.server import InferenceServer

_AGAIN_SECONDS = 0.5


async def release_all(servers: Sequence[InferenceServer], attempts: int) -> list[str]:
    """Until every server that answers has released its memory; returns what the user should know.

    One that does not answer has most likely ended, and has no memory then. One that did not say whether it has released
    it is not asked again: its next answer would be the name that the call before was sent under.

    Raises:
        PublishError: a server refuses: training beside it would run out of memory.
        ConfigError: one was started without what this takes.
    """
    left, failed = list(servers), dict[str, ServerError]()
    for attempt in range(attempts):
        if attempt and left:
            await asyncio.sleep(_AGAIN_SECONDS)
        for url, answer in (await ask_each(left, _release)).items():
            failed.pop(url, None)
            if isinstance(answer, ServerError):
                failed[url] = answer
        left = [server for server in left if server.url in failed and failed[server.url].status is not None]
    if refusals := [str(failed[server.url]) for server in left]:
        raise PublishError(
            "the trainer cannot use its GPUs, since servers on them keep their memory (rollout.servers.colocated):\n"
            + "\n".join(f"  - {refusal}" for refusal in refusals)
        )
    return [f"did not release its memory, and training may lack it: {error}" for error in failed.values()]


async def _release(server: InferenceServer) -> None:
    if not await server.alive():  # soon known of one that was silent before
        raise ServerError(server.url, "no answer")
    await server.release_memory()
