"""Reading of responses by the package ``renderers`` (``agent.renderer``), for models whose form is not among ours."""

import importlib
from collections.abc import Sequence
from typing import Any

from megatron_dppo.errors import GenerateError
from megatron_dppo.rollout.response_text import decode_response
from megatron_dppo.rollout.stop_strings import StopMatch
from megatron_dppo_agents.agent_request import AgentRequest, CallError
from megatron_dppo_agents.response_reader import ResponseReader
from megatron_dppo_conversations.formats import FORMATS, ParsedResponse
from megatron_dppo_conversations.formats.base import make_tool_call


def load_renderer(name: str, tokenizer: Any) -> Any:
    """Return the renderer with a name such as ``qwen3.5``; ``GenerateError`` if it does not fit the tokenizer."""
    package = import_renderers(name)
    try:
        return package.create_renderer(tokenizer, package.config_from_name(name))
    except Exception as error:  # the package raises what it likes, such as AssertionError for a missing token
        raise GenerateError(
            f"agent.renderer = {name!r}: the package renderers cannot use it with the model's tokenizer: "
            f"{type(error).__name__}: {error}"
        ) from error


def import_renderers(name: str) -> Any:
    """Return the package, whose parts are not typed."""
    try:
        return importlib.import_module("renderers")
    except ImportError as error:
        raise GenerateError(
            f"agent.renderer = {name!r} needs the package renderers: {error}. Install it with "
            "pip install 'megatron-dppo[agents]', or use agent.format"
        ) from error


class RendererReader(ResponseReader):
    """Reader by a renderer. Prompts stay those of the model's chat template."""

    def __init__(self, tokenizer: Any, renderer: Any, *, separates_reasoning: bool) -> None:
        super().__init__(tokenizer, FORMATS["none"], separates_reasoning=separates_reasoning)
        self._renderer = renderer

    def check(self, call: AgentRequest) -> None:
        """See ``ResponseReader``. Renderers have tool calls. They read tokens, which a stop string may cut."""
        self.check_stop_tokens(call)
        if call.stop:
            raise CallError(
                f"'stop' = {call.stop[0]!r:.80} is not supported with agent.renderer; leave it out, or set agent.format"
            )

    def stop_token_ids(self, call: AgentRequest) -> tuple[int, ...]:
        """See ``ResponseReader``."""
        return (*self._renderer.get_stop_token_ids(), *call.stop_token_ids)

    def answer_text(self, tokens: Sequence[int]) -> str:
        """See ``ResponseReader``. Renderers have no such text, but the chat template has a form."""
        return decode_response(self._tokenizer, tokens)

    def parse(
        self,
        call: AgentRequest,
        prompt: Sequence[int],
        tokens: Sequence[int],
        num_given: int = 0,
        stop_match: StopMatch | None = None,
    ) -> ParsedResponse:
        """See ``ResponseReader``. ``check`` refuses stop strings."""
        assert stop_match is None
        start = len(prompt) - num_given
        tokens = (*prompt[start:], *tokens)
        prompt = prompt[:start]
        tools = list(call.tools) if call.reads_tool_calls else None
        parsed = self._renderer.parse_response(list(tokens), tools=tools, prompt_ids=list(prompt))
        # The text as it was sampled, thoughts included.
        sampled = super().parse(call, prompt, tokens)
        attempts = parsed.tool_calls if tools else []
        malformed = [each for each in attempts if getattr(each.status, "value", each.status) != "ok"]
        if malformed or not attempts:
            return ParsedResponse(
                text=sampled.text,
                content=sampled.content,
                reasoning=sampled.reasoning,
                num_malformed=len(malformed),
            )
        start = min(each.token_span[0] for each in attempts)
        calls = tuple(make_tool_call(each.id or "", each.name, each.arguments) for each in attempts)
        return ParsedResponse(
            text=super().parse(call, prompt, tokens[:start]).text.strip(),
            content=parsed.content,
            reasoning=parsed.reasoning_content or "",
            tool_calls=calls,
        )
