"""The local engine stops groups, holds them, and goes on; every number is of the weights that it is said to be of."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from columns import ids, logs, mask, same
from megatron_dppo.data.chat import load_tokenizer
from megatron_dppo.engines.local.engine import LocalEngine
from megatron_dppo.errors import TrainingStopped
from megatron_dppo.hf.folder import build_hf_model, read_hf_config, routing_shape, stream_model
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.types import Completion, Prompt, SamplingParams, VersionSpan
from megatron_dppo_engines.route_checks import check_routes
from tests.unit.engines.test_local_routes import one_pass

MODEL = Path(__file__).parents[3] / "examples/chain_sum/model"
CONFIG, TOKENIZER = read_hf_config(MODEL), load_tokenizer(MODEL)
ENDS = {3, *range(30, 35)}
"""Enough end tokens that responses of a random model end early and late."""
TOKENIZER.eos_token_id, CONFIG.eos_token_id = 3, sorted(ENDS)
TEXTS = ["7+8-3=", "1=", "9-9-9+4=", "5-5=", "6+1+1=", "2-1="]
PROMPTS = [Prompt(prompt_id=t, text=t, token_ids=tuple(TOKENIZER(t).input_ids), label="") for t in TEXTS]
SIBLINGS, LIMIT = 3, 20
SPAN = VersionSpan(0, 0, 1)
MODELS = {version: build_hf_model(CONFIG, torch.float32, seed=1 + version) for version in (0, 1)}


def engine(function: Any = None, version: int = 0, max_batch: int = 512) -> LocalEngine:
    made = LocalEngine(
        CONFIG, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"), max_batch=max_batch, function=function
    )
    made.update_weights(stream_model(MODELS[version]), version)
    return made


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": LIMIT, "seed": 4} | settings)


def requests(keys: Sequence[int] = range(len(PROMPTS))) -> list[GroupRequest]:
    return [GroupRequest(key, PROMPTS[key], SIBLINGS) for key in keys]


def submitted(engine: LocalEngine, enough: int, keep: Sequence[int] = (), **settings: Any) -> list[Any]:
    """The results, group by group."""
    futures = engine.submit(requests(), params(**settings), enough, keep)
    return [future.result() for future in futures]


def begun(token: int) -> PartialResponse:
    """A response of one token."""
    return PartialResponse(token_ids=ids([token]), logprobs=logs([-1.0]), sampled=mask([True]), versions=(SPAN,))


def in_groups(completions: Sequence[Completion]) -> list[list[Completion]]:
    return [list(completions[i : i + SIBLINGS]) for i in range(0, len(completions), SIBLINGS)]


def generate_uninterrupted(**settings: Any) -> list[list[Completion]]:
    """Return the groups of an engine that is not stopped."""
    return in_groups(engine().generate([p for p in PROMPTS for _ in range(SIBLINGS)], params(**settings)))


def check_numbers(prompt: Prompt, found: Completion, temperature: float = 1.0) -> None:
    """Log-probabilities, Top-K and routes are those of one pass of the weights that each token is said to be from."""
    assert found.topk_token_ids is not None and found.topk_logprobs is not None and found.routed_experts is not None
    assert found.logprobs is not None
    response = found.token_ids.tolist()
    tokens, known = [*prompt.token_ids, *response], 0
    shape, sampled = routing_shape(CONFIG), set()
    assert shape is not None
    last = max(span.end for span in found.policy_versions)
    check_routes(found.routed_experts[: len(prompt.token_ids) + last - 1], shape, tokens=len(tokens) - 1, request="")
    for version, start, end, _server in found.policy_versions:
        model = MODELS[version]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, len(prompt.token_ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        for i in range(start, end):
            sampled.add(i)
            assert float(found.logprobs[i]) == pytest.approx(float(expected[i, response[i]]), abs=1e-5)
            slots, values = found.topk_token_ids[i].tolist(), found.topk_logprobs[i].tolist()
            assert slots[:-1] == expected[i].topk(len(slots) - 1).indices.tolist()
            assert slots[-1] == (-1 if response[i] in slots[:-1] else response[i])
            for slot, value in zip(slots, values, strict=True):
                assert slot < 0 or value == pytest.approx(float(expected[i, slot]), abs=1e-5)
        rows = slice(known, known := len(prompt.token_ids) + end - 1)
        for layer in range(CONFIG.num_hidden_layers):
            routes = found.routed_experts[rows, layer].long()
            assert torch.equal(routes, one_pass(model, tokens[:-1], layer)[rows])
    trained = [True] * len(response) if found.loss_mask is None else found.loss_mask.tolist()
    assert sampled == {i for i, on in enumerate(trained) if on}


@pytest.mark.parametrize("max_batch", [512, 5])
def test_all_groups_equal_generate_on_repeated_prompts(max_batch: int) -> None:
    settings = {"topk_logprobs": 3, "routed_experts": True}
    repeated = [prompt for prompt in PROMPTS for _ in range(SIBLINGS)]
    expected = engine(max_batch=max_batch).generate(repeated, params(**settings))
    found = submitted(engine(max_batch=max_batch), len(PROMPTS), **settings)
    assert same([c for group in found for c in group], expected)
    assert {c.finish_reason for c in expected} == {"stop", "length"} and all(c.policy_version == 0 for c in expected)
    assert all(c.policy_versions == (VersionSpan(0, 0, len(c.token_ids)),) for c in expected)


@pytest.mark.parametrize(("enough", "room"), [(1, 1), (1, 5), (2, 2), (4, 1)])
def test_sampling_stops_at_the_token_that_completes_enough_groups(enough: int, room: int) -> None:
    """``room`` = tokens that the others may still sample."""
    expected = generate_uninterrupted(topk_logprobs=3, routed_experts=True)
    longest = [max(len(c.token_ids) for c in group) for group in expected]
    steps = sorted(longest)[enough - 1]
    assert steps < LIMIT
    one, keep = engine(), [1, 3, 4, 5, 77]
    found = submitted(one, enough, keep, topk_logprobs=3, routed_experts=True, max_new_tokens=steps + room)
    held = one.unfinished()
    for key, (group, expected_group) in enumerate(zip(found, expected, strict=True)):
        if longest[key] <= steps:
            assert same(group, expected_group)
            continue
        assert group is None and (key in held) == (key in keep)
        for state, completion in zip(held.get(key, ()), expected_group, strict=False):
            length = len(completion.token_ids)
            if isinstance(state, Completion):
                assert same([state], [completion]) and length <= steps
                continue
            assert length > steps and len(state.token_ids) == steps
            assert completion.logprobs is not None and same(state.logprobs, completion.logprobs[:steps])
            assert same(state.token_ids, completion.token_ids[:steps]) and state.sampled.tolist() == [True] * steps
            assert state.routed_experts is not None and completion.routed_experts is not None
            assert torch.equal(state.routed_experts, completion.routed_experts[: len(state.routed_experts)])
            assert len(state.routed_experts) == len(PROMPTS[key].token_ids) + steps - 1
    assert sum(group is not None for group in found) >= enough and len(held) >= 2
    assert any(isinstance(s, Completion) for state in held.values() for s in state) or enough == 1


def test_batches_that_never_started_have_no_tokens_and_continue_later() -> None:
    one = engine(max_batch=2 * SIBLINGS)
    found = submitted(one, 1, range(6))
    held = one.unfinished()
    assert [group is None for group in found[2:]] == [True] * 4 and any(group is not None for group in found[:2])
    assert all(len(s.token_ids) == 0 and s.versions == () for key in range(2, 6) for s in held[key])  # type: ignore
    later = [f.result() for f in one.submit(requests([2, 3, 4, 5]), params(), 4)]
    fresh = [f.result() for f in engine(max_batch=2 * SIBLINGS).submit(requests([2, 3, 4, 5]), params(), 4)]
    assert all(same(a, b) for a, b in zip(later, fresh, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_stopped_response_continues_with_new_weights_and_each_value_has_its_version(temperature: float) -> None:
    settings = {"topk_logprobs": 3, "routed_experts": True, "temperature": temperature}
    one = engine()
    first = submitted(one, 1, range(6), **settings)
    held = one.unfinished()
    one.update_weights(stream_model(MODELS[1]), 1)
    found = submitted(one, 6, **settings | {"seed": 5})
    assert one.unfinished() == {}
    versions = set()
    for key, group in enumerate(found):
        assert len(group) == SIBLINGS
        for i, completion in enumerate(group):
            check_numbers(PROMPTS[key], completion, temperature)
            versions.add(tuple(span.policy_version for span in completion.policy_versions))
            assert completion.policy_version == max(span.policy_version for span in completion.policy_versions)
            has_end_token = int(completion.token_ids[-1]) in ENDS
            assert completion.finish_reason == ("stop" if has_end_token else "length")
            assert len(completion.token_ids) <= LIMIT and (has_end_token or len(completion.token_ids) == LIMIT)
            if (state := held.get(key)) is not None:
                before = state[i]
                assert same(completion.token_ids[: len(before.token_ids)], before.token_ids)
                if isinstance(before, Completion):
                    assert completion is before, "a complete sibling is not sampled again"
    assert (0, 1) in versions and (0,) in versions
    assert any(group is not None for group in first) and (1,) in versions


def test_another_engine_continues_held_responses_like_the_first() -> None:
    settings = {"topk_logprobs": 2, "routed_experts": True}
    one, other = engine(), engine(version=1)
    submitted(one, 2, range(6), **settings)
    other.restore(one.unfinished())
    one.update_weights(stream_model(MODELS[1]), 1)
    for enough in (2, 6):  # stopped and held once more in between
        expected, found = (submitted(e, enough, range(6), **settings) for e in (one, other))
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None) and (a is None or same(a, b))
        assert one.unfinished().keys() == other.unfinished().keys()


def test_a_continued_response_uses_new_random_numbers() -> None:
    def continued(seed: int) -> list[list[int]]:
        one = engine()
        submitted(one, 1, range(6))
        groups = submitted(one, 6, seed=seed)
        return [c.token_ids.tolist() for g in groups for c in g if c.policy_versions and len(c.token_ids) > 2]

    assert continued(4) == continued(4)
    one = engine()
    first = [c.token_ids.tolist() for c in one.generate([PROMPTS[1]] * 64, params(max_new_tokens=1))]
    one.restore({0: tuple(begun(*tokens) for tokens in first)})
    (future,) = one.submit([GroupRequest(0, PROMPTS[1], 64)], params(max_new_tokens=2), 1)
    second = [c.token_ids[1:].tolist() for c in future.result() or []]
    repeated = sum(a == b for a, b in zip(first, second, strict=True))
    assert repeated < 32


def test_held_groups_are_dropped_when_requested_unless_retained() -> None:
    one = engine()
    submitted(one, 1, range(6))
    held = set(one.unfinished())
    assert len(held) >= 4
    second, third, *remaining = sorted(held)
    futures = one.submit(requests([second, third]), params(max_new_tokens=LIMIT), 0, [third])
    assert [f.result() for f in futures] == [None, None]
    assert set(one.unfinished()) == {third, *remaining}, "those that were not asked for stay"


def test_a_held_response_with_all_its_tokens_is_complete() -> None:
    one = engine()
    submitted(one, 1, range(6))
    length = max(len(s.token_ids) for state in one.unfinished().values() for s in state)
    found = submitted(one, 6, max_new_tokens=length)
    reasons = {c.finish_reason for group in found for c in group}
    assert reasons == {"length", "stop"} and max(len(c.token_ids) for group in found for c in group) == length
    one.restore({7: (begun(9),)})
    wanted = [GroupRequest(7, PROMPTS[0], 1), GroupRequest(8, PROMPTS[1], 1)]
    full, other = (f.result() for f in one.submit(wanted, params(max_new_tokens=1), 1))
    assert full is not None and full[0].token_ids.tolist() == [9] and other is None, "it counts"


def test_invalid_submissions_are_rejected() -> None:
    one = LocalEngine(CONFIG, TOKENIZER, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="before the first update_weights"):
        one.submit(requests(), params(), 6)[0].result()
    one = engine()
    submitted(one, 1, range(6))
    key = next(iter(one.unfinished()))
    with pytest.raises(ValueError, match=f"group {key} .*3 responses, not 2"):
        one.submit([GroupRequest(key, PROMPTS[key], 2)], params(), 1)[0].result()
    with pytest.raises(ValueError, match="without the Top-K, routes"):
        one.submit(requests([key]), params(topk_logprobs=2), 1)[0].result()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_are_an_error_and_no_token(value: float, temperature: float) -> None:
    one = engine()
    broken = [
        (name, torch.full_like(w, value) if name == "model.norm.weight" else w) for name, w in stream_model(MODELS[0])
    ]
    one.update_weights(broken, 7)
    with pytest.raises(TrainingStopped, match=r"version 7 .*not finite"):
        one.generate(PROMPTS, params(temperature=temperature))
    futures = one.submit(requests(), params(temperature=temperature), 1)
    assert all(isinstance(future.exception(), TrainingStopped) for future in futures)
    one.update_weights(stream_model(MODELS[0]), 8)
    assert one.generate(PROMPTS[:1], params())
