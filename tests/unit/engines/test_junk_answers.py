"""Any junk in any place of a real answer: an error that names server and field, or a generation that is right."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import test_sglang
import test_vllm
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import Contract, check_generation
from megatron_dppo_engines.sglang import SGLangServer
from megatron_dppo_engines.sglang import wire as sglang
from megatron_dppo_engines.vllm import VLLMServer
from megatron_dppo_engines.vllm import wire as vllm

CONTRACT = Contract(vocab_size=512, end_tokens=(2,))
Decode = Callable[[Any, GenerateRequest, str], Generation]
Case = tuple[Decode, GenerateRequest, Any]


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


_NUMBERS = (0, 1, -1, 7, 511, 512, 10**6, 2**31, 2**63, 10**40, -(10**40), 0.0, 1.0, 1.5, -1.5, 1e38, 1e308, -1e308)
_TEXTS = ("", "x", "12", "stop", "²", "9" * 5000, "\ud800", "AAAA", "AAAAAAAA", "=" * 9)
_ARRAYS = ([], [None], [1.5], [[]], [[0, 0, 0]], [True], deep(500))
_OBJECTS = ({}, {"a": 1}, {"version": "1", "start": 0, "end": 6})
JUNK: tuple[Any, ...] = (
    *(None, True, False, math.nan, math.inf, -math.inf),
    *(*_NUMBERS, *_TEXTS, *_ARRAYS, *_OBJECTS),
)


def sglang_case(version: str, name: str) -> Case:
    request, answer = test_sglang.recorded(version, name)
    request = replace(request, request_id=sglang.parse_wire_id(answer["meta_info"]["id"]))
    return sglang.decode_generation, request, answer


def vllm_case(name: str, routed: bool) -> Case:
    request, answer = test_vllm.recorded(name)
    request = replace(request, request_id=answer["request_id"].removeprefix("generate-tokens-"))
    if routed:
        request = replace(request, routing=test_vllm.ROUTING)
        answer["choices"][0]["routed_experts"] = test_vllm.npy(test_vllm.routed())
    return vllm.decode_generation, request, answer


CASES: dict[str, Callable[[], Case]] = {
    "sglang flat": lambda: sglang_case("0.5.23", "generate"),
    "sglang nested": lambda: sglang_case("0.5.20", "generate"),
    "sglang aborted": lambda: sglang_case("0.5.20", "aborted_in_queue"),
    "vllm": lambda: vllm_case("generate", routed=False),
    "vllm routed": lambda: vllm_case("generate", routed=True),
}


def value_paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value of a JSON tree."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from value_paths(child, (*path, key))


@contextlib.contextmanager
def with_value(answer: Any, path: tuple[Any, ...], junk: Any) -> Iterator[Any]:
    """Replace one value of the answer inside the context."""
    if not path:
        yield junk
        return
    parent = answer
    for key in path[:-1]:
        parent = parent[key]
    original, parent[path[-1]] = parent[path[-1]], junk
    try:
        yield answer
    finally:
        parent[path[-1]] = original


def outcome(case: Case, answer: Any) -> Generation | None:
    """Return the generation, or None for a complete ServerError. Nothing else may be raised."""
    decode, request, _ = case
    try:
        generation = decode(answer, request, "http://s:1/x")
        check_generation(generation, request, CONTRACT, "http://s:1")
    except ServerError as error:
        assert str(error).startswith("http://s:1") and len(str(error)) < 1000
        if isinstance(error, ContractViolation):
            assert error.field and error.request_id == request.request_id and error.request_id in str(error)
        else:
            assert error.status == 200 and error.is_transient
        return None
    return generation


def check_types(found: Generation, request: GenerateRequest) -> None:
    """Check the guarantees of the contract that training needs."""
    assert found.token_ids.dtype == torch.int32 and all(0 <= token < 512 for token in found.token_ids.tolist())
    assert found.logprobs.dtype == torch.float32 and found.logprobs.shape == found.token_ids.shape
    assert all(-math.inf < value < 1e-3 for value in found.logprobs.tolist())
    if found.topk_token_ids is not None and found.topk_logprobs is not None:
        assert found.topk_token_ids.shape == (len(found.token_ids), 4) == found.topk_logprobs.shape
    elif len(found.token_ids):
        assert not request.params.topk_logprobs


@pytest.mark.parametrize("name", CASES)
def test_one_invalid_value_anywhere(name: str) -> None:
    case = CASES[name]()
    request, answer = case[1:]
    assert outcome(case, answer) is not None
    refused = passed = 0
    for path in list(value_paths(answer)):
        for junk in JUNK:
            with with_value(answer, path, junk) as damaged:
                result = outcome(case, damaged)
            refused, passed = refused + (result is None), passed + (result is not None)
            if result is not None:
                check_types(result, request)
    assert refused > 200 and passed > 100, "some fields are not read, some values are right"
    assert outcome(case, answer) is not None


@pytest.mark.parametrize("name", CASES)
def test_any_part_missing_or_twice(name: str) -> None:
    case = CASES[name]()
    for path in list(value_paths(case[2]))[1:]:
        answer = copy.deepcopy(case[2])
        parent = answer
        for key in path[:-1]:
            parent = parent[key]
        if isinstance(path[-1], int):
            parent.insert(path[-1], parent[path[-1]])
            outcome(case, answer)
            parent.pop(path[-1])
        parent.pop(path[-1])
        outcome(case, answer)


@pytest.mark.parametrize("name", CASES)
def test_several_invalid_values_at_once(name: str) -> None:
    case = CASES[name]()
    answer = case[2]
    everywhere = list(value_paths(answer))[1:]
    rng = np.random.default_rng(0)
    for _ in range(400):
        result = copy.deepcopy(answer)
        for index in rng.integers(len(everywhere), size=3):
            parent = result
            try:
                for key in everywhere[index][:-1]:
                    parent = parent[key]
                parent[everywhere[index][-1]] = JUNK[rng.integers(len(JUNK))]
            except (KeyError, IndexError, TypeError):
                continue  # another one was put there
        outcome(case, result)


@pytest.mark.parametrize("name", ["sglang flat", "sglang nested", "vllm"])
def test_a_token_changed_in_one_field_is_detected(name: str) -> None:
    case = CASES[name]()
    answer = case[2]
    exchanged = 0
    for path in list(value_paths(answer)):
        value = answer
        for key in path:
            value = value[key]
        read = {"output_ids", "output_token_logprobs", "token_ids", "token_id", "prompt_token_ids"} & set(path)
        if type(value) is int and read and "top_logprobs" not in path:
            with with_value(answer, path, value + 1) as damaged:
                assert outcome(case, damaged) is None, path
            exchanged += 1
    assert exchanged == 17 + 2 * 6


class Canned:
    """HTTP client that returns recorded answers by path."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    async def get(self, path: str, **_: Any) -> Any:
        return self.answers[path.split("?")[0]]

    async def check(self, path: str, *_: Any) -> Any:
        return self.answers[path]

    async def post(self, path: str, *_: Any, **more: Any) -> Any:
        return self.answers[path]


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (SGLangServer, test_sglang.server_answers("0.5.23")),
        (VLLMServer, test_vllm.server_answers()),
    ],
    ids=["sglang", "vllm"],
)
def test_invalid_values_in_server_info(kind: Any, answers: dict[str, Any]) -> None:
    paths = ("/server_info", "/model_info", "/version", "/weight_info", "/get_world_size", "/tokenize")
    answers = {path: answers[path] for path in paths if path in answers}

    async def run() -> int:
        refused = 0
        for path in list(value_paths(answers))[1:]:
            for junk in JUNK:
                with with_value(answers, path, junk) as damaged:
                    server = kind("http://s:1")
                    server._admin = server._http = Canned(damaged)
                    try:
                        info, tokens = await server.info(), await server.tokenize("a b")
                    except ServerError as error:
                        assert str(error).startswith("http://s:1") and len(str(error)) < 1000
                        refused += 1
                        continue
                    assert type(info.max_context) is type(info.world_size) is type(info.policy_version) is int
                    assert tokens is None or all(type(token) is int for token in tokens)
        return refused

    assert asyncio.run(run()) > 100
