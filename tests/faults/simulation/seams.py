"""Seams at which the simulation replaces threads, sockets, clocks, files and other ranks. Nothing else is replaced."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import pickle
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from megatron_dppo.engines import server_engine
from megatron_dppo.rollout import pending, scheduler
from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.run import gpus
from megatron_dppo.setup import engines
from megatron_dppo.weights import ipc, proof, transfer
from megatron_dppo.weights import probe as trainer_probe
from megatron_dppo.weights import sync as weight_sync
from megatron_dppo.weights.probe_requests import RouteCounts, TrainerReading
from megatron_dppo_engines.route_checks import count_differences
from megatron_dppo_engines.servers import http
from megatron_dppo_engines.servers.pool import ServerPool
from megatron_dppo_engines.sglang import client
from megatron_dppo_engines.sglang import weights as sglang_weights
from megatron_dppo_engines.sglang import wire as client_wire
from megatron_dppo_engines.shared_memory import HostHandle
from tests.faults.simulation import invariants, model
from tests.faults.simulation import trainer as trainer_model

_numbers = itertools.count()


class Task(asyncio.Task):
    """Stands in sets by its number, not by its address, so that every run of a seed goes through them alike."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


class _Gathering(asyncio.tasks._GatheringFuture):  # type: ignore[name-defined]
    """Likewise."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **kwargs)

    def __hash__(self) -> int:
        return self._number


def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> Task:
    return Task(coroutine, loop=loop, **kwargs)


class World:
    """Simulation that runs in this process now."""

    loop: Any
    network: Any
    life: Any
    trainer: Any
    started: list[Any]
    """tasks that nobody waits for"""
    disk: dict[str, dict[str, bytes]]
    names: Iterator[int]
    """in place of random names"""
    foreign: dict[int, Any]
    """answers that were given to another request, by the address of their tokens"""
    taken: list[str]
    """what our code took and should not have taken"""


NOW = World()


class _Runner:
    """In place of a ``LoopThread`` and of an ``asyncio.Runner``."""

    def __init__(self, *_: Any) -> None:
        pass

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return NOW.loop.run(coroutine)

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        NOW.started.append(NOW.loop.create_task(coroutine))

    def close(self) -> None:
        pass


class _Future(concurrent.futures.Future):
    """In place of one that another thread sets: whoever waits for it lets the world go on."""

    def result(self, timeout: float | None = None) -> Any:
        _wait([self])
        return super().result(0)

    def exception(self, timeout: float | None = None) -> Any:
        _wait([self])
        return super().exception(0)


def _wait(futures: list[Any], return_when: str = concurrent.futures.ALL_COMPLETED) -> None:
    enough = any if return_when == concurrent.futures.FIRST_COMPLETED else all

    def is_enough() -> bool:
        return enough(future.done() for future in futures)

    async def wait() -> None:
        event = asyncio.Event()
        for future in futures:
            future.add_done_callback(lambda _: event.set() if is_enough() else None)
        await event.wait()

    if not is_enough():
        NOW.loop.run(wait())


class _Executor:
    """In place of a thread that scores: it does so at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, call: Callable[..., None], *args: Any) -> None:
        call(*args)

    def shutdown(self, **_: Any) -> None:
        pass


def _decode(answer: Any, request: Any, url: str, decode: Any = client.decode_generation) -> Any:
    generation = decode(answer, request, url)
    name = answer["meta_info"].get("id")
    if name != client_wire.wire_id(request.request_id):
        # By its tokens: the pool passes on a copy of the record, with the same columns.
        NOW.foreign[id(generation.token_ids)] = generation
    return generation


def _append(response: Any, generation: Any, append: Any = GrowingResponse.append_sampled) -> None:
    if id(generation.token_ids) in NOW.foreign and len(generation.token_ids):
        NOW.taken.append("an answer to another request was taken")
    if len(generation.token_ids):
        NOW.taken += [f"an answer was taken with {text}" for text in invariants.check_consistent(generation)]
    append(response, generation)


async def _send(self: Any, server: Any, request: Any, send: Any = ServerPool._send) -> Any:  # reaches: as below
    """Look at what the pool believes of a server before and after a request."""
    if len(server.violations) >= 2:
        NOW.taken.append(f"{server.url} got a request after {len(server.violations)} violations of the contract")
    evictions = server.evictions
    generation = await send(self, server, request)
    if server.evictions != evictions:
        NOW.taken.append(f"an answer of {server.url} was taken, which was given up meanwhile")
    return generation


def _select(sampled: Any, count: int, *args: Any, select: Any = scheduler.select_rollouts, **kwargs: Any) -> Any:
    collected = select(sampled, count, *args, **kwargs)
    NOW.taken += invariants.check_selection(sampled, count, collected.groups)
    return collected


def _open(http_client: Any) -> Any:
    if http_client._session is None:
        http_client._session = NOW.network.session(NOW.life)
    return http_client._session


def _one_tensor_each(buckets: Callable[[Any, int], Any], weights: Any, limit: int) -> Any:
    """Several buckets a sync: the model is far smaller than one of a megabyte."""
    return buckets(weights, 1)


