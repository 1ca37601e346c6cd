"""The client of SGLang against answers that real servers gave (tests/engines/record_sglang.py)."""

from __future__ import annotations

import asyncio
import base64
import copy
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
from megatron_dppo_engines.sglang import SGLangServer, wire
from megatron_dppo_engines.shared_memory import HostHandle, as_flattened_bucket
from megatron_dppo_engines.weight_digests import RankDigests

VERSIONS = ("0.5.23", "0.5.20")
ROUTING = RoutingShape(num_layers=2, num_experts=8, topk=2)
RECORDED = {v: json.loads((Path(__file__).parent / "data" / "sglang" / f"{v}.json").read_text()) for v in VERSIONS}


def recorded(version: str, name: str = "generate") -> tuple[GenerateRequest, Any]:
    """A request and a copy of its answer."""
    case = copy.deepcopy(RECORDED[version][name])
    params = SamplingParams(max_new_tokens=case["tokens"], temperature=0.7, topk_logprobs=3)
    request = GenerateRequest(request_id="r", token_ids=tuple(case["prompt"]), params=params, routing=ROUTING)
    return request, case["answer"]


def decode(request: GenerateRequest, answer: Any) -> Generation:
    return wire.decode_generation(answer, request, "http://s/generate")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_response_becomes_a_generation(version: str) -> None:
    request, answer = recorded(version)
    result = decode(request, answer)
    assert same(result.token_ids, ids(answer["output_ids"])) and len(result.token_ids) == 6
    assert same(result.logprobs, logs(row[0] for row in answer["meta_info"]["output_token_logprobs"]))
    assert result.finish_reason == "length"
    assert result.versions == (VersionSpan(-1, 0, 6),)
    assert result.topk_token_ids is not None and result.topk_logprobs is not None
    assert result.topk_token_ids.dtype == torch.int32 and result.topk_logprobs.dtype == torch.float32
    for step, token in enumerate(result.token_ids.tolist()):
        row = result.topk_token_ids[step].tolist()
        slot = row.index(token)
        assert row[3] == (token if slot == 3 else -1)
        assert float(result.topk_logprobs[step, slot]) == pytest.approx(float(result.logprobs[step]), abs=1e-6)
    assert result.routed_experts is not None and result.routed_experts.dtype == torch.uint8
    assert result.routed_experts.shape == (len(request.token_ids) + 5, 2, 2)


def test_a_sampled_token_among_the_top_k_leaves_the_last_slot_unused() -> None:
    request, answer = recorded("0.5.20")
    first = answer["output_ids"][0]
    answer["meta_info"]["output_top_logprobs"][0][1][1] = first
    result = decode(request, answer)
    assert result.topk_token_ids is not None and result.topk_logprobs is not None
    assert result.topk_token_ids[0, 1] == first and result.topk_token_ids[0, 3] == -1
    assert result.topk_logprobs[0, 3] == 0


def test_both_encodings_of_the_top_k_mean_the_same() -> None:
    request, answer = recorded("0.5.20")
    nested = decode(request, answer)
    meta = answer["meta_info"]
    rows = meta.pop("output_top_logprobs")
    for part, column, dtype in (("val", 0, "float32"), ("idx", 1, "int32")):
        numbers = np.array([[entry[column] for entry in row] for row in rows], dtype=dtype)
        meta[f"output_top_logprobs_{part}_flat_b64"] = base64.b64encode(numbers.tobytes()).decode()
        meta[f"output_top_logprobs_{part}_flat_b64_dtype"] = dtype
    meta["output_top_logprobs_shape"] = [6, 3]
    flat = decode(request, answer)
    assert torch.equal(flat.topk_token_ids, nested.topk_token_ids)
    assert torch.equal(flat.topk_logprobs, nested.topk_logprobs)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_aborted_request_keeps_its_tokens(version: str) -> None:
    request, answer = recorded(version, "aborted")
    result = decode(request, answer)
    assert result.finish_reason == "abort" and 0 < len(result.token_ids) == len(result.logprobs)
    assert result.routed_experts is not None
    assert len(result.routed_experts) == len(request.token_ids) + len(result.token_ids) - 1


