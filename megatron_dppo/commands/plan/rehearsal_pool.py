"""Pool of processes that rehearse ranks, with all layers of a model or extrapolated from a few."""

from __future__ import annotations

import copy
import os
import pickle
import queue
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any

from megatron_dppo.commands.plan.child import RehearsalRequest
from megatron_dppo.commands.plan.measurement import extrapolate
from megatron_dppo.errors import PlanError

_FEW_LAYERS = (2, 3)
"""Layers of a model chunk that are rehearsed when the rest is extrapolated."""


class RehearsalPool:
    """Pool of worker processes, started on demand and stopped at the end of the block.

    Args:
        jobs: Number of concurrent rehearsals.
    """

    def __init__(self, jobs: int) -> None:
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads = ThreadPoolExecutor(max_workers=jobs)
        for _ in range(jobs):
            self._idle.put(None)

    def __enter__(self) -> RehearsalPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error, cancel pending requests and do not wait for those in flight.
        for process in self._processes if error is not None else ():
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            with process:
                assert process.stdin is not None
                process.stdin.close()

    def run(self, requests: Sequence[RehearsalRequest], *, few_layers: bool = False) -> list[Any]:
        """Return the ``UpdateMeasurement`` of each request.

        Args:
            requests: Ranks to rehearse.
            few_layers: Rehearse 2 and 3 layers of each chunk and extrapolate. All layers must be alike.

        Raises:
            PlanError: A rank cannot be rehearsed, or its code fails.
        """
        if not few_layers:
            return list(self._threads.map(self._run_one, requests))
        short_requests = [_with_layers(request, few) for request in requests for few in _FEW_LAYERS]
        results = list(self._threads.map(self._run_one, short_requests))
        measurements = []
        for i, request in enumerate(requests):
            chunks = request.layout.pp * request.layout.vpp
            layers = request.hf_config.num_hidden_layers // chunks
            measurements.append(extrapolate(dict(zip(_FEW_LAYERS, results[2 * i : 2 * i + 2], strict=True)), layers))
        return measurements

    def _run_one(self, request: RehearsalRequest) -> Any:
        process = self._idle.get() or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            response = pickle.load(process.stdout)  # Trusted: written by our own process.
        except (EOFError, BrokenPipeError) as error:
            self._idle.put(None)
            raise PlanError(f"A rehearsal process exited with code {process.wait()}; see its output above") from error
        self._idle.put(process)
        if isinstance(response, str):
            raise PlanError(f"Rank {request.role.rank} of {request.layout} cannot be rehearsed: {response}")
        return response

    def _start(self) -> subprocess.Popen[bytes]:
        # The worker must not take itself for a rank of a torchrun job that this process belongs to.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        command = [sys.executable, "-W", "ignore", "-m", "megatron_dppo.commands.plan.child"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self._processes.append(process)
        return process


def _with_layers(request: RehearsalRequest, layers: int) -> RehearsalRequest:
    """Return the request with a model of ``layers`` layers per chunk."""
    model = copy.deepcopy(request.hf_config)
    model.num_hidden_layers = layers * request.layout.pp * request.layout.vpp
    # transformers wants one for each layer.
    if getattr(model, "layer_types", None):
        model.layer_types = model.layer_types[: model.num_hidden_layers]
    return replace(request, hf_config=model)
