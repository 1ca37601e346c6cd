"""The client of vLLM against answers that real servers gave (tests/engines/record_vllm.py)."""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from columns import ids, logs, same
from http_stub import Stub, with_stub
from megatron_dppo_engines.errors import ConfigError, ContractViolation, ServerError
from megatron_dppo_engines.responses import FinishReason, SamplingParams, VersionSpan
from megatron_dppo_engines.routes import RoutingShape
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.shared_memory import HostHandle, as_json
from megatron_dppo_engines.vllm import VLLMServer, wire
from megatron_dppo_engines.weight_digests import RankDigests

DATA = Path(__file__).parent / "data" / "vllm"
RIGHT, PLAIN, CLOSED = (json.loads((DATA / f"{name}.json").read_text()) for name in ("right", "plain", "closed"))
ROUTING = RoutingShape(num_layers=2, num_experts=8, topk=2)


def recorded(name: str = "generate") -> tuple[GenerateRequest, Any]:
    """A request and a copy of its answer."""
    case = copy.deepcopy(RIGHT[name])
    params = SamplingParams(max_new_tokens=case["tokens"], temperature=0.7, topk_logprobs=3)
    return GenerateRequest(request_id="r", token_ids=tuple(case["prompt"]), params=params), case["answer"]


def decode(request: GenerateRequest, answer: Any) -> Generation:
    return wire.decode_generation(answer, request, "http://s/generate")


def npy(routes: Any) -> str:
    """As vLLM sends routed experts."""
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def routed(rows: int = 22, dtype: str = "uint8") -> Any:
    """[rows, 2, 2], what row and layer it is can be read from the values."""
    first = np.arange(rows * 2).reshape(rows, 2) % 7
    return np.stack([first, first + 1], -1).astype(dtype)


def test_a_response_becomes_a_generation() -> None:
    request, answer = recorded()
    result, choice = decode(request, answer), answer["choices"][0]
    assert same(result.token_ids, ids(choice["token_ids"])) and len(result.token_ids) == 6
    assert same(result.logprobs, logs(entry["logprob"] for entry in choice["logprobs"]["content"]))
    assert result.finish_reason == "length" and result.versions == (VersionSpan(-1, 0, 6),)
    assert result.topk_token_ids is not None and result.topk_logprobs is not None
    assert result.topk_token_ids.dtype == torch.int32 and result.topk_logprobs.dtype == torch.float32
    for step, (token, entry) in enumerate(zip(result.token_ids.tolist(), choice["logprobs"]["content"], strict=True)):
        row = result.topk_token_ids[step].tolist()
        assert row[3] == (token if row.index(token) == 3 else -1)
        sampled_logprob = float(result.topk_logprobs[step, row.index(token)])
        assert sampled_logprob == pytest.approx(float(result.logprobs[step]), abs=1e-6)
        by_rank = {candidate["rank"]: candidate["token_id"] for candidate in entry["top_logprobs"]}
        assert row[:3] == [by_rank[1], by_rank[2], by_rank[3]]
    assert result.routed_experts is None


def test_a_sampled_token_among_the_top_k_leaves_the_last_slot_unused_at_any_position() -> None:
    request, answer = recorded()
    entry = answer["choices"][0]["logprobs"]["content"][0]
    ranked = [{"token_id": 100 + rank, "logprob": -float(rank), "rank": rank} for rank in (1, 2, 3, 4)]
    entry.update(token_id=102, logprob=-2.0, top_logprobs=[ranked[1], ranked[0], *ranked[2:]])
    answer["choices"][0]["token_ids"][0] = 102
    result = decode(request, answer)
    assert result.topk_token_ids is not None and result.topk_logprobs is not None
    assert result.topk_token_ids[0].tolist() == [101, 102, 103, -1]
    assert result.topk_logprobs[0].tolist() == [-1.0, -2.0, -3.0, 0.0]


def test_an_aborted_request_keeps_its_tokens_unless_it_needs_routed_experts() -> None:
    request, answer = recorded("aborted")
    result = decode(request, answer)
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) == len(result.logprobs)
    nothing = replace(decode(replace(request, routing=ROUTING), answer), echo=None)
    assert same(nothing, Generation.empty(FinishReason.ABORT))