@pytest.mark.parametrize("version", VERSIONS)
def test_an_aborted_response_with_missing_fields_is_empty(version: str) -> None:
    def is_empty(found: Generation) -> bool:
        return same(replace(found, echo=None), Generation.empty(FinishReason.ABORT))

    request, answer = recorded(version, "aborted_in_queue")
    assert answer["meta_info"].get("routed_experts") is None
    assert is_empty(decode(request, answer))
    # Of one that had run before, the first tokens come back, without what was asked for of them.
    request, answer = recorded(version, "aborted")
    del answer["meta_info"]["routed_experts"]
    assert is_empty(decode(request, answer))
    assert same(decode(replace(request, routing=None), answer).token_ids, ids(answer["output_ids"]))
    for name in ("output_token_logprobs", "weight_versions", "prompt_tokens", "completion_tokens", "prompt_token_ids"):
        request, answer = recorded(version, "aborted")
        del (answer if name == "prompt_token_ids" else answer["meta_info"])[name]
        assert is_empty(decode(request, answer)), name


@pytest.mark.parametrize(
    ("field", "cause"),
    [
        ("output_token_logprobs", "sglang-router"),
        ("routed_experts", "--enable-return-routed-experts"),
        ("weight_versions", r"0\.5\.19"),
        ("finish_reason", "sglang-router"),
        ("output_top_logprobs", "sglang-router"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_missing_field_is_an_error_that_names_it_and_its_cause(version: str, field: str, cause: str) -> None:
    request, answer = recorded(version)
    meta = answer["meta_info"]
    for name in [name for name in meta if name == field or name.startswith(f"{field}_")]:
        del meta[name]
    message = rf"/generate: the response to request r .*meta_info\.{field}\S* is missing: .*{cause}"
    with pytest.raises(ContractViolation, match=message):
        decode(request, answer)


def routed(values: list[int]) -> Callable[[Any], None]:
    packed = base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()
    return lambda answer: answer["meta_info"].update(routed_experts=packed)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (routed([0, 1] * 5), "holds 10 numbers, expected 22"),
        (routed([8, 1] * 44), "names experts 1 to 8"),
        (routed([-1, 1] * 44), r"names experts -1 to 1"),
        (lambda a: a["meta_info"].update(routed_experts="not base64!"), "is not base64"),
        (lambda a: a["output_ids"].pop(), "belongs to other"),
        (lambda a: a["meta_info"]["weight_versions"][0].update(end=5), "does not cover"),
        (lambda a: a["meta_info"].update(finish_reason={"type": "tired"}), "expected stop, length"),
        (lambda a: a.pop("output_ids"), "output_ids is missing"),
        (lambda a: a.pop("meta_info"), "object with output_ids and meta_info"),
    ],
)
def test_a_response_that_does_not_match_the_request_is_rejected(damage: Callable[[Any], Any], message: str) -> None:
    request, answer = recorded("0.5.23")
    damage(answer)
    with pytest.raises(ServerError, match=message):
        decode(request, answer)


def test_fewer_top_tokens_than_requested_are_rejected() -> None:
    request, answer = recorded("0.5.20")
    with pytest.raises(ServerError, match="array of 4 tokens"):
        decode(replace(request, params=replace(request.params, topk_logprobs=4)), answer)


def test_weight_versions_are_parsed_and_the_lowest_float_is_minus_infinity() -> None:
    request, answer = recorded("0.5.20")
    meta = answer["meta_info"]
    meta["weight_versions"] = [
        {"version": "3", "start": 0, "end": 2},
        {"version": "incomplete", "start": 2, "end": 2},
        {"version": "4", "start": 2, "end": 6},
    ]
    meta["output_top_logprobs"][0][2][0] = float(np.finfo(np.float32).min)
    result = decode(request, answer)
    assert result.versions == (VersionSpan(3, 0, 2), VersionSpan(4, 2, 6))
    assert result.topk_logprobs is not None and result.topk_logprobs[0, 2] == float("-inf")


def test_many_experts_need_a_wider_type_and_255_still_means_unknown() -> None:
    for experts, dtype in ((255, torch.uint8), (256, torch.int16)):
        request, answer = recorded("0.5.23")
        routed([experts - 1, 1] * 44)(answer)
        shape = replace(ROUTING, num_experts=experts)
        result = decode(replace(request, routing=shape), answer)
        assert result.routed_experts is not None and result.routed_experts.dtype == dtype
        assert int(result.routed_experts.max()) == experts - 1


def test_the_request_has_every_sampling_setting_and_an_encoding_that_the_server_supports() -> None:
    request, _ = recorded("0.5.23")
    request = replace(request, routing_start=4, stop_token_ids=(2, 9))
    body = wire.generate_body(request, flat=True)
    sampling = body["sampling_params"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"], sampling["min_p"]) == (0.7, 1.0, -1, 0.0)
    assert sampling["repetition_penalty"] == 1.0 and sampling["stop_token_ids"] == [2, 9]
    assert body["routed_experts_start_len"] == 4 and body["return_flat_raw_top_logprobs_b64"]
    assert "return_flat_raw_top_logprobs_b64" not in wire.generate_body(request, flat=False)
    plain = wire.generate_body(replace(request, routing=None), flat=True)
    assert "return_routed_experts" not in plain


def test_no_request_id_is_a_prefix_of_another() -> None:
    ids = [wire.wire_id(name) for name in ("a", "ab", "1", "1:a", "", "aa:b", "10:aaaaaaaaaa")]
    assert not [(x, y) for x in ids for y in ids if x != y and y.startswith(x)]


def server_answers(version: str, **changes: Any) -> dict[str, Any]:
    """A server that agrees to everything."""
    case = RECORDED[version]
    names = "pause_generation continue_generation begin_weight_update end_weight_update update_weight_version "
    names += "update_weights_from_tensor update_weights_from_disk update_weights_from_distributed abort_request "
    names += "init_weights_update_group destroy_weights_update_group"
    done = {"success": True, "message": "ok"}
    return {
        **{f"/{name}": done for name in names.split()},
        "/server_info": case["server_info"],
        "/model_info": case["model_info"],
        "/weights_checker": case["checksum"],
        "/tokenize": case["tokenize"],
        "/flush_cache": "Cache flushed.",
        **changes,
    }


def use_server(stub: Stub, use: Callable[[SGLangServer], Awaitable[Any]]) -> Any:
    async def run(url: str) -> Any:
        server = SGLangServer(url, api_key="key", admin_api_key="admin-key")
        try:
            return await use(server)
        finally:
            await server.close()

    return with_stub(stub, run)


HANDLE = HostHandle(b"/torch_1", 8)


async def update(server: SGLangServer) -> None:
    await server.pause()
    await server.begin_update()
    await server.receive_handles(["w"], ["float32"], [[2]], [HANDLE])
    await server.end_update(4)
    await server.resume()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_update_flushes_caches_before_it_sets_the_version_in_both_protocol_generations(
    version: str,
) -> None:
    stub = Stub(server_answers(version))
    use_server(stub, update)
    calls = [call for call in stub.calls if call.path not in ("/server_info", "/model_info")]
    paths = [call.path.strip("/") for call in calls]
    old = version == "0.5.20"
    assert paths == [
        "pause_generation",
        "update_weight_version",
        *([] if old else ["begin_weight_update"]),
        "update_weights_from_tensor",
        *([] if old else ["end_weight_update"]),
        "flush_cache",
        "update_weight_version",
        "continue_generation",
    ]
    # 0.5.20 flushes no cache while a retracted request waits.
    assert calls[0].body == {"mode": "abort" if old else "retract"}
    versions = [call.body for call in calls if call.path == "/update_weight_version"]
    assert versions == [{"new_version": v, "abort_all_requests": False} for v in ("incomplete", "4")]
    sent = next(call.body for call in calls if "tensor" in call.path)
    assert sent["flush_cache"] is False
    bucket = as_flattened_bucket(HANDLE, ["w"], ["float32"], [[2]])
    assert sent["load_format"] == "flattened_bucket"
    assert sent["serialized_named_tensors"] == [base64.b64encode(bucket).decode()]
    assert {call.headers["Authorization"] for call in calls} == {"Bearer admin-key"}


def test_a_refused_flush_leaves_the_version_incomplete() -> None:
    stub = Stub(server_answers("0.5.23", **{"/flush_cache": (400, "Flush cache failed.")}))
    with pytest.raises(ServerError, match=r"flush_cache: HTTP 400: Flush cache failed"):
        use_server(stub, update)
    said = [call.body["new_version"] for call in stub.calls if call.path == "/update_weight_version"]
    assert said == ["incomplete"]


@pytest.mark.parametrize(
    ("detail", "state", "said"),
    [
        (RECORDED["0.5.23"]["bad_folder"]["detail"], "version 'default', are still", ["incomplete", "default"]),
        ("Failed to update weights: boom.", "old and half", ["incomplete"]),
    ],
)
def test_a_folder_that_cannot_be_loaded_is_an_error_with_the_served_version(
    detail: str, state: str, said: list[str]
) -> None:
    stub = Stub(server_answers("0.5.23", **{"/update_weights_from_disk": (400, {"message": detail})}))
    with pytest.raises(ServerError, match=rf"cannot load '/nowhere': .*{state}"):
        use_server(stub, lambda server: server.update_from_disk("/nowhere", 3))
    assert [call.body["new_version"] for call in stub.calls if call.path == "/update_weight_version"] == said
    assert stub.paths[-1] == "/continue_generation"


def test_a_success_status_with_a_failure_body_is_an_error() -> None:
    answer = {"success": False, "message": "Weights were updated, but the cache was not flushed"}
    stub = Stub(server_answers("0.5.23", **{"/update_weights_from_tensor": answer}))
    with pytest.raises(ServerError, match="not flushed"):
        use_server(stub, update)


def test_an_open_session_is_closed_and_a_new_one_started() -> None:
    states = iter([(400, {"message": "a weight-update session is already open"}), {"success": True}])

    async def begin(call: Any) -> Any:
        return next(states)

    stub = Stub(server_answers("0.5.23", **{"/begin_weight_update": begin}))
    use_server(stub, update)
    names = [path for path in stub.paths if path in ("/begin_weight_update", "/end_weight_update")]
    assert names == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update", "/end_weight_update"]


@pytest.mark.parametrize("key", ["dp_size", "pp_size"])
def test_replicas_inside_a_server_are_rejected_for_transfers(key: str) -> None:
    info = RECORDED["0.5.23"]["server_info"] | {key: 2}
    stub = Stub(server_answers("0.5.23", **{"/server_info": info}))
    with pytest.raises(ConfigError, match=r"weight_sync.method = 'disk'"):
        use_server(stub, lambda server: server.join_group("127.0.0.1", 1, 1, 2, "gloo"))


@pytest.mark.parametrize("sizes", [{"dp_size": 2, "enable_dp_attention": True}, {"attn_dp_size": 2}])
def test_data_parallel_attention_is_inside_of_the_ranks_that_join(sizes: dict[str, Any]) -> None:
    """SGLang 0.5.20 and 0.5.23 report it in different fields; both take every kind of transfer with it."""
    info = RECORDED["0.5.23"]["server_info"] | {"tp_size": 2} | sizes
    stub = Stub(server_answers("0.5.23", **{"/server_info": info, "/init_weights_update_group": {"success": True}}))
    use_server(stub, lambda server: server.join_group("127.0.0.1", 1, 1, 3, "gloo"))
    assert "/init_weights_update_group" in stub.paths
    # Attention weights are not split over the ranks as under plain tensor parallelism.
    answers = server_answers("0.5.23", **{"/server_info": {"device": "cuda", **info}})
    assert not use_server(Stub(answers), lambda server: server.weight_layout()).plain


def test_the_health_check_of_a_paused_server_does_not_generate() -> None:
    async def use(server: SGLangServer) -> list[bool]:
        before = await server.health()
        await server.pause()
        return [before, await server.health()]

    stub = Stub(server_answers("0.5.23", **{"/health": (503, None)}))
    assert use_server(stub, use) == [False, True]


@pytest.mark.parametrize("version", VERSIONS)
def test_server_info_is_parsed(version: str) -> None:
    stub = Stub(server_answers(version))
    info = use_server(stub, lambda server: server.info())
    assert (info.engine, info.engine_version, info.model) == ("sglang", version, "/folder/model")
    assert (info.policy_version, info.max_context, info.world_size) == (-1, 2048, 1)
    assert use_server(stub, lambda server: server.tokenize("a b")) == (67, 223, 68)


@pytest.mark.parametrize("version", VERSIONS)
def test_weight_digests_are_listed_by_rank(version: str) -> None:
    (first,) = RECORDED[version]["checksum"]["ranks"]
    second = copy.deepcopy(first)
    second["checksums"]["lm_head.weight"] = "0"
    parallelism = second["parallelism_info"]
    for info in parallelism if isinstance(parallelism, list) else [parallelism]:
        info |= {"tp_rank": 1, "rank": 1}

    def sums(answer: object) -> tuple[RankDigests, ...]:
        stub = Stub(server_answers(version, **{"/weights_checker": answer}))
        return use_server(stub, lambda server: server.weight_digests())

    result = sums({"success": True, "ranks": [second, first]})
    assert [rank.tp_rank for rank in result] == [0, 1] and [len(rank.digests) for rank in result] == [21, 21]
    assert (result[0].digests["lm_head.weight"], result[1].digests["lm_head.weight"]) == (
        first["checksums"]["lm_head.weight"],
        "0",
    )
    for junk in ({"success": True}, {"success": True, "ranks": [{}]}, {"success": True, "ranks": 7}, None):
        with pytest.raises(ServerError, match=r"/weights_checker: expected checksums"):
            sums(junk)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        *[({}, True), ({"quantization": "fp8"}, False), ({"ep_size": 2}, False), ({"dp_size": 2}, False)],
        *[({"device": "xpu"}, False), ({"version": "0.6.0"}, False), ({"device": "cuda", "tp_size": 4}, True)],
    ],
)
def test_digests_are_predicted_only_for_servers_with_matching_tensors(changes: dict[str, Any], plain: bool) -> None:
    answers = server_answers("0.5.23")
    answers["/server_info"] = {"device": "cpu", **answers["/server_info"], **changes}
    layout = use_server(Stub(answers), lambda server: server.weight_layout())
    assert layout.plain == plain and layout.tp_size == changes.get("tp_size", 1)
    assert layout.algorithm == ("words" if changes.get("device") else "sha256")


def test_another_service_at_the_url_is_reported() -> None:
    with pytest.raises(ServerError, match=r"/model_info: .*404"):
        use_server(Stub({}), lambda server: server.info())
    with pytest.raises(ServerError, match=r"/server_info: .*an SGLang server"):
        use_server(Stub({"/model_info": {}, "/server_info": "hello"}), lambda server: server.info())


def test_concurrent_first_requests_all_get_a_response() -> None:
    request, answer = recorded("0.5.23")

    async def use(server: SGLangServer) -> list[Generation]:
        return await asyncio.gather(*(server.generate(replace(request, request_id=str(i))) for i in range(50)))

    stub = Stub(server_answers("0.5.23", **{"/generate": answer}))
    assert len(use_server(stub, use)) == 50
    rids = {call.body["rid"] for call in stub.calls if call.path == "/generate"}
    assert len(rids) == 50
