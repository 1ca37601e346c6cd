"""The calls of an episode that are in progress, and how they end."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from megatron_dppo.rollout.turns import TurnsStopped
from megatron_dppo_agents.agent_clock import AgentClock
from megatron_dppo_agents.agent_request import CallError
from megatron_dppo_agents.agent_response import AgentResponse
from megatron_dppo_agents.episode_result import CallCounts


class RunningCalls:
    """Calls of one episode in the current event loop: each runs once, however often its body is sent."""

    def __init__(self, counts: CallCounts) -> None:
        self.interrupted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the exception that ends the episode from the policy's side: a cancellation or a server error."""
        self.clock = AgentClock()
        self._counts = counts
        self._by_digest: dict[bytes, asyncio.Task[AgentResponse]] = {}
        """Calls in progress by the digest of their bodies."""
        self._undelivered: dict[bytes, AgentResponse] = {}
        """Responses that none of their clients has read, by the digest of the call's body."""
        self._num_readers: Counter[str] = Counter()
        """Number of clients that are reading a response or have read it, by ``AgentResponse.name``."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._num_sampling = 0
        self._stop_error: TurnsStopped | None = None

    async def respond(
        self, process: Callable[[], Coroutine[Any, Any, AgentResponse]], digest: bytes = b""
    ) -> AgentResponse:
        """Return the response to a call, or raise ``CallError``.

        A body that is sent again while its first call is in progress gets the same response. So does one whose first
        response found no client to read it. An empty digest is that of no other call.
        """
        if digest in self._undelivered:
            self._counts.repeated += 1
            return self._read(self._undelivered.pop(digest))
        task = self._by_digest.get(digest)
        if task is None:
            task = asyncio.create_task(self._run(process))
            self._tasks.add(task)
            if digest:
                self._by_digest[digest] = task
            task.add_done_callback(lambda done: self._forget(done, digest))
        else:
            self._counts.repeated += 1
        # The call goes on for a client that sends it again.
        return self._read(await asyncio.shield(task))

    def _read(self, response: AgentResponse) -> AgentResponse:
        self._num_readers[response.name] += 1
        return response

    def keep_undelivered(self, digest: bytes, response: AgentResponse) -> None:
        """Keep a response that one of its clients did not read, if there is no other one, for the same body again."""
        self._num_readers[response.name] -= 1
        if not self._num_readers[response.name]:
            self._undelivered[digest] = response

    @property
    def undelivered(self) -> list[AgentResponse]:
        """Responses that no client has read."""
        return list(self._undelivered.values())

    def check_interrupted(self) -> None:
        """Reject a call of an episode that has ended from the policy's side."""
        if self.interrupted.done():
            raise _episode_over()

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample the response of a call in this context."""
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if not self._num_sampling and self._stop_error is not None:
                self._interrupt(self._stop_error)

    def close(self) -> None:
        """Cancel the calls in progress."""
        for task in self._tasks:
            task.cancel()
        if self.interrupted.done():
            self.interrupted.exception()  # marks it as retrieved: asyncio reports an exception that is never read
        else:
            self.interrupted.cancel()

    async def _run(self, process: Callable[[], Coroutine[Any, Any, AgentResponse]]) -> AgentResponse:
        task = asyncio.current_task()
        assert task is not None
        is_answered = False
        self.clock.begin_call(task)
        try:
            response = await process()
            is_answered = True
            return response
        except (CallError, asyncio.CancelledError):
            raise
        except TurnsStopped as error:
            # The other calls in progress are being stopped too. Their tokens are kept only if nothing cancels them.
            self._stop_error = error
            if not self._num_sampling:
                self._interrupt(error)
            await asyncio.wait([self.interrupted])
            raise _episode_over() from error
        except BaseException as error:
            self._interrupt(error)
            raise _episode_over() from error
        finally:
            self.clock.end_call(task, is_answered=is_answered)

    def _interrupt(self, error: BaseException) -> None:
        """End the episode by an error that is the run's, not the agent's: ``run_with_time_limit`` raises it."""
        if not self.interrupted.done():
            self.interrupted.set_exception(error)

    def _forget(self, task: asyncio.Task[AgentResponse], digest: bytes) -> None:
        self._tasks.discard(task)
        self._by_digest.pop(digest, None)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: all clients of the call may be gone


def _episode_over() -> CallError:
    return CallError("the episode has ended", 503, "episode_over")
