"""The local engine runs a user's function for all responses in lockstep, stops it between turns, and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import torch
from torch import Tensor

from columns import ids, logs, mask, same
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.engines.local import lockstep
from megatron_dppo.errors import GenerateError
from megatron_dppo.hf.folder import stream_model
from megatron_dppo.rollout.engine import GroupRequest
from megatron_dppo.rollout.response import PartialResponse
from megatron_dppo.rollout.turns import Turns
from megatron_dppo.types import Completion, Prompt, PromptLimits
from megatron_dppo_agents.generate import AgentFunction
from megatron_dppo_agents.runner import AgentTask
from tests.unit.engines.test_local_engine import (
    ENDS,
    LIMIT,
    MODELS,
    PROMPTS,
    SIBLINGS,
    TEXTS,
    TOKENIZER,
    check_numbers,
    engine,
    in_groups,
    params,
    requests,
    submitted,
)

STOP, TOOL = 6, "=7"


def count_turns(prompt: Prompt) -> int:
    return 1 + TEXTS.index(prompt.text) % 3


async def with_tool(prompt: Prompt, turns: Turns) -> Completion:
    """One to three turns with a tool between them; the turns are short, or stop at a token of their own."""
    for _ in range(count_turns(prompt) - 1):
        await turns.sample(max_new_tokens=4, stop_token_ids=[STOP])
        turns.append(TOOL)
    await turns.sample()
    return turns.finish(reward=float(len(turns.token_ids)))


def list_token_ids(completions: Sequence[Completion]) -> list[Tensor]:
    return [c.token_ids for c in completions]


def greedy_turn(tokens: list[int], limit: int, ends: set[int]) -> list[int]:
    """The most probable tokens, one pass of the model for each."""
    new: list[int] = []
    while len(new) < limit and not (new and new[-1] in ends):
        with torch.no_grad():
            new.append(int(MODELS[0](input_ids=torch.tensor([tokens + new])).logits[0, -1].argmax()))
    return new


@pytest.mark.parametrize("max_batch", [512, 2])
def test_turns_equal_those_of_each_response_alone_with_tool_text_between_them(max_batch: int) -> None:
    result = engine(with_tool, max_batch=max_batch).generate(PROMPTS, params(temperature=0))
    for prompt, completion in zip(PROMPTS, result, strict=True):
        tokens: list[int] = []
        sampled: list[bool] = []
        for _ in range(count_turns(prompt) - 1):
            turn = greedy_turn([*prompt.token_ids, *tokens], 4, ENDS | {STOP})
            given = TOKENIZER.encode(TOOL, add_special_tokens=False)
            tokens += [*turn, *given]
            sampled += [True] * len(turn) + [False] * len(given)
        turn = greedy_turn([*prompt.token_ids, *tokens], LIMIT - len(tokens), ENDS)
        assert completion.token_ids.tolist() == [*tokens, *turn] and completion.reward == len(completion.token_ids)
        assert completion.finish_reason == ("stop" if turn[-1] in ENDS else "length")
        assert same(completion.loss_mask, None if all(sampled) else mask([*sampled, *[True] * len(turn)]))


def test_with_filters_sampled_tokens_have_a_mask_and_appended_tokens_have_none() -> None:
    actual = engine(with_tool).generate(PROMPTS, params(top_p=0.7, min_p=0.01, return_sampling_mask=True))
    for prompt, completion in zip(PROMPTS, actual, strict=True):
        assert completion.sampling_mask is not None and len(completion.sampling_mask) == len(completion.token_ids)
        tokens, sampled = completion.token_ids.tolist(), completion.loss_mask
        with torch.no_grad():
            logits = MODELS[0](input_ids=torch.tensor([[*prompt.token_ids, *tokens]])).logits[0]
        for i, mask_ids in enumerate(
            completion.sampling_mask.ids.long().split(completion.sampling_mask.counts.tolist())
        ):
            assert (tokens[i] in mask_ids) if sampled is None or sampled[i] else not len(mask_ids)
            if len(mask_ids) and completion.logprobs is not None:
                expected = logits[len(prompt.token_ids) - 1 + i, mask_ids].log_softmax(0)[mask_ids == tokens[i]]
                torch.testing.assert_close(completion.logprobs[i : i + 1], expected, atol=2e-5, rtol=0)


def test_a_turn_ends_with_its_stop_token() -> None:
    plain = engine().generate(PROMPTS, params())
    stop_ids = [int(plain[0].token_ids[1]), STOP]

    async def stops(prompt: Prompt, turns: Turns) -> Completion:
        turn_stop_ids = stop_ids if prompt is PROMPTS[0] else []
        turn = await turns.sample(stop_token_ids=turn_stop_ids)
        assert turn.finish_reason == ("stop" if turn.token_ids[-1] in (*ENDS, *turn_stop_ids) else "length")
        return turns.finish()

    result = engine(stops).generate(PROMPTS, params())
    cut = next(i for i, token in enumerate(plain[0].token_ids.tolist()) if token in (*stop_ids, *ENDS))
    assert int(plain[0].token_ids[cut]) in stop_ids and same(result[0].token_ids, plain[0].token_ids[: cut + 1])
    assert any(set(stop_ids) & set(c.token_ids[:-1].tolist()) for c in plain[1:])
    assert same(list_token_ids(result[1:]), list_token_ids(plain[1:])), "the stop tokens of one turn are no others'"


def test_a_one_turn_function_equals_plain_generation() -> None:
    async def one_turn(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample()
        return turns.finish()

    settings = {"topk_logprobs": 3, "routed_experts": True}
    repeated = [prompt for prompt in PROMPTS for _ in range(SIBLINGS)]
    one = engine(one_turn)
    completions = one.generate(repeated, params(**settings))
    assert same(completions, engine().generate(repeated, params(**settings)))
    assert same(completions, [c for group in submitted(one, 6, **settings) for c in group])
    one.close()


def test_a_function_is_stopped_between_turns_and_continues_when_it_is_rerun() -> None:
    stopped, begun = [], []

    async def watched(prompt: Prompt, turns: Turns) -> Completion:
        begun.append(prompt.text)
        try:
            return await with_tool(prompt, turns)
        except Exception:
            raise AssertionError("being stopped is no exception that a function handles") from None
        finally:
            if turns.finished is None:
                stopped.append(prompt.text)

    expected = in_groups(engine(with_tool).generate([p for p in PROMPTS for _ in range(SIBLINGS)], params()))
    settings = {"topk_logprobs": 3, "routed_experts": True}
    one = engine(watched)
    completions = submitted(one, 2, range(6), **settings)
    assert [group is not None for group in completions] == [True, False, False] * 2, (
        "groups of one turn are complete first"
    )
    assert all(same(list_token_ids(completions[g]), list_token_ids(expected[g])) for g in (0, 3))
    assert stopped == [TEXTS[i] for i in (1, 2, 4, 5) for _ in range(SIBLINGS)]
    states = one.unfinished()
    assert all(len(s.turn_ends) == 1 and s.parts == 1 for state in states.values() for s in state)  # type: ignore
    one.update_weights(stream_model(MODELS[1]), 1)
    other = engine(with_tool, version=1)
    other.restore(states)
    begun.clear()
    (groups, continued) = (
        [f.result() for f in e.submit(requests([1, 2, 4, 5]), params(**settings), 4)] for e in (one, other)
    )
    assert len(begun) == 12
    for key, group, group_in_second_run in zip([1, 2, 4, 5], groups, continued, strict=True):
        assert group is not None and group_in_second_run is not None and same(group, group_in_second_run)
        for state, completion in zip(states[key], group, strict=True):
            check_numbers(PROMPTS[key], completion)
            assert same(completion.token_ids[: len(state.token_ids)], state.token_ids)
            assert completion.policy_versions[0].policy_version == 0
            assert completion.policy_version == 1 and completion.loss_mask is not None


def test_stopping_and_continuing_equals_an_uninterrupted_run() -> None:
    expected = engine(with_tool).generate(PROMPTS, params(temperature=0))
    one = engine(with_tool)
    groups = [GroupRequest(key, prompt, 1) for key, prompt in enumerate(PROMPTS)]
    result: dict[int, Completion] = {}
    for enough in (1, 1, 1):
        left = [group for group in groups if group.key not in result]
        for group, future in zip(left, one.submit(left, params(temperature=0), enough, range(6)), strict=True):
            if future.result() is not None:
                (result[group.key],) = future.result()
        assert len(result) + len(one.unfinished()) == 6
    assert one.unfinished() == {}
    for key, completion in enumerate(expected):
        actual = result[key]
        assert same(actual.token_ids, completion.token_ids) and same(actual.loss_mask, completion.loss_mask)
        assert actual.reward == completion.reward and actual.logprobs is not None and completion.logprobs is not None
        assert actual.logprobs.tolist() == pytest.approx(completion.logprobs.tolist(), abs=1e-5)


def test_other_awaits_of_a_function_change_nothing() -> None:
    async def slow(prompt: Prompt, turns: Turns) -> Completion:
        index = TEXTS.index(prompt.text)
        await asyncio.sleep(0.03 * (5 - index))
        turn = await turns.sample(max_new_tokens=4, stop_token_ids=[STOP])
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.02 * (index % 2))
        turns.append(TOOL)
        await asyncio.wait_for(turns.sample(), 60)
        assert turn.token_ids
        return turns.finish()

    async def quick(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(max_new_tokens=4, stop_token_ids=[STOP])
        turns.append(TOOL)
        await turns.sample()
        return turns.finish()

    repeated = [prompt for prompt in PROMPTS for _ in range(SIBLINGS)]
    one = engine(slow)
    assert same(one.generate(repeated, params()), engine(quick).generate(repeated, params()))
    assert same(one.generate(repeated, params()), one.generate(repeated, params()))
    one.close()


def test_functions_that_wait_for_each_other_continue_after_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep, "PATIENCE_SECONDS", 0.05)
    room = asyncio.Semaphore(4)

    async def in_turn(prompt: Prompt, turns: Turns) -> Completion:
        async with room:
            return await with_tool(prompt, turns)

    actual = engine(in_turn).generate(PROMPTS, params(temperature=0))
    expected = engine(with_tool).generate(PROMPTS, params(temperature=0))
    assert same(list_token_ids(actual), list_token_ids(expected))


def test_a_failure_is_reported_cancels_all_functions_and_loses_no_held_response() -> None:
    cancelled = []

    async def fails(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(max_new_tokens=3)
        if prompt is PROMPTS[2]:
            raise KeyError("tool")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(prompt.text)
            raise
        return turns.finish()

    words = r"fails failed on prompt 9-9-9\+4=: KeyError: 'tool' \(.*test_local_turns.py, line \d+\)"
    one = engine(fails)
    with pytest.raises(GenerateError, match=words):
        one.generate(PROMPTS, params())
    assert sorted(cancelled) == sorted(t for t in TEXTS if t != TEXTS[2])
    nothing = PartialResponse(token_ids=ids([]), logprobs=logs([]), sampled=mask([]), versions=())
    held = {2: (nothing,) * SIBLINGS}
    one.restore(held)
    futures = one.submit(requests(), params(), 2)
    for future in futures:
        with pytest.raises(GenerateError, match=words):
            future.result()
    assert same(one.unfinished(), held)
    one.close()


def test_a_function_that_returns_although_it_was_stopped_is_not_complete() -> None:
    async def stubborn(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(max_new_tokens=2)
        try:
            for _ in range(count_turns(prompt) - 1):
                await turns.sample(max_new_tokens=2)
        finally:
            return turns.finish()  # noqa: B012

    one = engine(stubborn)
    completions = submitted(one, 1, range(6))
    assert [group is not None for group in completions] == [True, False, False] * 2 and set(one.unfinished()) == {
        1,
        2,
        4,
        5,
    }


def test_two_concurrent_turns_of_a_response_are_rejected_and_an_unawaited_turn_is_harmless() -> None:
    async def both(prompt: Prompt, turns: Turns) -> Completion:
        await asyncio.gather(turns.sample(), turns.sample())
        return turns.finish()

    with pytest.raises(GenerateError, match="another turn"):
        engine(both).generate(PROMPTS, params())

    async def leaves(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(max_new_tokens=2)
        left = asyncio.create_task(turns.sample())
        await asyncio.sleep(0)
        completion = turns.finish()
        assert not left.done()
        return completion

    one = engine(leaves)
    assert all(0 < len(c.token_ids) <= 2 for c in one.generate(PROMPTS, params()))
    one.close()


async def two_completions(task: AgentTask) -> float:
    """An agent that does what ``two_turns`` does."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        text = task.prompt
        for limit, behind in ((4, TOOL), (None, "")):
            body = {"prompt": text, "max_tokens": limit}
            async with session.post(f"{task.base_url}/completions", json=body) as response:
                assert response.status == 200, await response.text()
                text += (await response.json())["choices"][0]["text"] + behind
    return 0.5


