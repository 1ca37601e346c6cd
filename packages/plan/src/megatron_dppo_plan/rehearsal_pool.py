"""Pool of processes that rehearse ranks, with all layers of a model or extrapolated from a few."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from types import TracebackType
from typing import Any

from megatron_dppo.errors import PlanError
from megatron_dppo_plan.child import RehearsalRequest
from megatron_dppo_plan.few_layers import choose_layers, with_layers
from megatron_dppo_plan.measurement import extrapolate


class RehearsalTimeout(PlanError):
    """The time limit of rehearsals has passed."""


class RehearsalPool:
    """Pool of worker processes, started on demand and stopped at the end of the block.

    ``jobs`` rehearsals run at once.
    """

    def __init__(self, jobs: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._busy: set[subprocess.Popen[bytes]] = set()
        self.end = math.inf
        """Time (``time.monotonic``) at which rehearsals that still run are killed."""
        self._threads = ThreadPoolExecutor(max_workers=jobs)
        for _ in range(jobs):
            self._idle.put(None)

    def __enter__(self) -> RehearsalPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error, cancel pending requests and do not wait for those in flight.
        if error is not None:
            self._kill(self._processes)
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()

    @staticmethod
    def _kill(processes: Iterable[subprocess.Popen[bytes]]) -> None:
        """Kill workers and the rehearsals that they have forked."""
        for process in processes:
            # Reaped only here and in ``__exit__``, so the id still belongs to this worker's session.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def run(self, requests: Sequence[RehearsalRequest], *, few_layers: bool = False) -> list[Any]:
        """Return the ``UpdateMeasurement`` of each request.

        ``few_layers`` rehearses some layers of each kind and extrapolates. Layers must be split evenly. Raises
        ``RehearsalTimeout`` at the time ``end``, and ``PlanError`` if a rank cannot be rehearsed.
        """
        groups = [_short_requests(request) if few_layers else [(request, 0)] for request in requests]
        results = iter(self._run_all([short for group in groups for short, _ in group]))
        measurements = []
        for group in groups:
            base = next(results)
            additions = [(next(results), count) for _, count in group[1:]]
            measurements.append(extrapolate(base, additions) if additions else base)
        return measurements

    def _run_all(self, requests: Sequence[RehearsalRequest]) -> list[Any]:
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise RehearsalTimeout("The time limit of the rehearsals has passed")
        futures = [self._threads.submit(self._run_one, request) for request in requests]
        wait(futures, timeout=None if seconds == math.inf else seconds)
        if all(future.done() for future in futures):
            return [future.result() for future in futures]
        for future in futures:
            future.cancel()
        self._kill(list(self._busy))
        wait(futures)
        raise RehearsalTimeout(f"The rehearsals took more than {seconds:.0f} s")

    def _run_one(self, request: RehearsalRequest) -> Any:
        process = self._idle.get() or self._start()
        assert process.stdin is not None and process.stdout is not None
        self._busy.add(process)
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            response = pickle.load(process.stdout)  # Trusted: written by our own process.
        except (EOFError, BrokenPipeError) as error:
            self._idle.put(None)
            raise PlanError(f"A rehearsal process exited with code {process.wait()}; see its output above") from error
        finally:
            self._busy.discard(process)
        self._idle.put(process)
        if isinstance(response, str):
            raise PlanError(f"Rank {request.role.rank} of {request.layout} cannot be rehearsed: {response}")
        return response

    def _start(self) -> subprocess.Popen[bytes]:
        # The worker must not take itself for a rank of a torchrun job that this process belongs to.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        command = [sys.executable, "-W", "ignore", "-m", "megatron_dppo_plan.child"]
        # A session of its own, to kill it together with the rehearsal that it has forked.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
        self._processes.append(process)
        return process


def _short_requests(request: RehearsalRequest) -> list[tuple[RehearsalRequest, int]]:
    """Return the request with few layers, and with one more of each kind and how many are left out.

    It is the request itself if the rank has few layers already, or no model has only some of them.
    """
    layout = request.layout
    few = choose_layers(request.hf_config, layout, request.role.rank)
    if few is None:
        return [(request, 0)]
    result = []
    for layers, count in few.variants():
        model = with_layers(request.hf_config, layers, layout.pp * layout.vpp)
        if model is None:
            return [(request, 0)]
        result.append((replace(request, hf_config=model), count))
    return result