@pytest.mark.parametrize(("dtype", "experts"), [("uint8", 8), ("uint16", 300), ("int32", 8)])
def test_routed_experts_are_decoded_from_a_numpy_file_of_small_integers(dtype: str, experts: int) -> None:
    request, answer = recorded()
    shape = replace(ROUTING, num_experts=experts)
    answer["choices"][0]["routed_experts"] = npy(routed(dtype=dtype))
    result = decode(replace(request, routing=shape), answer)
    assert result.routed_experts is not None and result.routed_experts.dtype == shape.dtype
    assert result.routed_experts.tolist() == routed().tolist()
    answer["choices"][0]["routed_experts"] = npy(routed(rows=18, dtype=dtype))
    routes_from_start = decode(replace(request, routing=shape, routing_start=4), answer).routed_experts
    assert routes_from_start is not None and len(routes_from_start) == 18


def test_routes_of_dense_layers_are_ignored() -> None:
    request, answer = recorded()
    values = routed(dtype="uint16")
    values[:, 0] = 60000
    answer["choices"][0]["routed_experts"] = npy(values)
    result = decode(replace(request, routing=replace(ROUTING, dense_layers=frozenset({0}))), answer)
    assert result.routed_experts is not None
    assert (result.routed_experts[:, 0] == 255).all()
    assert result.routed_experts[:, 1].tolist() == routed()[:, 1].tolist()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (npy(routed(rows=21)), "21 tokens for 22 input"),
        (npy(routed()[:, :, :1]), r"shape \(22, 2, 1\), expected"),
        (npy(np.full((22, 2, 2), 255, "uint8")), "does not exist: 255"),
        (npy(routed().astype("float32")), "not a NumPy file"),
        (npy(np.array([{"a": 1}], dtype=object)), "not a NumPy file"),
        ("not base64!", "is not base64"),
        (base64.b64encode(b"\x93NUMPY").decode(), "not a NumPy file"),
        (base64.b64encode(b"PK\x03\x04").decode(), "not a NumPy file"),
        ("", "not a NumPy file"),
    ],
)
def test_mismatched_routed_experts_are_rejected_and_nothing_is_unpickled(sent: str, message: str) -> None:
    request, answer = recorded()
    answer["choices"][0]["routed_experts"] = sent
    with pytest.raises(ServerError, match=message):
        decode(replace(request, routing=ROUTING), answer)


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        ("token_ids", "the servers themselves"),
        ("logprobs", "the servers themselves"),
        ("finish_reason", "the servers themselves"),
        ("weight_versions", r"vLLM 0\.32"),
        ("routed_experts", "--enable-return-routed-experts"),
    ],
)
def test_a_missing_field_is_an_error_that_names_it_and_its_cause(field: str, cause: str) -> None:
    request, answer = recorded()
    answer["choices"][0]["routed_experts"] = npy(routed())
    answer["choices"][0][field] = None
    message = rf"/generate: the response to request r .*choices\[0\]\.{field} is missing: .*{cause}"
    with pytest.raises(ContractViolation, match=message):
        decode(replace(request, routing=ROUTING), answer)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c["token_ids"].pop(), "belongs to other"),
        (lambda c: c["logprobs"].pop("content"), "content is missing"),
        (lambda c: c["weight_versions"][0].update(end=5), "does not cover"),
        (lambda c: c.update(finish_reason="tired"), "expected stop, length"),
        (lambda c: c["logprobs"]["content"][2].update(top_logprobs=[]), r"content\[2\]\.top_logprobs has no token"),
    ],
)
def test_a_response_that_does_not_match_the_request_is_rejected(damage: Callable[[Any], Any], message: str) -> None:
    request, answer = recorded()
    damage(answer["choices"][0])
    with pytest.raises(ServerError, match=message):
        decode(request, answer)


@pytest.mark.parametrize("answer", ["hello", {}, {"choices": []}])
def test_another_kind_of_response_is_rejected(answer: Any) -> None:
    with pytest.raises(ServerError, match="object with one"):
        decode(recorded()[0], answer)


def test_weight_versions_are_parsed_and_the_lowest_number_is_minus_infinity() -> None:
    request, answer = recorded()
    choice = answer["choices"][0]
    choice["weight_versions"] = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 6}]
    entry = choice["logprobs"]["content"][0]
    entry["logprob"] = -9999.0
    next(c for c in entry["top_logprobs"] if c["rank"] == 3)["logprob"] = -9999.0
    result = decode(request, answer)
    assert result.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 6))
    assert result.topk_logprobs is not None and result.topk_logprobs[0, 2] == float("-inf") == result.logprobs[0]