def test_agents_sample_the_same_as_a_function_with_the_same_turns() -> None:
    async def two_turns(prompt: Prompt, turns: Turns) -> Completion:
        await turns.sample(max_new_tokens=4)
        turns.append(TOOL)
        await turns.sample()
        return turns.finish(reward=0.5)

    how = params(max_new_tokens=24, topk_logprobs=3, routed_experts=True)
    longest = max(len(prompt.token_ids) for prompt in PROMPTS)
    by_function = engine(two_turns).generate(PROMPTS, replace(how, max_new_tokens=24 - longest))
    agents = AgentFunction(AgentConfig(function=f"{__name__}:two_completions", reward="exit"), {})
    tasks = [replace(p, is_task=True, messages=({"role": "user", "content": p.text},)) for p in PROMPTS]
    result = engine(agents).generate(tasks, how)
    agents.close()
    for prompt, one, other in zip(PROMPTS, by_function, result, strict=True):
        start, length = len(prompt.token_ids), len(one.token_ids)
        assert same(other.token_ids[: start + length], ids([*prompt.token_ids, *one.token_ids.tolist()]))
        assert other.loss_mask is not None and not other.loss_mask[:start].any() and other.reward == 0.5
        assert one.loss_mask is not None and same(other.loss_mask[start : start + length], one.loss_mask)
        check_numbers(prompt, behind(other, start))


