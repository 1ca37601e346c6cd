"""SGLang's report of a filtered distribution: the allowed ids, and log-probabilities over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from columns import same
from http_stub import Stub
from megatron_dppo.engines.client_processes import ClientProcesses
from megatron_dppo.errors import ContractViolation, ServerError
from megatron_dppo.types import FinishReason
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.sglang import wire
from test_sglang import decode, recorded
from tests.unit.engines.test_client_processes import INFO, Case

FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 40, "min_p": 0.05}
MASS = (0.5, 0.25, 0.9, 1.0, 0.8, 0.6)
"""Probability mass of the allowed ids of each token, before renormalization."""


def filtered() -> tuple[GenerateRequest, dict[str, Any], Generation]:
    """A recorded answer as it is under filters that left the sampled token, the first of the Top-K and, but at the
    second token, id 500; with the answer as it is without them."""
    request, answer = recorded("0.5.20")
    plain = decode(request, answer)
    meta, tokens = answer["meta_info"], plain.token_ids.tolist()
    assert plain.topk_token_ids is not None
    best = plain.topk_token_ids[:, 0].tolist()
    meta["output_token_sampling_mask"] = [
        [*dict.fromkeys((first, token, *([500] if row != 1 else [])))]
        for row, (first, token) in enumerate(zip(best, tokens, strict=True))
    ]
    meta["output_token_sampling_logprobs"] = (plain.logprobs.double().numpy() - np.log(MASS)).tolist()
    return replace(request, params=replace(request.params, return_sampling_mask=True, **FILTERS)), answer, plain


def test_allowed_ids_are_read_and_all_log_probabilities_are_those_over_them() -> None:
    request, answer, plain = filtered()
    generation = decode(request, answer)
    assert (
        generation.sampling_mask is not None
        and generation.topk_token_ids is not None
        and generation.topk_logprobs is not None
    )
    assert plain.topk_token_ids is not None and plain.topk_logprobs is not None and generation.echo is not None
    sets = [part.tolist() for part in generation.sampling_mask.ids.split(generation.sampling_mask.counts.tolist())]
    assert sets == answer["meta_info"]["output_token_sampling_mask"]
    np.testing.assert_allclose(generation.logprobs.numpy(), plain.logprobs.numpy() - np.log(MASS), atol=1e-6)
    for row, allowed in enumerate(sets):
        before = zip(plain.topk_token_ids[row].tolist(), plain.topk_logprobs[row].tolist(), strict=True)
        after = zip(generation.topk_token_ids[row].tolist(), generation.topk_logprobs[row].tolist(), strict=True)
        expected = {i: value - np.log(MASS[row]) for i, value in before if i in allowed}
        assert {i: pytest.approx(value, abs=1e-6) for i, value in after if i >= 0} == expected
        used = generation.topk_token_ids[row, :-1] >= 0
        assert used.tolist() == sorted(used.tolist(), reverse=True), "unused slots stand behind the others"
        assert generation.echo.best_token_ids is not None and generation.echo.best_token_ids[row] == sets[row][0]


def test_training_requests_sampling_masks_and_evaluation_does_not() -> None:
    request, _, _ = filtered()
    body = wire.generate_body(request, flat=True)
    assert {name: body["sampling_params"][name] for name in FILTERS} == FILTERS
    assert body["return_sampling_mask"] is True and body["sampling_logprobs_mode"] == "selected"
    plain = wire.generate_body(recorded("0.5.23")[0], flat=True)
    assert "return_sampling_mask" not in plain and plain["sampling_params"]["top_k"] == -1
    evaluation = wire.generate_body(
        replace(request, params=replace(request.params, return_sampling_mask=False)), flat=True
    )
    assert "return_sampling_mask" not in evaluation
    assert {name: evaluation["sampling_params"][name] for name in FILTERS} == FILTERS


def _in(name: str, change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(meta: dict[str, Any]) -> None:
        values = meta[f"output_token_sampling_{name}"]
        result = change(values)
        meta[f"output_token_sampling_{name}"] = values if result is None else result

    return apply


def _put(index: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda values: values.__setitem__(index, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: m.pop("output_token_sampling_mask"), "sampling_mask is missing: SGLang"),
        (lambda m: m.pop("output_token_sampling_logprobs"), r"sampling_logprobs is missing: .*sglang-router"),
        (_in("mask", lambda v: v[:-1]), "sampling_mask has 5 sets, expected 6"),
        (_in("logprobs", lambda v: v[:-1]), "sampling_logprobs has 5 numbers, expected 6"),
        (_in("mask", lambda v: {"a": v}), "sampling_mask is .*, expected"),
        (_in("mask", _put(2, 7)), r"sampling_mask\[2\] is 7, expected"),
        (_in("mask", _put(2, None)), r"sampling_mask\[2\] is None, expected"),
        (_in("mask", _put(2, [3, "4"])), r"sampling_mask\[2\]\[1\] is '4', expected"),
        (_in("mask", _put(2, [-3])), r"sampling_mask\[2\]\[0\] is -3, expected"),
        (_in("mask", _put(2, [2**31])), r"sampling_mask\[2\]\[0\] is 2147483648"),
        (_in("logprobs", _put(1, "x")), r"sampling_logprobs\[1\] is 'x', expected a number"),
        (_in("logprobs", _put(1, [-1.0])), r"sampling_logprobs\[1\] is \[-1.0\], expected a number"),
    ],
)
def test_invalid_masks_are_reported_with_field_and_position(damage: Callable[[Any], Any], message: str) -> None:
    request, answer, _ = filtered()
    damage(answer["meta_info"])
    with pytest.raises(ServerError, match=f"request r .*{message}"):
        decode(request, answer)


def test_a_request_aborted_in_the_queue_has_no_masks() -> None:
    request, answer, _ = filtered()
    del answer["meta_info"]["output_token_sampling_mask"]
    answer["meta_info"]["finish_reason"] = {"type": "abort", "message": "x"}
    generation = decode(request, answer)
    assert generation.finish_reason == FinishReason.ABORT and not len(generation.token_ids)


@pytest.mark.slow
def test_sampling_masks_pass_through_a_client_process_unchanged() -> None:
    case = Case("sglang")
    request, answer, _ = filtered()
    meta = answer["meta_info"]
    meta["id"] = case.answer["meta_info"]["id"]
    request = replace(request, request_id=case.request.request_id, params=replace(request.params, topk_logprobs=1))
    meta["output_top_logprobs"] = [row[:1] for row in meta["output_top_logprobs"]]
    meta["output_token_sampling_logprobs"] = [
        0.0 if len(ids) == 1 else value
        for ids, value in zip(
            meta["output_token_sampling_mask"],
            meta["output_token_sampling_logprobs"],
            strict=True,
        )
    ]
    expected = replace(wire.decode_generation(answer, request, "http://s"), echo=None)
    assert expected.sampling_mask is not None and len(expected.sampling_mask.ids) > len(expected.sampling_mask)

    async def run(clients: ClientProcesses, server: Any) -> None:
        completions = await clients.generate(server, request)
        assert same(completions, expected)
        broken = meta["output_token_sampling_mask"]
        broken[3] = [next(i for i in range(100, 200) if i not in broken[3])]
        with pytest.raises(ContractViolation, match="mask, at token 3"):
            await clients.generate(server, request)

    case.use(Stub({case.path: answer, "/server_info": {**INFO, "version": "0.5.20"}}), run)
