"""Which of several candidates: the sequence that a text continues, the thoughts of equal texts, segments' versions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.types import Completion, FinishReason, VersionSpan
from megatron_dppo_agents.conversations import ForkReason, continue_text, restore_thoughts
from megatron_dppo_agents.segments import join_segments


class Template:
    """Encodes each character as a token; a sequence of its own begins with a 0."""

    def encode(self, text: str | tuple[int, ...], add_special_tokens: bool = False) -> list[int]:
        ids = [ord(letter) for letter in text] if isinstance(text, str) else list(text)
        return [0, *ids] if add_special_tokens else ids


def sequence(text: str, *, is_chat: bool = False, response: str = "") -> Any:
    return SimpleNamespace(
        is_chat=is_chat,
        text=None if is_chat else text + response,
        prompt_text=text,
        branch=SimpleNamespace(token_ids=tuple(map(ord, text + response))),
        turns=[SimpleNamespace(start=len(text))] if response else [],
    )


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    ("known", "prompt", "index", "rest"),
    [
        (["one", "one two"], "one two three", 1, " three"),
        (["one", "one two", "one tw"], "one two three", 2, "o three"),
        (["one", "one two"], "one to", 0, " to"),
        (["one two", "on"], "one", 1, "e"),
        (["one", "one"], "one more", 1, " more"),
        (["one", "two"], "three", None, "three"),
        (["one"], "one", 0, ""),
    ],
)
def test_a_text_continues_the_newest_sequence_that_it_begins_with(
    known: list[str], prompt: str, index: int | None, rest: str, as_tokens: bool
) -> None:
    """The longer of two is chosen if one begins with the other; chats never are candidates."""
    conversations = [sequence(text) for text in known]
    given = tuple(map(ord, prompt)) if as_tokens else prompt
    call: Any = SimpleNamespace(text=given)
    result = continue_text(call, [*conversations, sequence(prompt, is_chat=True)], Template())  # type: ignore[arg-type]
    assert result.conversation is (None if index is None else conversations[index])
    assert result.token_ids == ([0] if index is None else []) + [ord(letter) for letter in rest]


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ("Add: f(2) is 3", ForkReason.HISTORY),  # the response, with its number rewritten
        ("Add: f(2.0) ", ForkReason.HISTORY),  # without its line break
        ("Add: and more", None),
        ("Add: ", None),
        ("Ad", None),
        ("Sum: f(2.0)\n", None),
        ("Add: f(2.0) \n is 3", None),  # continues it
    ],
)
def test_a_prompt_with_a_part_of_a_response_is_a_fork_of_its_history(
    prompt: str, reason: ForkReason | None, *, as_tokens: bool
) -> None:
    conversations = [sequence("Sum: "), sequence("Add: ", response="f(2.0) \n"), sequence(prompt, is_chat=True)]
    call: Any = SimpleNamespace(text=tuple(map(ord, prompt)) if as_tokens else prompt)
    assert continue_text(call, conversations, Template()).fork_reason == reason  # type: ignore[arg-type]


class Reader:
    """Thoughts stand before a bar."""

    def has_thoughts(self, message: dict[str, str]) -> bool:
        return "|" in message["content"]


def chat(*messages: tuple[str, str]) -> Any:
    """A conversation; its keys are what a client sees."""
    keys = [f"{role}:{content.rpartition('|')[2]}" for role, content in messages]
    return SimpleNamespace(keys=keys, messages=[{"role": role, "content": content} for role, content in messages])


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        (["yes", "yes"], ["first|yes", "second|yes"]),
        (["yes"], ["first|yes"]),
        (["yes", "no", "yes"], ["first|yes", "other|no", "second|yes"]),
        (["no", "yes"], ["other|no", "first|yes"]),
        (["mine|yes", "yes"], ["mine|yes", "first|yes"]),
        (["yes", "yes", "yes"], ["first|yes", "second|yes", "second|yes"]),
        (["maybe"], ["maybe"]),
    ],
)
def test_equal_texts_get_their_thoughts_in_the_order_in_which_they_were_sent(
    contents: list[str], expected: list[str]
) -> None:
    sent = [("user", "a"), ("assistant", "first|yes"), ("assistant", "other|no"), ("assistant", "second|yes")]
    messages = [{"role": "assistant", "content": content} for content in contents]
    keys = [f"assistant:{content.rpartition('|')[2]}" for content in contents]
    result = restore_thoughts(messages, keys, [chat(*sent[:2]), chat(*sent[2:])], Reader())  # type: ignore[arg-type]
    assert [message["content"] for message in result] == expected
    assert [message["content"] for message in messages] == contents, "the client's own messages stay"


def segment(versions: list[int], *, routes: bool = False) -> Completion:
    """A given token, and one sampled by each version."""
    length = len(versions) + 1
    return Completion(
        token_ids=torch.arange(length, dtype=torch.int32),
        logprobs=torch.zeros(length),
        finish_reason=FinishReason.STOP,
        policy_version=max(versions),
        text=f"{versions}",
        loss_mask=torch.tensor([False] + [True] * len(versions)),
        policy_versions=tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(versions, 1)),
        routed_experts=torch.full((length - 1, 2, 1), versions[0], dtype=torch.uint8) if routes else None,
    )


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("versions", [[[3], [5], [4]], [[5, 6], [3], [4, 4]], [[3], [3], [3]]])
def test_segments_of_several_versions_keep_theirs_and_the_episode_has_the_newest(
    versions: list[list[int]], last: int
) -> None:
    parts = [segment(each, routes=True) for each in versions]
    joined = join_segments(parts, last)
    assert joined.policy_version == max(version for each in versions for version in each)
    assert joined.text == parts[last].text
    starts = [0, len(versions[0]) + 1, len(versions[0]) + len(versions[1]) + 2]
    assert [tuple(span)[:3] for span in joined.policy_versions] == [
        (version, start + i, start + i + 1)
        for start, each in zip(starts, versions, strict=True)
        for i, version in enumerate(each, 1)
    ]
    # One row a token but the last of each segment, and a missing row between two segments.
    assert joined.routed_experts is not None
    assert len(joined.routed_experts) == len(joined.token_ids) - 1
    for part, original in zip(joined.segments, parts, strict=True):
        assert part.policy_versions == original.policy_versions
        assert part.routed_experts is not None and original.routed_experts is not None
        assert torch.equal(part.routed_experts, original.routed_experts)