async def many_completions(task: AgentTask) -> None:
    """An agent of one to three turns, by its prompt."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        text = task.prompt
        for turn in range(1 + TEXTS.index(task.prompt) % 3):
            body = {"prompt": text + TOOL * (turn > 0), "max_tokens": 4}
            async with session.post(f"{task.base_url}/completions", json=body) as response:
                assert response.status == 200, await response.text()
                text = body["prompt"] + (await response.json())["choices"][0]["text"]


async def other_completion(task: AgentTask) -> None:
    """An agent that begins in another way than ``many_completions``."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {task.api_key}"}) as session:
        body = {"prompt": TOOL + task.prompt, "max_tokens": 4}
        async with session.post(f"{task.base_url}/completions", json=body) as response:
            assert response.status == 200, await response.text()


def test_agents_are_stopped_between_turns_and_rerun() -> None:
    agents = AgentFunction(AgentConfig(function=f"{__name__}:many_completions"), {})
    one = engine(agents)
    tasks = [replace(p, is_task=True, messages=({"role": "user", "content": p.text},)) for p in PROMPTS]
    groups = [GroupRequest(key, task, 2) for key, task in enumerate(tasks)]
    how = params(max_new_tokens=40, temperature=0)
    result = [future.result() for future in one.submit(groups, how, 2, range(6))]
    assert [group is not None for group in result] == [True, False, False] * 2, "groups of one turn are complete first"
    held = one.unfinished()
    assert set(held) == {1, 2, 4, 5}
    left = [group for group in groups if group.key % 3]
    differs = AgentFunction(AgentConfig(function=f"{__name__}:other_completion"), {})
    other = engine(differs)
    other.restore(held)
    changed = [future.result() for future in other.submit(left, how, 4)]
    differs.close()
    for group, states in zip(changed, held.values(), strict=True):
        for completion, state in zip(group or (), states, strict=True):
            lost = int(state.sampled.sum())
            trained = int(completion.loss_mask.sum())
            assert lost and completion.counts["agent/untrained/not_repeated"] == lost / (lost + trained)
    continued = [future.result() for future in one.submit(left, how, 4)]
    uninterrupted = [future.result() for future in engine(agents).submit(left, how, 4)]
    agents.close()
    for stopped, straight in zip(continued, uninterrupted, strict=True):
        assert stopped is not None and straight is not None
        for a, b in zip(stopped, straight, strict=True):
            assert not a.failure and same(a.token_ids, b.token_ids) and same(a.loss_mask, b.loss_mask)
            assert a.counts["agent/untrained/not_repeated"] == 0


