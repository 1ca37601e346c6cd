"""Messages to text by the model's chat template, so that a conversation only ever grows at its end."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_dppo.engines.agents.requests import CallError, Message


class ChatTemplate:
    """The template of a tokenizer.

    Args:
        tokenizer: of the model.
        variables: of the template, ``data.chat_template_kwargs``.
    """

    def __init__(self, tokenizer: Any, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._variables = tokenizer, variables
        self._mark = f"mark{secrets.token_hex(12)}"

    def encode(self, text: str | Sequence[int], *, add_special_tokens: bool = False) -> list[int]:
        """Tokens of a text, which may hold its special tokens already; tokens are checked.

        Raises:
            CallError: what an agent sent is no text, or there are no such tokens.
        """
        if not isinstance(text, str):
            if text and max(text) >= len(self._tokenizer):
                raise CallError(f"there is no token {max(text)}; the tokenizer has {len(self._tokenizer)}")
            return list(text)
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, ValueError) as error:  # half of a surrogate pair, by an escape in JSON
            raise CallError(f"the text cannot be encoded: {error}") from error

    def opening(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Tokens that ask for an answer to the messages.

        Raises:
            CallError: there is no template, or it refuses the messages.
        """
        return self.encode(self._render(messages, tools, ask=True))

    def continuation(
        self, known: Sequence[Message], new: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        """What the template writes behind the last answer of ``known`` to ask for an answer to ``new``, from the end of
        that answer's own text on; None where it would write something else before.

        The answer itself is not rendered: a mark stands for it. What was sampled may read otherwise than the template
        would have it (thoughts that it leaves away, JSON with other blanks), and stays as it is.

        Raises:
            CallError: the template refuses the messages.
        """
        *before, answer = known
        plain = {"role": "assistant", "content": self._mark}
        end = self._behind_mark(self._render([*before, plain], tools, ask=False))
        calls, closed = {**answer, "content": self._mark}, end
        if answer.get("tool_calls"):
            closed = self._behind_mark(self._render([*before, calls], tools, ask=False))
        whole = self._behind_mark(self._render([*before, calls, *new], tools, ask=True))
        if end is None or closed is None or whole is None or not whole.startswith(closed):
            return None
        return end + whole[len(closed) :]

    def _behind_mark(self, text: str) -> str | None:
        parts = text.split(self._mark)
        return parts[1] if len(parts) == 2 else None

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, ask: bool) -> str:
        if not self._tokenizer.chat_template:
            raise CallError("the model's tokenizer has no chat template; use /v1/completions, or another model folder")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=ask,
                tokenize=False,
                **self._variables,
            )
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise CallError(f"the chat template refuses the messages: {error}") from error
