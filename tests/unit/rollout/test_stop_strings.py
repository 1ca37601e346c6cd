"""Stop strings: which tokens stay, what the program reads, and what a next call continues."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from typing import Any

import pytest
import torch

from megatron_dppo.rollout.response import GrowingResponse
from megatron_dppo.rollout.stop_strings import StopMatch, StopStrings
from megatron_dppo.rollout.turns import ResponseBranch
from megatron_dppo.types import FinishReason, SamplingParams, VersionSpan
from megatron_dppo_agents.runner import AgentTask
from megatron_dppo_engines.server import Generation
from test_agent_protocols import merge_messages, send
from tests.unit.scripted import CALL, TOOLS, World, chat_tokenizer

ASK = "<|im_start|>assistant\n"
REACT = "Thought: I look.\nAction: add\nObservation: 9\nThought: it goes on and on and on, far beyond the end"
PIECES = ["a", "b", "ab", "ba", "aab", "\n", "é"]


def test_the_fewest_tokens_that_hold_a_stop_string() -> None:
    """Against all prefixes in turn, for tokens of several characters, some of them half of one."""
    rng = random.Random(0)
    halves = [piece.encode() for piece in PIECES[:-1]] + [b"\xc3", b"\xa9"]

    def decode(tokens: Any) -> str:
        return b"".join(halves[token] for token in tokens).decode(errors="replace")

    matches = 0
    for _ in range(600):
        tokens = [rng.randrange(len(halves)) for _ in range(rng.randrange(1, 12))]
        strings = tuple(rng.choices(["aa", "bab", "é", "\na", "b", "abba"], k=rng.randrange(1, 4)))
        match = StopStrings(strings, decode).find(tokens)
        texts = [decode(tokens[:n]) for n in range(len(tokens) + 1)]
        expected = next((n for n, text in enumerate(texts) if any(each in text for each in strings)), None)
        if expected is None:
            assert match is None
            continue
        assert match is not None and match.num_tokens == expected
        starts = {each: texts[expected].find(each) for each in strings}
        assert match.start == starts[match.text] == min(start for start in starts.values() if start >= 0)
        matches += 1
    assert 200 < matches < 600


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 100, 4096])
def test_requests_of_growing_size_make_up_the_limit(limit: int) -> None:
    sizes = list(StopStrings.request_sizes(limit))
    assert sum(sizes) == limit and (limit < 64 or sizes[:3] == [16, 16, 32])
    assert all(size <= max(16, total) for size, total in zip(sizes[1:], itertools.accumulate(sizes), strict=False))


@pytest.mark.parametrize("stream", [False, True])
def test_chat_ends_before_the_string_and_goes_on_with_its_tokens(world: World, stream: bool) -> None:
    answer_text = REACT[: REACT.index(":", REACT.index("Obs")) + 1]
    world.script = {f"seen{'<|im_end|>'}\n{ASK}": "It is 3", ASK: REACT}
    bodies: list[Any] = []

    async def agent(task: AgentTask) -> None:
        user = {"role": "user", "content": "1+2"}
        fields = {"stop_sequences": ["never", "\nObservation:"], "max_tokens": 300, "model": "m", "stream": stream}
        _, answer = await send(task, "/v1/messages", {**fields, "messages": [user]})
        if stream:
            assert answer[0]["message"]["stop_sequence"] is None
            (delta,) = [each["delta"] for each in answer if each["type"] == "message_delta"]
            assert delta == {"stop_reason": "stop_sequence", "stop_sequence": "\nObservation:"}
        bodies.append(merge_messages(answer) if stream else answer)
        said = {"role": "assistant", "content": bodies[0]["content"]}
        seen = {"role": "user", "content": "seen"}
        chat = {"messages": [user, {**said, "content": said["content"][0]["text"]}, seen], "stop": "never"}
        status, body = await send(task, "/v1/chat/completions", chat)
        assert status == 200 and body["choices"][0]["finish_reason"] == "stop"
        bodies.append(body)

    result = world.play(agent, 2000)
    first, second = bodies
    assert first["content"] == [{"type": "text", "text": answer_text.removesuffix("\nObservation:")}]
    if not stream:
        assert (first["stop_reason"], first["stop_sequence"]) == ("stop_sequence", "\nObservation:")
        # One token a byte: all that is charged for, and nothing else, trains.
        assert first["usage"]["output_tokens"] == len(answer_text)
    assert second["choices"][0]["message"]["content"] == "It is 3"
    assert world.trained(result) == [answer_text, "It is 3<|im_end|>"]
    between = f"{answer_text}<|im_end|>\n<|im_start|>user\nseen<|im_end|>\n{ASK}It is 3"
    assert between in world.text(result) and result.counts["agent/sequences"] == 1
    # Parts of 16, 16 and 32 tokens were sampled for it; nothing behind the string stays.
    dropped = 64 - len(answer_text)
    assert result.counts["agent/untrained/after_stop"] == dropped / (64 + len("It is 3") + 1)
    assert result.counts["agent/untrained_fraction"] == result.counts["agent/untrained/after_stop"]
    assert [request.params.max_new_tokens for request in world.server.requests[:3]] == [16, 16, 32]
    assert result.counts["agent/ignored_settings"] == 0


def test_completions_and_tokens_continue_with_the_string(world: World) -> None:
    world.script = {"Question\n": "Look\nObservation: made up", "Observation: 42\n": "Answer\n\n", "again\n": "x"}
    texts: list[str] = []

    async def agent(task: AgentTask) -> None:
        prompt = "Question\n"
        for more in ("Observation: 42\n", " again\n"):
            body = {"prompt": prompt, "stop": ["Observation:", "\n\n"], "max_tokens": 40}
            status, answer = await send(task, "/v1/completions", body)
            assert status == 200 and answer["choices"][0]["finish_reason"] == "stop"
            texts.append(answer["choices"][0]["text"])
            prompt += texts[-1] + more
        # This prompt lacks the string that the second response ended with.
        assert (await send(task, "/v1/completions", {"prompt": prompt}))[0] == 200

    result = world.play(agent, 2000)
    assert texts == ["Look\n", "Answer"]
    first, second = result.segments
    assert world.text(first) == "Question\nLook\nObservation: 42\nAnswer\n\n"
    assert world.trained(first) == ["Look\nObservation:", "Answer\n\n"]
    assert world.text(second) == "Question\nLook\nObservation: 42\nAnswer again\nx<|im_end|>"
    assert first.logprobs is not None and len(first.logprobs) == len(first.token_ids)

    async def by_tokens(task: AgentTask) -> None:
        body = {"token_ids": world.encode("Question\n"), "sampling_params": {"stop": ["\n"], "max_tokens": 40}}
        _, answer = await send(task, "/inference/v1/generate", body)
        tokens = answer["choices"][0]["token_ids"]
        assert world.tokenizer.decode(tokens) == "Look\n" and len(answer["choices"][0]["logprobs"]["content"]) == 5
        more = {"token_ids": [*body["token_ids"], *tokens, *world.encode("Observation: 42\n")]}
        assert (await send(task, "/inference/v1/generate", more))[0] == 200

    result = world.play(by_tokens, 2000)
    assert result.counts["agent/sequences"] == 1 and world.trained(result)[0] == "Look\n"


def test_limits_tools_and_ends_come_first(world: World) -> None:
    """A limit within the string, a call before it, an end token before it, and the string in the last token."""
    call = {"messages": [{"role": "user", "content": "q"}], "tools": TOOLS}
    cases = [
        ("abcSTOPdef", {"max_tokens": 6}, "length", "abcSTO", "abcSTO"),
        ("abcSTOPdef", {"max_tokens": 7}, "stop", "abc", "abcSTOP"),
        (f"{CALL}STOP and more", {}, "tool_calls", None, f"{CALL}STOP"),
        ("abc", {}, "stop", "abc", "abc<|im_end|>"),
        ("STOPabc", {}, "stop", "", "STOP"),
        ("x" * 90 + "STOP" + "y" * 90, {}, "stop", "x" * 90, "x" * 90 + "STOP"),
    ]
    for said, fields, reason, content, trained in cases:
        world.script = {ASK: said}
        choices: list[Any] = []

        async def agent(task: AgentTask, fields: Any = fields, choices: list[Any] = choices) -> None:
            body = {**call, **fields, "stop": ["STOP", "TOPd"]}
            choices.append((await send(task, "/v1/chat/completions", body))[1]["choices"][0])

        result = world.play(agent, 2000)
        (choice,) = choices
        assert (choice["finish_reason"], choice["message"]["content"]) == (reason, content), said
        assert world.trained(result) == [trained]
        assert result.finish_reason == (FinishReason.LENGTH if reason == "length" else FinishReason.STOP)


def test_wrong_stop_strings_are_refused(world: World) -> None:
    for stop in ("", [""], ["a", 1], {"a": 1}, 7, ["x"] * 17, "x" * 257):
        answers: list[Any] = []

        async def agent(task: AgentTask, stop: Any = stop, answers: list[Any] = answers) -> None:
            body = {"messages": [{"role": "user", "content": "q"}]}
            answers.append(await send(task, "/v1/chat/completions", {**body, "stop": stop}))
            body |= {"max_tokens": 9, "model": "m"}
            answers.append(await send(task, "/v1/messages", {**body, "stop_sequences": stop}))
            assert (await send(task, "/v1/completions", {"prompt": "q"}))[0] == 200

        world.play(agent, 2000)
        for (status, body), name in zip(answers, ("stop", "stop_sequences"), strict=True):
            assert status == 400 and f"'{name}' = " in body["error"]["message"], json.dumps(body)


@pytest.mark.parametrize("num_known", [3, 7, 20])
def test_a_turn_that_was_interrupted_ends_at_the_same_string_and_is_replayed(num_known: int) -> None:
    """A checkpoint has the tokens of a part that was cut off: before the string, within it, or behind it."""
    text = "12345STOP and what follows in the same part"
    tokenizer = chat_tokenizer()
    tokens = tokenizer.encode(text, add_special_tokens=False)
    requested: list[int] = []

    def part(start: int, end: int) -> Generation:
        return Generation(
            token_ids=torch.tensor(tokens[start:end], dtype=torch.int32),
            logprobs=torch.arange(start, end, dtype=torch.float32),
            finish_reason=FinishReason.LENGTH,
            versions=(VersionSpan(0, end - start, 4),),
        )

    async def sample(response: GrowingResponse, size: int, _: tuple[int, ...]) -> FinishReason:
        requested.append(size)
        start = len(response.tokens)
        response.append_sampled(part(start, start + size))
        return FinishReason.LENGTH

    response = GrowingResponse([7])
    response.append_sampled(part(0, num_known))
    strings = StopStrings(("STOP",), tokenizer.decode)
    dropped = max(num_known, 0 if num_known > 9 else num_known + 16) - 9
    for _ in range(2):
        branch = ResponseBranch(response, SamplingParams(max_new_tokens=200, seed=1), tokenizer, sample)
        turn = asyncio.run(branch.sample(None, (), strings))
        assert (turn.text, turn.finish_reason) == ("12345STOP", FinishReason.STOP)
        assert turn.stop_match == StopMatch("STOP", 5, 9)
        assert response.logprobs(0, 9) == tuple(range(9)) and response.turn_ends == [(9, FinishReason.STOP)]
        assert requested == ([] if num_known > 9 else [16])
        assert response.num_after_stop == dropped, "also of a turn that is replayed"
        state = response.state()
        response = GrowingResponse([7])
        response.restore(state)
