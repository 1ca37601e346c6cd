"""The contract of a response: honest answers keep it, and every lie of the list breaks it, with the field named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from honest_answers import (
    CONTRACT,
    END,
    LENGTH,
    OTHER_END,
    VOCAB,
    Change,
    honest,
    put,
    says,
    scaled,
    shifted_logprobs,
    shifted_topk,
    table,
    truncated,
)
from megatron_dppo_engines.errors import ContractViolation
from megatron_dppo_engines.responses import FinishReason, SamplingParams, VersionSpan
from megatron_dppo_engines.server import GenerateRequest, Generation
from megatron_dppo_engines.servers.contract import check_generation

URL = "http://s:1"


def check(request: GenerateRequest, generation: Generation) -> None:
    check_generation(generation, request, CONTRACT, URL)


@pytest.mark.parametrize("topk", [0, 1, 4, VOCAB])
@pytest.mark.parametrize("reason", ["stop", "length", "abort"])
def test_honest_answers_keep_it(topk: int, reason: str) -> None:
    for seed in range(10):
        # From nearly uniform to nearly certain, where probabilities round to 1.
        for sharp in (0.1, 2.0, 30.0):
            check(*honest(seed, topk=topk, reason=reason, routed=bool(seed % 2), sharp=sharp))


def test_an_end_token_may_be_the_last_one_that_the_limit_allows() -> None:
    request, given = honest(reason="stop")
    limit = replace(request, params=replace(request.params, max_new_tokens=LENGTH))
    check(limit, given)
    check(limit, replace(given, finish_reason="length"))


def test_an_end_token_that_only_the_server_knows_is_believed_when_it_names_it() -> None:
    request, given = honest(reason="stop")
    given = put("token_ids", -1, 30)(given)
    given = replace(given, topk_token_ids=None, topk_logprobs=None)
    request = replace(request, params=replace(request.params, topk_logprobs=0))
    given = says(matched_stop=30, best_token_ids=np.full(LENGTH, 31, np.int32), best_logprobs=np.zeros(LENGTH, "f4"))(
        given
    )
    # An end token that the server alone knows is a special token; any other is a response that was cut off.
    cut = replace(given, echo=replace(given.echo, best_logprobs=None))  # type: ignore[type-var]
    check_generation(cut, request, replace(CONTRACT, special_tokens=(30,)), "http://s")
    with pytest.raises(ContractViolation, match=r"token is 30.*generation_config\.json"):
        check(request, cut)
    with pytest.raises(ContractViolation, match="token is 30, expected 2"):
        check(request, says(matched_stop=2, best_logprobs=None)(given))


def test_a_token_of_the_request_ends_it() -> None:
    request, given = honest()
    stopped = replace(given, finish_reason="stop")
    with pytest.raises(ContractViolation, match=r"end token \(2, 7\)"):
        check(request, stopped)
    check(replace(request, stop_token_ids=(int(given.token_ids[-1]),)), stopped)


def test_the_lowest_log_probability_is_that_of_float32_at_the_sampling_temperature() -> None:
    """The smallest float32 has -103.3. Raw ones of a temperature above 1 may be lower, by that factor."""
    request, given = honest()
    request = replace(request, params=replace(request.params, topk_logprobs=0))
    given = replace(given, topk_token_ids=None, topk_logprobs=None)
    lowest = put("logprobs", 6, float(np.log(np.finfo(np.float32).smallest_subnormal, dtype=np.float64)))(given)
    check(request, lowest)
    cold = replace(request, params=replace(request.params, temperature=0.5))
    check(cold, lowest)
    hot = replace(request, params=replace(request.params, temperature=2.0))
    check(hot, put("logprobs", 6, -207.0)(given))
    for params, value in ((request, -104.5), (cold, -104.5), (hot, -209.0)):
        with pytest.raises(ContractViolation, match="cannot be sampled"):
            check(params, put("logprobs", 6, value)(given))


def test_an_aborted_request_may_come_back_with_nothing() -> None:
    request, _ = honest()
    check(request, Generation.empty(FinishReason.ABORT))
    with pytest.raises(ContractViolation, match="'stop' without a token"):
        check(request, Generation.empty(FinishReason.STOP))


def fill(field: str, where: Any, value: int) -> Change:
    def change(values: torch.Tensor) -> None:
        values[where] = value

    return table(field, change)


def _nan(values: torch.Tensor) -> None:
    values[3, 1] = math.nan


def _same_id(ids: torch.Tensor) -> None:
    ids[2, 1] = ids[2, 0]


def _swap(values: torch.Tensor) -> None:
    values[4, [0, 1]] = values[4, [1, 0]]


def _last(values: torch.Tensor) -> None:
    values[:, 4] -= 0.5


def _heavy(values: torch.Tensor) -> None:
    values[5, :4] = -0.01


LIES: dict[str, tuple[Change, str]] = {
    "another request's name": (says(request_id="r2"), "request id is 'r2', expected 'r1'"),
    "another prompt": (says(prompt_token_ids=(9, 9, 9, 9, 9)), r"prompt token 0 is 9, expected \d+, which was sent"),
    "a longer prompt": (says(prompt_token_ids=(1,) * 6), "prompt token 0 is 1"),
    "a prompt's length": (says(prompt_length=6), "number of prompt tokens is 6, expected 5"),
    "the server's count": (says(response_length=LENGTH + 1), "number of response tokens is 12, expected 13"),
    "an id of a million": (put("token_ids", 4, 10**6), "token 4 is 1000000, expected an id of 0 to 49"),
    "an id of V": (put("token_ids", 4, VOCAB), "token 4 is 50, expected an id of 0 to 49"),
    "an id of -1": (put("token_ids", 4, -1), "token 4 is -1"),
    "an end in the middle": (put("token_ids", 4, OTHER_END), "token 4 is the end token 7, expected none before"),
    "a missing log-prob": (lambda g: replace(g, logprobs=g.logprobs[1:]), "number of log-probabilities is 11"),
    "NaN": (put("logprobs", 6, math.nan), "log-probability 6 is nan, expected a finite number"),
    "-inf": (put("logprobs", 6, -math.inf), "log-probability 6 is -inf"),
    "-1e30": (put("logprobs", 6, -1e30), "log-probability 6 is -1e\\+30, expected at least -104"),
    "-200": (put("logprobs", 6, -200.0), "log-probability 6 is -200.0, expected at least -104: float32 has no"),
    "a probability of 1.6": (put("logprobs", 6, 0.5), r"log-probability 6 is 0\.5"),
    "log-probs shifted": (shifted_logprobs, "log-prob|Top-K"),
    "truncated": (truncated, "finish reason is 'length' after 10 tokens, expected 12"),
    "an unknown reason": (lambda g: replace(g, finish_reason="tired"), "finish reason is 'tired'"),
    "no versions": (lambda g: replace(g, versions=()), r"versions is \[\], expected spans that cover 12"),
    "a gap": (lambda g: replace(g, versions=(VersionSpan(3, 0, 5), VersionSpan(3, 6, 12))), "versions is"),
    "an overlap": (lambda g: replace(g, versions=(VersionSpan(3, 0, 7), VersionSpan(3, 6, 12))), "versions is"),
    "an empty span": (lambda g: replace(g, versions=(VersionSpan(3, 0, 12), VersionSpan(4, 12, 12))), "versions is"),
    "Top-K values x 0.7": (scaled, "Top-K"),
    "Top-K shifted": (shifted_topk, "Top-K|log-probability of the sampled token"),
    "no Top-K": (lambda g: replace(g, topk_token_ids=None), "Top-K is missing, expected the 4 most probable"),
    "a column fewer": (
        table("topk_logprobs", lambda v: v[:, 1:].clone()),
        r"Top-K is of shape \[12, 5\] and \[12, 4\]",
    ),
    "a Top-K id of a million": (fill("topk_token_ids", 2, 10**6), "Top-K: id, at token 2"),
    "one Top-K id of V": (fill("topk_token_ids", (2, 1), VOCAB), "Top-K: id, at token 2"),
    "one Top-K id of -1": (fill("topk_token_ids", (2, 3), -1), "Top-K: id, at token 2"),
    "a Top-K id twice": (table("topk_token_ids", _same_id), "Top-K: ids, at token 2.*different ids"),
    "a NaN in the Top-K": (table("topk_logprobs", _nan), "Top-K: value, at token 3"),
    "rising values": (table("topk_logprobs", _swap), "Top-K: values, at token 4.*falling"),
    "more than certain": (table("topk_logprobs", _heavy), "Top-K: mass, at token 5"),
    "another last value": (table("topk_logprobs", _last), "Top-K: last value, at token"),
    "another last id": (fill("topk_token_ids", (slice(None), 4), 20), "Top-K: last id"),
    "no routes": (lambda g: replace(g, routed_experts=None), "routed experts is missing"),
    "a route fewer": (table("routed_experts", lambda v: v[1:].clone()), "routed experts of 15 tokens for 16"),
    "an expert of 9": (fill("routed_experts", 3, 9), "expert that does not exist: 9"),
    "an expert twice": (fill("routed_experts", 3, 1), "twice|more than once|same"),
}


@pytest.mark.parametrize("name", LIES)
def test_every_lie_breaks_it_and_is_named_with_server_and_request(name: str) -> None:
    lie, message = LIES[name]
    for seed in range(5):
        request, given = honest(seed)
        check(request, given)
        with pytest.raises(ContractViolation, match=message) as caught:
            check(request, lie(given))
        assert caught.value.url == URL and caught.value.request_id == "r1" and caught.value.field
        assert str(caught.value).startswith(f"{URL}: the response to request r1 violates the contract: ")


def test_shifted_log_probabilities_do_not_fit_to_the_most_probable_token_without_a_top_k_too() -> None:
    for seed in range(20):
        request, given = honest(seed, topk=0)
        with pytest.raises(ContractViolation, match="most probable token"):
            check(request, shifted_logprobs(given))


def test_more_tokens_than_asked_for_are_refused_whatever_ended_it() -> None:
    request, given = honest(reason="stop")
    check(replace(request, params=replace(request.params, max_new_tokens=LENGTH)), given)
    with pytest.raises(ContractViolation, match="12, expected at most 11"):
        check(replace(request, params=replace(request.params, max_new_tokens=LENGTH - 1)), given)


def test_a_prefix_of_an_answer_that_stopped_is_no_answer() -> None:
    request, given = honest(reason="stop")
    with pytest.raises(ContractViolation, match="own stop reason"):
        check(request, truncated(given))
    silent = says(matched_stop=None)(given)
    with pytest.raises(ContractViolation, match="an end token"):
        check(request, truncated(silent))


def test_an_unrequested_top_k_is_rejected() -> None:
    request, given = honest()
    with pytest.raises(ContractViolation, match="Top-K is there, expected"):
        check(replace(request, params=replace(request.params, topk_logprobs=0)), given)


@pytest.mark.parametrize("error", [3e-5, -3e-5])
def test_rounding_is_borne_and_a_tenth_of_a_percent_is_not(error: float) -> None:
    def moved(by: float) -> Callable[[Generation], Generation]:
        return lambda g: replace(g, logprobs=(g.logprobs.double() + by).float())

    request, given = honest(topk=VOCAB)
    check(request, moved(error)(given))
    with pytest.raises(ContractViolation, match="the sampled token"):
        check(request, moved(error * 40)(given))


def test_a_certain_token_has_log_probability_zero_or_a_rounding_above() -> None:
    request, given = honest(topk=0, routed=False)
    certain: dict[str, Any] = dict(logprobs=torch.full((LENGTH,), 5e-6))
    given = replace(given, **certain, echo=replace(given.echo, best_logprobs=None))  # type: ignore[type-var]
    check(request, given)
    assert END not in given.token_ids.tolist()


def test_candidates_that_cannot_be_sampled_may_stand_at_the_end() -> None:
    request, given = honest(sharp=30.0)
    assert given.topk_token_ids is not None and given.topk_logprobs is not None
    values = given.topk_logprobs.clone()
    values[:, 3] = torch.where(given.topk_token_ids[:, 3] == given.token_ids, values[:, 3], -math.inf)
    kept = given.topk_token_ids[:, 4] < 0
    values[~kept, 3] = given.topk_logprobs[~kept, 3]
    check(request, replace(given, topk_logprobs=values))


def test_each_entry_of_the_top_k_counts_and_not_its_ends_alone() -> None:
    """The order of any two neighbours, and a sampled token between the first and the last of the K."""
    num_outside = 0
    for seed in range(5):
        request, given = honest(seed)
        assert given.topk_logprobs is not None and given.topk_token_ids is not None
        for column in range(3):
            swapped = given.topk_logprobs.clone()
            swapped[4, [column, column + 1]] = swapped[4, [column + 1, column]]
            with pytest.raises(ContractViolation, match="Top-K: values, at token 4"):
                check(request, replace(given, topk_logprobs=swapped))
        is_outside = given.topk_token_ids[:, 4] >= 0
        row = int(is_outside.int().argmax())
        if not is_outside[row]:
            continue
        num_outside += 1
        logprobs, values = given.logprobs.clone(), given.topk_logprobs.clone()
        logprobs[row] = values[row, 4] = values[row, 2:4].mean()
        with pytest.raises(ContractViolation, match=rf"token {row}, .*at most"):
            check(request, replace(given, logprobs=logprobs, topk_logprobs=values))
    assert num_outside >= 3


def test_a_long_response_without_any_uncertainty_is_rejected() -> None:
    def zeros(length: int, **params: Any) -> None:
        request = GenerateRequest(
            request_id="r", token_ids=(9,), params=SamplingParams(max_new_tokens=length, **params)
        )
        generation = Generation(
            token_ids=torch.full((length,), 10, dtype=torch.int32),
            logprobs=torch.zeros(length),
            finish_reason=FinishReason.LENGTH,
            versions=(VersionSpan(0, 0, length),),
        )
        check(request, generation)

    zeros(31)
    zeros(32, temperature=0.0)
    with pytest.raises(ContractViolation, match="0 at all 32 tokens"):
        zeros(32)