def test_the_request_has_every_sampling_setting_except_the_seed_that_crashes_a_cpu_server() -> None:
    request, _ = recorded()
    body = wire.generate_body(replace(request, routing=ROUTING, routing_start=4, stop_token_ids=(2, 9)))
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (0.7, 1.0, 0, 0.0)
    assert sampling["repetition_penalty"] == 1.0 and sampling["stop_token_ids"] == [2, 9]
    assert sampling["routed_experts_prompt_start"] == 4 and sampling["logprobs"] == 4
    assert "seed" not in sampling
    plain = wire.generate_body(replace(request, params=replace(request.params, topk_logprobs=0)))["sampling_params"]
    assert plain["logprobs"] == 2 and "routed_experts_prompt_start" not in plain


FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "min_p": 0.05}


def filtered() -> tuple[GenerateRequest, Any, Generation]:
    """A recorded answer as it is under filters that left the sampled token, the most probable one and id 90, with the
    lowest number where a filter cut; and the answer without them. Made by hand: vLLM has it on GPUs alone."""
    request, answer = recorded()
    plain, choice = decode(request, answer), answer["choices"][0]
    assert plain.topk_token_ids is not None
    choice["sampling_mask"] = [
        [*dict.fromkeys((best, token, 90))]
        for best, token in zip(plain.topk_token_ids[:, 0].tolist(), plain.token_ids.tolist(), strict=True)
    ]
    for allowed, entry in zip(choice["sampling_mask"], choice["logprobs"]["content"], strict=True):
        for candidate in entry["top_logprobs"]:
            if candidate["token_id"] not in allowed:
                candidate["logprob"] = -9999.0
    return replace(request, params=replace(request.params, return_sampling_mask=True, **FILTERS)), answer, plain


def test_allowed_ids_are_parsed_and_filtered_ids_leave_the_topk() -> None:
    request, answer, plain = filtered()
    result, sets = decode(request, answer), answer["choices"][0]["sampling_mask"]
    assert result.sampling_mask is not None and result.topk_token_ids is not None and result.topk_logprobs is not None
    assert [part.tolist() for part in result.sampling_mask.ids.split(result.sampling_mask.counts.tolist())] == sets
    assert same(result.logprobs, plain.logprobs), "vLLM's are those over the allowed ids already"
    assert plain.topk_token_ids is not None and plain.topk_logprobs is not None
    cut = 0
    for row, allowed in enumerate(sets):
        before = dict(zip(plain.topk_token_ids[row].tolist(), plain.topk_logprobs[row].tolist(), strict=True))
        after = dict(zip(result.topk_token_ids[row].tolist(), result.topk_logprobs[row].tolist(), strict=True))
        assert {i: v for i, v in after.items() if i >= 0} == {i: v for i, v in before.items() if i in allowed}
        used = result.topk_token_ids[row, :-1] >= 0
        assert used.tolist() == sorted(used.tolist(), reverse=True), "unused slots stand behind the others"
        cut += len(used) - int(used.sum())
    assert cut, "the case has tokens that a filter cut"
    assert {name: wire.sampling_params(request.params, ())[name] for name in FILTERS} == FILTERS


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c.pop("sampling_mask"), "sampling_mask is missing: start"),
        (lambda c: c["sampling_mask"].pop(), "sampling_mask has 5 sets, expected 6"),
        (lambda c: c["sampling_mask"].__setitem__(2, 7), r"sampling_mask\[2\] is 7, expected"),
        (lambda c: c["sampling_mask"].__setitem__(1, [3, "4"]), r"sampling_mask\[1\]\[1\] is '4', expected"),
    ],
)
def test_invalid_allowed_ids_are_reported(damage: Callable[[Any], Any], message: str) -> None:
    request, answer, _ = filtered()
    damage(answer["choices"][0])
    with pytest.raises(ContractViolation, match=message):
        decode(request, answer)


def test_an_aborted_request_without_its_allowed_ids_counts_as_one_without_tokens() -> None:
    request, answer, _ = filtered()
    answer["choices"][0] |= {"sampling_mask": None, "finish_reason": "abort"}
    generation = decode(request, answer)
    assert generation.finish_reason == FinishReason.ABORT and not len(generation.token_ids)


def test_greedy_requests_of_a_server_that_returns_allowed_ids_are_for_the_one_token_of_top_k_1() -> None:
    request, answer, _ = filtered()
    plain = replace(request, params=SamplingParams(max_new_tokens=6, temperature=0.0, topk_logprobs=3))
    stub = Stub(server_answers(**{"/inference/v1/generate": answer}))

    async def use(server: VLLMServer) -> None:
        for each in (plain, request, plain):
            await server.generate(each)

    use_server(stub, use)
    sent = [call.body["sampling_params"] for call in stub.calls if call.path == "/inference/v1/generate"]
    assert [(each["temperature"], each["top_k"]) for each in sent] == [(0.0, 0), (0.7, 40), (1.0, 1)]


