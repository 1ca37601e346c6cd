"""The probe's verdicts: right servers of many policies pass, and each kind of wrong one is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from megatron_dppo.weights.agreement import better_explanation, decimals, distance, log_odds, missing_from_best
from megatron_dppo.weights.probe_requests import ProbeError
from megatron_dppo.weights.verdict import verify_response
from tests.unit.policies import Policy, ask

FLAT, USUAL, SHARP = 0.3, 2.0, 12.0
"""median probability of a sampled token: .02, .7, 1 - 1e-4"""
DTYPES: tuple[Literal["fp32", "bf16"], ...] = ("fp32", "bf16")
EVERY = [Policy(sharpness, dtype=dtype) for sharpness in (FLAT, USUAL, SHARP) for dtype in DTYPES]


def refused(policy: Policy, change: Callable[[dict[str, Any]], None] | None, match: str, **more: Any) -> str:
    with pytest.raises(ProbeError, match=match) as caught:
        verify_response(*ask(policy, change, **more))
    return str(caught.value)


def turned(values: Any, by: int) -> Any:
    """Every row becomes that of another token."""
    return torch.roll(values, by, 0) if isinstance(values, torch.Tensor) else np.roll(values, by, 0)


def raw(policy: Policy) -> Callable[[dict[str, Any]], None]:
    def change(columns: dict[str, Any]) -> None:
        logprobs = policy.server_logits().log_softmax(-1).gather(1, policy.tokens()[:, None])
        columns["logprobs"] = logprobs.squeeze(1).numpy()

    return change


def of(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda columns: columns.update({name: change(columns[name])})


@pytest.mark.parametrize("dtype", DTYPES)
def test_correct_servers_of_many_policies_pass(dtype: Literal["fp32", "bf16"]) -> None:
    for seed in range(60):
        policy = Policy(0.2 * 1.09**seed, seed, dtype, temperature=(0.7, 1.0, 1.3)[seed % 3], parts=1 + seed % 4)
        result = verify_response(*ask(policy, routed=True))
        assert result.routes == 0 and result.topk is not None and result.replayed == result.logprobs


def test_the_distance_is_reported() -> None:
    result = verify_response(*ask(Policy(USUAL), of("logprobs", lambda x: x + 2e-5)))
    assert result.logprobs.mean == pytest.approx(2e-5, rel=0.2)


@pytest.mark.parametrize("policy", EVERY)
def test_raw_logprobs_are_named_with_the_engines_own_setting(policy: Policy) -> None:
    refused(policy, raw(policy), "http://s: raw log-probabilities: .*SGLANG_RETURN_ORIGINAL_LOGPROB")
    refused(policy, raw(policy), "raw log-probabilities: .*--logprobs-mode processed_logprobs", engine="vllm")


@pytest.mark.parametrize("policy", EVERY)
def test_logprobs_of_a_neighbouring_token_are_named(policy: Policy) -> None:
    policy = replace(policy, parts=1)
    refused(policy, of("logprobs", lambda x: turned(x, -1)), "shifted log-probabilities: .*of the next token")
    refused(policy, of("logprobs", lambda x: turned(x, 1)), "shifted log-probabilities: .*of the previous token")


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_rounded_logprobs_are_named(policy: Policy, count: int) -> None:
    refused(policy, of("logprobs", lambda x: np.round(x, count)), f"rounded log-probabilities: .*{count} decimals")


@pytest.mark.parametrize("policy", EVERY)
def test_scaled_logprobs_are_named_with_their_factor(policy: Policy) -> None:
    refused(policy, of("logprobs", lambda x: 0.6 * x), r"scaled log-probabilities: .*0\.(6|5\d) times the trainer's")


@pytest.mark.parametrize(
    ("engine", "flag"), [("sglang", "URL of the server itself"), ("vllm", "--generation-config vllm")]
)
def test_a_filtered_distribution_is_named(engine: Literal["sglang", "vllm"], flag: str) -> None:
    policy = Policy(USUAL)
    at_t = policy.server_logits() / policy.temperature
    kept = at_t.masked_fill(at_t < at_t.topk(8).values[:, -1:], float("-inf")).log_softmax(-1)
    filtered = kept.gather(1, policy.tokens()[:, None]).squeeze(1).numpy()
    change = of("logprobs", lambda x: np.where(np.isfinite(filtered), filtered, x))
    refused(policy, change, f"filtered distribution: .*{flag}", engine=engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reported_probabilities_of_1_are_a_filter_and_no_rounding(dtype: Literal["fp32", "bf16"]) -> None:
    """vLLM reports processed log-probabilities: with top-k 1 all of them are 0."""
    told = refused(Policy(USUAL, dtype=dtype), of("logprobs", np.zeros_like), "filtered distribution: ", engine="vllm")
    assert "greedy decoding" in told and "--generation-config vllm" in told


def test_a_top_k_with_tokens_that_are_never_sampled_is_a_filter() -> None:
    never = of("values", lambda x: np.where(np.arange(x.shape[1]) > 2, -np.inf, x).astype(np.float32))
    refused(Policy(USUAL), never, r"filtered distribution: some of its Top-K have probability 0")


def test_other_weights_are_named_with_what_the_server_serves() -> None:
    for policy in EVERY:
        other = replace(policy, seed=5).logits() / 0.7
        logprobs = other.log_softmax(-1).gather(1, policy.tokens()[:, None]).squeeze(1).numpy()
        text = refused(policy, of("logprobs", lambda _, told=logprobs: told), r"wrong weights: .*version 3")
        assert "'/m'" in text and ("coarser type" not in text or policy.dtype == "bf16")


@pytest.mark.parametrize("policy", EVERY)
def test_weights_of_another_model_are_not_mistaken_for_another_temperature(policy: Policy) -> None:
    """The server is certain of tokens that are all but impossible to the trainer."""
    answer, expected, (reading,) = ask(replace(policy, parts=1))
    other, tokens = replace(policy, seed=5).logits(), policy.tokens()[:, None]
    at_t, at_one = ((other / t).log_softmax(-1).gather(1, tokens).squeeze(1).numpy() for t in (0.7, 1.0))
    with pytest.raises(ProbeError, match="wrong weights"):
        verify_response(answer, expected, [replace(reading, logprobs=at_t, raw_logprobs=at_one)])


def test_a_small_difference_points_to_the_type_and_passes_where_that_type_is_expected() -> None:
    noise = torch.randn(64, generator=torch.Generator().manual_seed(2)).numpy() * 2e-4
    text = refused(Policy(USUAL), of("logprobs", lambda x: x + noise), "coarser type than fp32")
    assert "fp32 allows 3e-05, 0.0001" in text
    verify_response(*ask(Policy(USUAL, dtype="bf16"), of("logprobs", lambda x: x + noise)))


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_nan_never_passes(policy: Policy, value: float) -> None:
    refused(
        policy,
        of("logprobs", lambda x: np.where(np.arange(64) == 9, value, x)),
        "wrong weights|filtered|of some tokens",
    )


@pytest.mark.parametrize("policy", EVERY)
def test_a_few_wrong_numbers_among_many_right_ones_are_found(policy: Policy) -> None:
    """The median is blind to a third; in half precision that has to make a difference to the probabilities."""
    if policy.sharpness == FLAT:
        return
    swapped = of("logprobs", lambda x: np.where(np.arange(64) % 3 == 0, x - 1.4, x))
    refused(policy, swapped, "wrong weights|wrong log-probabilities of some tokens: most")


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (of("values", lambda x: 0.7 * x), "scaled Top-K: .*0.7 times"),
        (lambda c: c.update(values=turned(c["values"], -1), ids=turned(c["ids"], -1)), "shifted Top-K: .*next token"),
        (lambda c: c.update(values=turned(c["values"], 1), ids=turned(c["ids"], 1)), "shifted Top-K: .*previous"),
        (of("values", lambda x: turned(x, -1)), "shifted Top-K: .*next token"),
        (of("ids", lambda x: turned(x, 1)), "wrong Top-K: "),
        (of("values", lambda x: np.where(np.arange(64)[:, None] == 3, np.nan, x)), "filtered distribution"),
    ],
)
def test_wrong_topk_is_named(policy: Policy, change: Callable[[dict[str, Any]], None], match: str) -> None:
    refused(replace(policy, parts=1), change, match)


@pytest.mark.parametrize("policy", EVERY)
def test_topk_ids_that_are_not_the_best_are_found_though_their_values_are_right(policy: Policy) -> None:
    at_t = (policy.server_logits() / policy.temperature).log_softmax(-1)
    values, ids = at_t.topk(9)

    def worse(columns: dict[str, Any]) -> None:
        columns.update(ids=ids[:, 5:].int().numpy(), values=values[:, 5:].float().numpy())

    if policy.sharpness > FLAT or policy.dtype == "fp32":
        refused(policy, worse, "wrong Top-K: .*below the trainer's best")


@pytest.mark.parametrize("policy", EVERY)
def test_routes_of_other_tokens_are_named(policy: Policy) -> None:
    refused(policy, of("routes", lambda x: turned(x, 1)), "shifted routed experts: .*neighbouring", routed=True)
    refused(policy, of("routes", lambda x: turned(x, 20)), r"wrong routed experts: of 192 rows .* 9\d%", routed=True)
    refused(policy, of("routes", lambda x: x.flip(1)), "wrong routed experts", routed=True)


def test_the_effect_of_routes_on_probabilities_counts_in_fp32() -> None:
    one = of("routes", lambda x: torch.cat([turned(x[:1], 0).flip(1), x[1:]]))
    refused(Policy(USUAL), one, "wrong routed experts: of 192 rows .* 1% have other experts", routed=True)


def test_routes_of_one_wrong_layer_are_named_though_few_rows_differ() -> None:
    """One of three layers: a third of all rows, which bf16 allows, but every row of that layer."""
    policy = Policy(USUAL, dtype="bf16")
    one = of("routes", lambda x: torch.cat([x[:, :1], turned(x[:, 1:2], 20), x[:, 2:]], 1))
    refused(policy, one, r"wrong routed experts of a layer: \d+% of the rows of one layer", routed=True)


def test_log_odds_and_distance_by_hand() -> None:
    reported, computed = np.log(np.full(8, 0.9)), np.log(np.full(8, 0.5))
    assert log_odds(reported)[0] == pytest.approx(np.log(9)) and log_odds(np.zeros(1))[0] == pytest.approx(
        13.8, abs=0.1
    )
    found = distance(reported, computed)
    assert found == pytest.approx((np.log(1.8), np.log(1.8), 0.4, np.log(9)))
    assert distance(reported[:5], computed[:5]).odds == 0, "five tokens tell nothing"


ODD = (math.nan, -math.inf, math.inf, 1e308, -1e308, 0.0, -0.5)


def probability(logprob: float) -> float:
    return math.inf if logprob > 709 else math.exp(logprob)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("told", ODD)
@pytest.mark.parametrize("true", ODD)
def test_extreme_numbers_cause_no_warning_and_never_pass(told: float, true: float) -> None:
    for odd in (1, 7, 8):  # of eight
        where = np.arange(8) < odd
        reported, computed = np.where(where, told, -0.5), np.where(where, true, -0.5)
        found = distance(reported, computed)
        equal = told == true and math.isfinite(told)
        assert found.mean == 0 if equal else not found.mean < 0.05, found
        assert found.largest == 0 if equal else not found.largest < 0.4, found
        apart = probability(told) - probability(true)
        assert math.isnan(found.probability) == math.isnan(apart), found
        assert decimals(reported, computed) is None or np.isfinite(reported).all()
        below = missing_from_best(reported[:, None], computed[:, None])
        assert below == 0 if equal else below != 0
        best = better_explanation([reported], [computed], [computed], [computed], 0.1)
        assert best is None or math.isfinite(best.odds)


def test_exact_numbers_are_not_mistaken_for_rounded_ones() -> None:
    generator = np.random.default_rng(0)
    for size in (1e-6, 1e-4, 1e-2, 1.0, 10.0):
        values = -generator.exponential(size, 64)
        assert decimals(values, values) is None, size
    zeros = np.zeros(64)
    assert decimals(zeros, zeros - 1e-8) is None, "a policy that is certain"
    assert decimals(zeros, zeros - 1e-3) == 2
