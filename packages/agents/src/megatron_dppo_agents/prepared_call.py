"""Preparation of a call in a thread: it is parsed, rendered and tokenized, and nothing of the episode changes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_agents.call_ids import CallIds
from megatron_dppo_agents.conversations import Continuation, Conversation, find_continuation
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_agents.template import ChatTemplate
from megatron_dppo_conversations.rules import ConversationError, order_tool_results


class PreparedCall(NamedTuple):
    """A call that is parsed, rendered and tokenized."""

    request: AgentRequest
    continuation: Continuation
    opening: list[int]
    """Tokens with which the response begins, and which are not sampled: those of a forced tool call."""


def prepare_call(
    read: Callable[[], AgentRequest],
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    reader: ResponseReader,
    call_ids: CallIds,
    *,
    max_tokens: int,
    is_trained: bool,
    session: str = "",
) -> PreparedCall:
    """Parse, render and tokenize a call, or raise ``CallError``. Busy conversations may change meanwhile."""
    with _rejected_if_it_fails():
        call = read()
        template.check_size(call, max_tokens)
        call = replace(call, messages=tuple(order_tool_results(call.messages)))
        reader.check(call)
        template.check_tools(call)
        continuation = find_continuation(
            call, conversations, template, reader, call_ids, is_trained=is_trained, session=session
        )
        opening = [] if call.forced_tool is None else template.call_opening(call.forced_tool, call.tools)
        return PreparedCall(call, continuation, opening)


def count_prompt_tokens(
    read: Callable[[], AgentRequest], template: ChatTemplate, call_ids: CallIds, max_tokens: int
) -> int:
    """Return the number of prompt tokens that a call would have as the first of its conversation."""
    with _rejected_if_it_fails():
        call = read()
        template.check_size(call, max_tokens)
        return len(template.opening(call_ids.as_written(call.messages), call.tools))


@contextmanager
def _rejected_if_it_fails() -> Iterator[None]:
    try:
        yield
    except CallError:
        raise
    except ConversationError as error:
        raise CallError(str(error)) from error
    except BaseException as error:
        # Everything here depends on the text of the call alone, which must not end the run. A panic of the
        # tokenizer is no ``Exception``.
        raise CallError(f"the call cannot be processed: {type(error).__name__}: {error!s:.200}") from error