def server_answers(case: dict[str, Any] = RIGHT, **changes: Any) -> dict[str, Any]:
    """A server that agrees to everything."""
    names = "pause resume abort_requests start_weight_update update_weights finish_weight_update update_weight_version "
    names += "init_weight_transfer_engine shutdown_weight_transfer_engine collective_rpc"
    return {
        **{f"/{name}": {"message": "ok"} for name in names.split()},
        **{f"/{name}": case[name] for name in ("server_info", "version", "weight_info", "get_world_size")},
        "/reset_prefix_cache": {"success": True},
        "/tokenize": RIGHT["tokenize"],
        "/health": None,
        **changes,
    }


def use_server(stub: Stub, use: Callable[[VLLMServer], Awaitable[Any]]) -> Any:
    async def run(url: str) -> Any:
        server = VLLMServer(url, api_key="key")
        try:
            return await use(server)
        finally:
            await server.close()

    return with_stub(stub, run)


HANDLE = HostHandle(b"/torch_1", 8)


async def update(server: VLLMServer) -> None:
    await server.pause()
    await server.begin_update()
    await server.receive_handles(["w"], ["float32"], [[2]], [HANDLE])
    await server.end_update(4)
    await server.resume()


def said(stub: Stub) -> list[str]:
    """The versions that the server was told, in order."""
    return [call.body["new_version"] for call in stub.calls if call.path == "/update_weight_version"]


def test_an_update_flushes_caches_before_it_sets_the_version() -> None:
    stub = Stub(server_answers())
    use_server(stub, update)
    calls = [call for call in stub.calls if call.path not in ("/server_info", "/weight_info")]
    assert [call.path.strip("/") for call in calls] == [
        "pause",
        "update_weight_version",
        "collective_rpc",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "update_weight_version",
        "resume",
    ]
    assert calls[2].body == {"method": "megatron_dppo_close_update"} and said(stub) == ["incomplete", "4"]
    bucket = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2]], "memory": as_json(HANDLE)}
    assert calls[4].body == {"update_info": [bucket]}
    assert {call.headers["Authorization"] for call in calls} == {"Bearer key"}


def test_a_refused_flush_leaves_the_version_incomplete() -> None:
    stub = Stub(server_answers(**{"/reset_prefix_cache": {"success": False}}))
    with pytest.raises(ServerError, match=r"reset_prefix_cache.*reports a failure"):
        use_server(stub, update)
    assert said(stub) == ["incomplete"]


