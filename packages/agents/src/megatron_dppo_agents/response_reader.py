"""Reading of sampled tokens as a message: thoughts, content and tool calls, by the format of the model."""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from megatron_dppo.rollout.response_text import decode_tokens
from megatron_dppo.rollout.stop_strings import StopMatch
from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_conversations.formats import FORMATS, ParsedResponse, ResponseFormat
from megatron_dppo_conversations.rules import Message

_TAIL_TOKENS = 16
"""Tokens at the end of a prompt that contain its last tag."""


class ResponseReader:
    """Reader of the responses of one model."""

    def __init__(self, tokenizer: Any, response_format: ResponseFormat, *, separates_reasoning: bool) -> None:
        self._tokenizer = tokenizer
        self._format = response_format
        self._separates_reasoning = separates_reasoning

    def is_same_end(self, sampled: int, written: int) -> bool:
        """Return True if a sampled token ends a turn as the one does that the template writes."""
        return sampled == written or {sampled, written} <= self._turn_ends

    @cached_property
    def _turn_ends(self) -> frozenset[int]:
        return frozenset(self._token_ids(self._format.turn_ends))

    @cached_property
    def _stop_token_ids(self) -> tuple[int, ...]:
        return self._token_ids(self._format.stop_tokens)

    def check(self, call: AgentRequest) -> None:
        """Check that the model has what a call needs: stop tokens, and a form of tool calls if the call has tools."""
        self.check_stop_tokens(call)
        if call.reads_tool_calls and self._format.name == "none":
            names = ", ".join(name for name in FORMATS if name != "none")
            raise CallError(
                "'tools' were given, but the model's chat template has no known form of tool calls. Set agent.format "
                f"to one of {names}, or leave 'tools' out"
            )

    def check_stop_tokens(self, call: AgentRequest) -> None:
        """Check that the stop tokens of a call exist."""
        if call.stop_token_ids and max(call.stop_token_ids) >= len(self._tokenizer):
            raise CallError(
                f"'stop_token_ids': there is no token {max(call.stop_token_ids)!r:.80}; the tokenizer has "
                f"{len(self._tokenizer)}"
            )

    def stop_token_ids(self, call: AgentRequest) -> tuple[int, ...]:
        """Return the tokens that end the response to a call, besides the model's own end tokens.

        Where one tool call is allowed, the tag behind it ends the response.
        """
        call_end = self._call_end if call.reads_tool_calls and not call.makes_parallel_calls else ()
        return (*self._stop_token_ids, *call_end, *call.stop_token_ids)

    def unfollowed_settings(self, call: AgentRequest) -> tuple[str, ...]:
        """Return the names of settings that the model's format or tokenizer cannot follow."""
        is_limited = call.reads_tool_calls and not call.makes_parallel_calls
        return ("parallel_tool_calls",) if is_limited and not self._call_end else ()

    @cached_property
    def _call_end(self) -> tuple[int, ...]:
        tag = self._format.call_end()
        return self._token_ids([tag] if tag is not None else [])

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of sampled tokens, in which tool calls and stop strings are looked for."""
        return decode_tokens(self._tokenizer, tokens, self._format.text_tokens)

    def answer_text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens as rewards, judges and user functions read it."""
        return self._format.answer_text(self.text(tokens))

    def parse(
        self,
        call: AgentRequest,
        prompt: Sequence[int],
        tokens: Sequence[int],
        num_given: int = 0,
        stop_match: StopMatch | None = None,
    ) -> ParsedResponse:
        """Split sampled tokens into thoughts, text and tool calls.

        The response begins with the last ``num_given`` tokens of the prompt. A stop string that ended it is left out.
        """
        start = len(prompt) - num_given
        given = tuple(prompt[start:])
        # The last token ends the turn. Some tokenizers do not list it as special.
        ends_by_token = bool(tokens) and stop_match is None
        if ends_by_token and tokens[-1] in self._stop_token_ids and tokens[-1] not in self._turn_ends:
            tokens = tokens[:-1]
        text = self.text((*given, *tokens))
        if stop_match is not None:
            # Counted from the end: some tokenizers decode a first token in another way than behind others.
            text = text[: stop_match.start - len(self.text(tokens))]
        tools = call.tools if call.reads_tool_calls else ()
        # The template may open the thought, so that the response begins in it.
        tail = decode_tokens(self._tokenizer, prompt[max(0, start - _TAIL_TOKENS) : start])
        return self._format.parse(text, tools, starts_in_thought=tail.rstrip().endswith(("<think>", "[THINK]")))

    def message(self, parsed: ParsedResponse) -> Message:
        """Return a response as a message of the conversation."""
        separates = self._separates_reasoning
        message: Message = {"role": "assistant", "content": parsed.content if separates else parsed.text}
        if separates and parsed.reasoning:
            message["reasoning_content"] = parsed.reasoning
        if parsed.tool_calls:
            message["tool_calls"] = list(parsed.tool_calls)
        return message

    def sampled_message(self, parsed: ParsedResponse) -> Message:
        """Return a response as the chat template reads it: with the thoughts in the content, as they were sampled."""
        message: Message = {"role": "assistant", "content": parsed.text}
        return message | ({"tool_calls": list(parsed.tool_calls)} if parsed.tool_calls else {})

    def has_thoughts(self, message: Message) -> bool:
        """Return True if the content of an assistant message has thoughts."""
        return self._format.visible_text(message["content"]) != message["content"].strip()

    def message_keys(self, messages: Sequence[Message]) -> list[str]:
        """Return keys that are equal for equal messages.

        Clients strip the content of assistant messages, reformat the arguments of tool calls, write 2.0 as 2, and move
        or drop thoughts, so all of these are normalized.
        """
        return [
            json.dumps(
                [
                    message["role"],
                    self._format.visible_text(message["content"])
                    if message["role"] == "assistant"
                    else message["content"],
                    _by_value([call["function"] for call in message.get("tool_calls", ())]),
                ],
                sort_keys=True,
            )
            for message in messages
        ]

    def _token_ids(self, tokens: Sequence[str]) -> tuple[int, ...]:
        vocabulary = self._tokenizer.get_vocab()
        return tuple(vocabulary[token] for token in tokens if token in vocabulary)


def _by_value(value: Any) -> Any:
    """Return a JSON value whose numbers are floats, as JavaScript reads them, however they are spelled."""
    if isinstance(value, dict):
        return {key: _by_value(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_by_value(each) for each in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value) + 0.0  # no negative zero
        except OverflowError:
            return str(value)
    return value
