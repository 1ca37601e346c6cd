"""Processes that read answers: the same answers and errors as in this process, and no request is lost with them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import test_sglang
import test_vllm
from columns import ids, logs, mask, same
from http_stub import Stub, with_stub
from megatron_dppo.engines.client_processes import ClientProcesses, ClientProcessSettings
from megatron_dppo.errors import ContractViolation, ResponseLost, ServerError
from megatron_dppo_engines.sampling_sums import rank_sums
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import Contract
from megatron_dppo_engines.servers.frames import Frames
from megatron_dppo_engines.servers.http import Deadlines
from megatron_dppo_engines.servers.pool import ServerPool
from megatron_dppo_engines.sglang import wire as sglang
from megatron_dppo_engines.vllm import wire as vllm

CONTRACT = Contract(vocab_size=512, end_tokens=(2,))
INFO = {"version": "0.5.23", "weight_version": "0"}
KEY = "a-secret-key"


class Case:
    """An engine, a recorded answer of it, and what it says to a client in this process."""

    def __init__(self, engine: str) -> None:
        self.engine, self.is_sglang = engine, engine == "sglang"
        request, self.answer = test_sglang.recorded("0.5.23") if self.is_sglang else test_vllm.recorded()
        name = self.answer["meta_info"]["id"] if self.is_sglang else self.answer["request_id"]
        own = sglang.parse_wire_id(name) if self.is_sglang else name.removeprefix(vllm.wire_id(""))
        self.request = replace(request, request_id=own)
        decode = sglang.decode_generation if self.is_sglang else vllm.decode_generation
        decoded = decode(self.answer, self.request, "http://s")
        # The echo stays in the process, which has checked it.
        self.expected = replace(decoded, echo=None, ranks=rank_sums(decoded, self.request))
        self.path = "/generate" if self.is_sglang else "/inference/v1/generate"

    def stub(self, answer: Any = None) -> Stub:
        return Stub({self.path: self.answer if answer is None else answer, "/server_info": INFO})

    def clients(self, url: str, count: int = 1) -> ClientProcesses:
        settings = ClientProcessSettings(
            engine=self.engine,  # type: ignore[arg-type]
            urls=["http://127.0.0.1:9", url],
            api_key=KEY,
            deadlines=Deadlines(generate=20),
            contract=CONTRACT,
        )
        return ClientProcesses(count, settings)

    def use(self, stub: Stub, run: Callable[[ClientProcesses, Any], Awaitable[None]], count: int = 1) -> None:
        async def with_clients(url: str) -> None:
            clients = self.clients(url, count)
            try:
                await run(clients, SimpleNamespace(url=url))
            finally:
                await clients.close()
            assert not any(pid_exists(pid) for pid in pids(clients))

        with_stub(stub, with_clients)


def pids(clients: ClientProcesses) -> list[int]:
    return [process._process.pid for process in clients.processes]


def pid_exists(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_responses_and_errors_equal_those_of_a_client_in_this_process(engine: str) -> None:
    case = Case(engine)
    wrong = replace(case.request, params=replace(case.request.params, max_new_tokens=3))
    filtered = replace(case.request, params=replace(case.request.params, top_k=4, return_sampling_mask=True))

    async def run(clients: ClientProcesses, server: Any) -> None:
        for result in await asyncio.gather(*(clients.generate(server, case.request) for _ in range(6))):
            assert same(result, case.expected)
        lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in pids(clients)]
        assert not any(KEY in line for line in lines) and stub.calls[-1].headers["Authorization"] == f"Bearer {KEY}"
        with pytest.raises(ContractViolation, match="6, expected at most 3") as breach:
            await clients.generate(server, wrong)
        assert breach.value.field == "number of response tokens" and breach.value.request_id == wrong.request_id
        with pytest.raises(ContractViolation, match="sampling_mask is missing"):
            await clients.generate(server, filtered)
        stub.answers[case.path] = (503, {"detail": "busy"})
        with pytest.raises(ServerError, match="HTTP 503: busy") as refused:
            await clients.generate(server, case.request)
        assert (refused.value.status, refused.value.is_transient, type(refused.value)) == (503, True, ServerError)
        with pytest.raises(ServerError, match=r"127\.0\.0\.1:9") as silent:
            await clients.generate(SimpleNamespace(url="http://127.0.0.1:9"), case.request)  # type: ignore[arg-type]
        assert silent.value.status is None and not silent.value.is_transient

    stub = case.stub()
    case.use(stub, run, count=2)


def test_a_canceled_caller_cancels_the_request_at_the_server() -> None:
    case = Case("vllm")
    ended: list[bool] = []

    async def slow(_: Any) -> Any:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append(True)
            raise
        return case.answer

    async def run(clients: ClientProcesses, server: Any) -> None:
        task = asyncio.create_task(clients.generate(server, case.request))
        await until(lambda: stub.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: ended)
        stub.answers[case.path] = case.answer
        assert same(await clients.generate(server, case.request), case.expected)
        assert all(not process.pending for process in clients.processes)

    stub = case.stub(slow)
    case.use(stub, run)


@pytest.mark.slow
def test_a_request_survives_the_process_that_reads_its_response() -> None:
    case = Case("sglang")
    asked: list[str] = []

    async def first_is_slow(call: Any) -> Any:
        asked.append(call.body["rid"])
        if len(asked) == 1:
            await asyncio.sleep(600)
        answer = {**case.answer, "meta_info": {**case.answer["meta_info"], "id": call.body["rid"]}}
        answer["meta_info"]["weight_versions"] = [{"version": "0", "start": 0, "end": 6}]
        return answer

    async def run(clients: ClientProcesses, server: Any) -> None:
        pool = ServerPool([server], clients.generate, max_in_flight=4, health_seconds=60)
        pool.use_version(0, [server.url])
        task = asyncio.create_task(pool.generate(case.request, "a"))
        await until(lambda: asked)
        (old,) = pids(clients)
        os.kill(old, signal.SIGKILL)
        result = await asyncio.wait_for(task, 20)
        assert same(result.token_ids, case.expected.token_ids) and len(set(asked)) == 2
        assert pool.counts.retries == 1 and pool.counts.evicted_servers == 0, "the server is not to blame"
        assert pids(clients) != [old]

    case.use(case.stub(first_is_slow), run)


@pytest.mark.slow
def test_without_the_pool_a_lost_response_is_an_error() -> None:
    case = Case("sglang")

    async def run(clients: ClientProcesses, server: Any) -> None:
        await clients.generate(server, case.request)
        stub.answers[case.path] = never
        task = asyncio.create_task(clients.generate(server, case.request))
        await until(lambda: len(stub.calls) > 2)
        os.kill(pids(clients)[0], signal.SIGKILL)
        with pytest.raises(ResponseLost, match="process that reads"):
            await task

    async def never(_: Any) -> Any:
        await asyncio.sleep(20)

    stub = case.stub()
    case.use(stub, run)


@pytest.mark.slow
def test_signals_for_the_trainer_do_not_end_it() -> None:
    case = Case("sglang")

    async def run(clients: ClientProcesses, server: Any) -> None:
        await clients.generate(server, case.request)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pids(clients)[0], number)
        assert same(await clients.generate(server, case.request), case.expected)

    case.use(case.stub(), run)


def test_messages_arrive_unchanged_however_they_are_split() -> None:
    columns = {
        "a": ids(range(5)),
        "none": ids([]),
        "b": logs([float("-inf"), -0.5]),
        "c": mask([True, False, True]),
        "routes": torch.arange(24, dtype=torch.uint8).view(2, 3, 4).transpose(0, 1),
        "wide": torch.tensor([[-1]], dtype=torch.int16),
        "empty rows": torch.empty(0, 3),
    }
    sent: list[bytes] = []
    sender = Frames(lambda *_: None, lambda: None)
    sender.connection_made(SimpleNamespace(writelines=lambda parts: sent.append(b"".join(parts))))  # type: ignore[arg-type]
    sender.send({"id": 1, "text": "é\n"}, {**columns, "absent": None})
    sender.send({"id": 2}, {})
    stream = b"".join(sent)
    for size in (1, 7, 64, len(stream)):
        result: list[Any] = []
        receiver = Frames(lambda *message: result.append(message), lambda: None)  # noqa: B023
        rest = stream
        while rest:
            place = receiver.get_buffer(-1)
            count = min(size, len(place), len(rest))
            place[:count], rest = rest[:count], rest[count:]
            receiver.buffer_updated(count)
        assert same(result, [({"id": 1, "text": "é\n"}, columns), ({"id": 2}, {})])
        assert len({column.untyped_storage().data_ptr() for column in result[0][1].values() if len(column)}) == 5


async def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_a_request_keeps_all_its_fields_on_the_way() -> None:
    from megatron_dppo.engines.client_process import request_from_json
    from megatron_dppo.engines.client_processes import request_to_json
    from megatron_dppo.types import RoutingShape, SamplingParams

    routing = RoutingShape(num_layers=3, num_experts=9, topk=2, dense_layers=frozenset({0, 2}))
    request = GenerateRequest(
        request_id="x",
        token_ids=(1, 2),
        params=SamplingParams(max_new_tokens=3, temperature=0.25, seed=9, topk_logprobs=4, routed_experts=True),
        stop_token_ids=(7, 8),
        routing=routing,
        routing_start=5,
    )
    for each in (request, replace(request, routing=None)):
        assert request_from_json(json.loads(json.dumps(request_to_json(each))), (1, 2)) == each


@pytest.mark.slow
def test_a_generation_without_tokens_stays_one() -> None:
    case = Case("sglang")
    nothing = {"output_ids": [], "meta_info": {**case.answer["meta_info"], "finish_reason": {"type": "abort"}}}

    async def run(clients: ClientProcesses, server: Any) -> None:
        completions = await clients.generate(server, case.request)
        assert (
            same(completions, replace(Generation.empty(completions.finish_reason), echo=None))
            and completions.finish_reason == "abort"
        )

    case.use(case.stub(nothing), run)


def test_a_process_without_requests_exits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine it takes longer to start than a run would wait for its end.
    monkeypatch.setattr("megatron_dppo.engines.client_processes.EXIT_SECONDS", 60.0)

    async def run() -> int | None:
        clients = Case("sglang").clients("http://127.0.0.1:9")
        (process,) = clients.processes
        await clients.close()
        return process._process.returncode

    assert asyncio.run(run()) == 0, "it was not killed"