@pytest.mark.parametrize(
    ("detail", "state", "versions"),
    [
        (RIGHT["bad_folder"]["detail"], "version 'default', are still", ["incomplete", "default"]),
        ("Worker failed with error 'boom'", "old and half", ["incomplete"]),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_an_error_with_the_served_version(
    detail: str, state: str, versions: list[str]
) -> None:
    stub = Stub(server_answers(**{"/collective_rpc": (500, {"error": {"message": detail}})}))
    with pytest.raises(ServerError, match=rf"cannot load '/nowhere': .*{state}"):
        use_server(stub, lambda server: server.update_from_disk("/nowhere", 3))
    assert said(stub) == versions
    assert stub.paths[-1] == "/resume"


def test_a_stock_server_loads_from_disk_and_rejects_transfers_with_a_fix() -> None:
    stub = Stub(server_answers(PLAIN))
    use_server(stub, lambda server: server.update_from_disk("/folder", 3))
    rpc = [call.body for call in stub.calls if call.path == "/collective_rpc"]
    assert rpc == [{"method": "reload_weights", "kwargs": {"weights_path": "/folder"}}]
    for backend in ("nccl", "gloo"):
        with pytest.raises(ConfigError, match=r"'nccl'.*--worker-extension-cls"):
            use_server(stub, lambda server, b=backend: server.join_group("h", 1, 1, 2, b))


@pytest.mark.parametrize("case", [RIGHT, PLAIN])
def test_resuming_closes_an_open_update_if_the_server_supports_it(case: dict[str, Any]) -> None:
    stub = Stub(server_answers(case, **{"/weight_info": {"weight_version": "incomplete"}}))
    use_server(stub, lambda server: server.resume())
    closed = [call.body for call in stub.calls if call.path == "/collective_rpc"]
    assert closed == ([{"method": "megatron_dppo_close_update"}] if case is RIGHT else [])


def test_a_server_without_control_endpoints_is_reported_with_the_variable_to_set() -> None:
    refusal = (CLOSED["no_control"]["status"], {"detail": CLOSED["no_control"]["detail"]})
    calls: list[Callable[[VLLMServer], Awaitable[Any]]] = [
        lambda server: server.info(),
        lambda server: server.pause(),
        lambda server: server.abort(),
    ]
    for call in calls:
        stub = Stub({"/version": {}} | {path: refusal for path in ("/server_info", "/pause", "/abort_requests")})
        with pytest.raises(ServerError, match=r"HTTP 404: .*VLLM_SERVER_DEV_MODE=1"):
            use_server(stub, call)


@pytest.mark.parametrize(
    ("answer", "fix"),
    [(PLAIN["no_scale_out"], "--enable-scale-out"), (CLOSED["few_logprobs"], "--max-logprobs 4 or more")],
)
def test_a_rejected_request_is_reported_with_the_flag_to_set(answer: dict[str, Any], fix: str) -> None:
    stub = Stub({"/inference/v1/generate": (answer["status"], {"error": {"message": answer["detail"]}})})
    with pytest.raises(ServerError, match=f"HTTP {answer['status']}: .*{fix}"):
        use_server(stub, lambda server: server.generate(recorded()[0]))


def test_server_info_is_parsed() -> None:
    stub = Stub(server_answers())
    info = use_server(stub, lambda server: server.info())
    assert (info.engine, info.engine_version, info.model) == ("vllm", "0.32.0", "/folder/model")
    assert (info.policy_version, info.max_context, info.world_size) == (-1, 2048, 1)
    assert use_server(stub, lambda server: server.tokenize("a b")) == (67, 223, 68)
    assert use_server(stub, lambda server: server.health())
    assert not use_server(Stub(server_answers(**{"/health": (503, None)})), lambda server: server.health())


def test_another_service_at_the_url_is_reported() -> None:
    with pytest.raises(ServerError, match=r"/server_info.*: .*a vLLM server"):
        use_server(Stub({"/version": {}, "/server_info": "hello"}), lambda server: server.info())


def test_weight_digests_are_listed_for_each_rank() -> None:
    stock = {
        "dp0:pp0:pcp0:tp1:model.layers.0.mlp.experts.routed_experts.w2_weight": "b" * 64,
        "dp0:pp0:pcp0:tp0:model.norm.weight": "a" * 64,
        "dp0:pp0:pcp0:tp0:model.layers.0.mlp.gate.weight": hashlib.sha256().hexdigest(),  # packed out of reach
    }
    result = use_server(
        Stub(server_answers(PLAIN, **{"/weight_checker": {"checksums": stock}})), lambda server: server.weight_digests()
    )
    assert result == (
        RankDigests(tp_rank=0, digests={"model.norm.weight": "a" * 64}),
        RankDigests(tp_rank=1, digests={"model.layers.0.mlp.experts.w2_weight": "b" * 64}),
    )
    ours = {"results": [{"tp_rank": 1, "sums": {"a": "1"}, "loaded": {"b": "2"}}]}
    result = use_server(Stub(server_answers(**{"/collective_rpc": ours})), lambda server: server.weight_digests())
    assert result == (RankDigests(tp_rank=1, digests={"a": "1"}, loaded={"b": "2"}),)
    for case, path, junk in [
        (PLAIN, "/weight_checker", {}),
        (PLAIN, "/weight_checker", {"checksums": {"x": "1"}}),
        (RIGHT, "/collective_rpc", {"results": []}),
        (RIGHT, "/collective_rpc", {"results": [None]}),
    ]:
        with pytest.raises(ServerError, match=r"no checksums|no result"):
            use_server(Stub(server_answers(case, **{path: junk})), lambda server: server.weight_digests())


def test_an_abort_with_an_id_stops_one_request_and_without_an_id_all() -> None:
    stub = Stub(server_answers())

    async def use(server: VLLMServer) -> None:
        await server.abort("a")
        await server.abort()

    use_server(stub, use)
    assert [call.body for call in stub.calls] == [{"request_ids": ["generate-tokens-a"]}, {}]


def test_concurrent_first_requests_all_get_a_response() -> None:
    request, answer = recorded()

    async def use(server: VLLMServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(replace(request, request_id=str(i))) for i in range(50)))

    stub = Stub(server_answers(**{"/inference/v1/generate": answer}))
    assert len(use_server(stub, use)) == 50
    assert {call.body["request_id"] for call in stub.calls} == {str(i) for i in range(50)}