def behind(found: Completion, start: int) -> Completion:
    """A completion as if its first tokens were its prompt."""
    columns = ("token_ids", "logprobs", "topk_token_ids", "topk_logprobs", "loss_mask")
    spans = tuple(span._replace(start=span.start - start, end=span.end - start) for span in found.policy_versions)
    return replace(found, policy_versions=spans, **{name: getattr(found, name)[start:] for name in columns})


@pytest.mark.parametrize("function", [None, with_tool])
def test_a_response_ends_at_the_limit_of_its_source(function: Any) -> None:
    """Greedy responses do not depend on their neighbours, so that a limited one begins like an unlimited one."""
    limits = [None, 3, None, 5, 50, 1]
    prompts = [
        replace(prompt, limits=None if limit is None else PromptLimits(source="a", max_new_tokens=limit))
        for prompt, limit in zip(PROMPTS, limits, strict=True)
    ]
    settings = params(temperature=0.0)
    expected = engine(function).generate(PROMPTS, settings)
    found = engine(function).generate(prompts, settings)
    for one, limited, limit in zip(expected, found, limits, strict=True):
        tokens = one.token_ids[:limit]
        assert torch.equal(limited.token_ids, tokens)
        assert limited.finish_reason == ("length" if len(tokens) < len(one.token_ids) else one.finish_reason)
    assert min(len(each.token_ids) for each in found) == 1 < max(len(each.token_ids) for each in found)
