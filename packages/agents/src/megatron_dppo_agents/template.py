"""Rendering of messages with the model's chat template, so that a conversation only grows at its end."""

import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from megatron_dppo_agents.agent_request import AgentRequest, CallError, ContextLengthError
from megatron_dppo_conversations.chat_template import apply_chat_template, prints_tools, template_problem
from megatron_dppo_conversations.rules import Message, with_text_arguments


class ChatTemplate:
    """The chat template of a tokenizer. Methods raise ``CallError`` for a call that it cannot render or encode."""

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any],
        now: datetime | None = None,
        *,
        has_text_arguments: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._has_text_arguments = has_text_arguments
        self._now = now or datetime.now()
        self._variables = variables
        # Random, so that no message can contain it.
        self._marker = f"mark{secrets.token_hex(12)}"
        """Text that stands for a response in a rendered conversation."""

    def check_size(self, call: AgentRequest, max_tokens: int) -> None:
        """Check without rendering or encoding that a call may fit into a number of tokens."""
        # Unicode's normal form composes up to four characters into one.
        size = sum(len(text) if text.isascii() else len(text) // 4 for text in call.texts)
        if call.min_tokens > max_tokens or size > max_tokens * self._longest_token:
            raise ContextLengthError(f"the conversation has {max(size, call.min_tokens)} characters", max_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Number of characters of the longest token."""
        return max(map(len, self._tokenizer.get_vocab()))

    def check_tools(self, call: AgentRequest) -> None:
        """Check that the policy can see the tools of a call."""
        if call.tools and self._tokenizer.chat_template and not self._prints_tools:
            raise CallError(
                "'tools' were given, but the model's chat template does not write them into the prompt; describe the "
                "tools in a message, or use a model folder whose template has them"
            )

    @cached_property
    def _prints_tools(self) -> bool:
        return prints_tools(self._tokenizer, self._now, self._variables)

    def encode(self, text: str | Sequence[int], *, add_special_tokens: bool = False) -> list[int]:
        """Return the tokens of a text, which may contain special tokens; token ids are checked and returned."""
        if not isinstance(text, str):
            if text and max(text) >= len(self._tokenizer):
                raise CallError(f"there is no token {max(text)}; the tokenizer has {len(self._tokenizer)}")
            return list(text)
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, ValueError) as error:  # half of a surrogate pair, by an escape in JSON
            raise CallError(f"the text cannot be encoded: {error}") from error

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt tokens of messages that start a conversation."""
        return self.encode(self._render(messages, tools, add_generation_prompt=True))

    def continuation(
        self, known: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """Return the text that follows the last response of a conversation, up to the next generation prompt.

        The response itself, the last of the known messages, is not rendered: a marker stands for it. The sampled text
        may differ from what the template would write (thoughts that it removes, JSON with other blanks), and stays as
        it is. None if the template would change what comes before the text.
        """
        *before, response = known
        # 1. End of a message of plain text, as the response was sampled.
        plain = {"role": "assistant", "content": self._marker}
        end = self._text_after_marker(self._render([*before, plain], tools, add_generation_prompt=False))
        # 2. End of the response as the template writes it, with its tool calls.
        # Without its thoughts, which would stand before the marker.
        marked = {name: value for name, value in response.items() if name != "reasoning_content"}
        marked["content"] = self._marker
        closed = end
        if response.get("tool_calls"):
            closed = self._text_after_marker(self._render([*before, marked], tools, add_generation_prompt=False))
        # 3. The same with the new messages: what follows the end of the response is the continuation.
        extended = self._text_after_marker(self._render([*before, marked, *new], tools, add_generation_prompt=True))
        if end is None or closed is None or extended is None or not extended.startswith(closed):
            return None
        return end + extended[len(closed) :]

    def call_opening(self, name: str, tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens behind a generation prompt with which a response begins that calls a tool.

        They are those that the template writes before the name of a call, and the name. After an empty name the policy
        goes on with one. A policy that thinks first gets an empty thought, where the template writes one.
        """
        messages: list[Message] = [{"role": "user", "content": "x"}]
        prompt = self._render(messages, tools, add_generation_prompt=True)
        call = {"id": "call00000", "type": "function", "function": {"name": self._marker, "arguments": {}}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._render([*messages, message], tools, add_generation_prompt=False)
        before, mark, after = text.removeprefix(prompt).partition(self._marker)
        if not text.startswith(prompt) or not mark:
            raise CallError(
                "'tool_choice': the model's chat template does not write a call directly behind its generation prompt, "
                "so that no call can be forced; use tool_choice 'auto'"
            )
        # The end of the name only where it is the beginning of another one, since it is often part of a longer token.
        names = [str(tool.get("function", {}).get("name")) for tool in tools]
        is_prefix = any(each != name and each.startswith(name) for each in names)
        return self.encode(before + name + (after[:1] if name and is_prefix else ""))

    def _text_after_marker(self, text: str) -> str | None:
        parts = text.split(self._marker)
        # A template that drops or repeats the content has no single end.
        return parts[1] if len(parts) == 2 else None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool
    ) -> str:
        if not self._tokenizer.chat_template:
            raise CallError("the model's tokenizer has no chat template; use /v1/completions, or another model folder")
        try:
            return apply_chat_template(
                self._tokenizer,
                with_text_arguments(messages) if self._has_text_arguments else messages,
                self._now,
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                variables=self._variables,
            )
        except Exception as error:  # a template is a program of the model's authors and may raise any exception
            raise CallError(template_problem(error)) from error