def _save_folder(folder: Path, model_folder: Path, weights: Any, dtype: Any) -> None:
    NOW.disk[str(folder.resolve())] = {name: tensor.numpy().tobytes() for name, tensor in weights}


class _Bucket:
    """In place of shared memory: the handle holds the bytes, so that a call that comes late reads what it was sent."""

    def __init__(self, data: torch.Tensor, readers: int) -> None:
        self.handle = HostHandle(data.numpy().tobytes(), data.nbytes)

    def free(self, *, taken: bool) -> None:
        pass


def _flattened_bucket(handle: HostHandle, names: Any, dtypes: Any, shapes: Any) -> bytes:
    """The tensors of a bucket by name, as ``SimServer`` reads them."""
    tensors, start = {}, 0
    for name, shape in zip(names, shapes, strict=True):
        end = start + 4 * math.prod(shape)
        tensors[name] = handle.name[start:end]
        start = end
    return pickle.dumps(tensors)


def _read_answers(trainer: Any, answers: Any, expected: Any, budget: int) -> list[list[TrainerReading]]:
    return [[_read(trainer, expected, g) for g in answer.generations] for answer in answers]


def _read(trainer: Any, expected: Any, generation: Any) -> TrainerReading:
    """Return the trainer's log-probabilities of a response, by the table."""
    tokens = generation.token_ids.tolist()
    rows = np.array(trainer.rows([*expected.prompt_token_ids, *tokens])[:-1])
    part = rows[len(expected.prompt_token_ids) - 1 :]
    logprobs = model.LOGPROBS[part].astype(np.float64)
    own = logprobs[np.arange(len(tokens)), tokens]
    topk = best = routes = replayed = None
    if k := expected.topk_logprobs:
        topk = np.take_along_axis(logprobs, generation.topk_token_ids.numpy()[:, :k].astype(np.int64), 1)
        best = model.RANKED_LOGPROBS[part, :k].astype(np.float64)
    if expected.routing is not None:
        live = torch.from_numpy(model.ROUTES[rows]).to(generation.routed_experts.dtype)
        routes = RouteCounts(count_differences(generation.routed_experts, live).numpy())
        changed = trainer_model.replayed(rows, generation.routed_experts.numpy())[-len(tokens) :]
        replayed = model.LOGPROBS[changed, tokens].astype(np.float64)
    return TrainerReading(
        logprobs=own,
        raw_logprobs=own,
        topk_logprobs=topk,
        raw_topk_logprobs=topk,
        best_logprobs=best,
        routes=routes,
        replayed_logprobs=replayed,
    )


def _no_real_wait(seconds: float) -> None:
    raise AssertionError(f"the code waits {seconds:g} s of real time: the simulation's clock cannot drive that")


@contextmanager
def installed() -> Iterator[None]:
    """Every seam, for as long as it lasts."""
    clock = SimpleNamespace(monotonic=lambda: NOW.loop.time())
    alone = SimpleNamespace(get_rank=lambda: 0)
    patches = [
        mock.patch.object(server_engine, "LoopThread", _Runner),
        mock.patch("uuid.uuid4", lambda: SimpleNamespace(hex=f"{next(NOW.names):032x}"[::-1])),
        mock.patch.object(weight_sync.asyncio, "Runner", _Runner),
        mock.patch.object(proof, "Random", lambda: Random(0)),
        mock.patch.object(weight_sync, "save_hf_folder", _save_folder),
        mock.patch.object(transfer, "Buckets", partial(_one_tensor_each, transfer.Buckets)),
        mock.patch.object(ipc, "SharedBucket", _Bucket),
        mock.patch.object(sglang_weights, "as_flattened_bucket", _flattened_bucket),
        mock.patch.object(Path, "mkdir", lambda *_, **__: None),
        mock.patch.object(pending, "ThreadPoolExecutor", _Executor),
        mock.patch.object(scheduler, "wait", _wait),
        *(mock.patch.object(module, "Future", _Future) for module in (server_engine, pending, scheduler)),
        mock.patch.object(http.HttpClient, "_open", _open),  # reaches: the network is simulated
        mock.patch.object(engines, "dist", alone),
        mock.patch.object(gpus, "dist", alone),
        mock.patch.object(gpus.asyncio, "run", lambda coroutine: NOW.loop.run(coroutine)),
        mock.patch.object(client, "decode_generation", _decode),
        mock.patch.object(GrowingResponse, "append_sampled", _append),
        mock.patch.object(ServerPool, "_send", _send),  # reaches: to look at each single attempt
        mock.patch.object(scheduler, "select_rollouts", _select),
        mock.patch.object(trainer_probe, "compute_readings", _read_answers),
        mock.patch.object(asyncio.tasks, "_GatheringFuture", _Gathering),
        *(
            mock.patch.object(module, "time", clock)
            for name, module in list(sys.modules.items())
            if name.startswith("megatron_dppo.rollout") and hasattr(module, "time")
        ),
        mock.patch("time.sleep", _no_real_wait),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
