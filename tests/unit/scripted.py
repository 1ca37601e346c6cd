"""An engine that says what a script has, behind the endpoint of agents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fake_servers import END, SHAPE, FakeServer
from megatron_dppo.config.rollout import AgentConfig
from megatron_dppo.engines import server_engine
from megatron_dppo.engines.server_engine import ServerEngine
from megatron_dppo.types import Completion, Prompt, SamplingParams
from megatron_dppo_agents.generate import AgentFunction
from megatron_dppo_agents.runner import AgentTask
from tests.engines.tiny import byte_tokenizer
from tests.unit.engines.test_server_engine import publish

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}<|im_start|>user
<tool_response>{{ m.content }}</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last and '</think>' in m.content -%}
{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{% if m.content or not loop.first %}
{% endif %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML; thoughts of all but the last message are left away, as Qwen3's does."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
SAMPLED = Prompt(prompt_id="row:0", text="", token_ids=(7,), label="3", messages=({"role": "user", "content": "1+2"},))
TASK = SAMPLED.__class__(**{**vars(SAMPLED), "is_task": True})


def chat_tokenizer() -> Any:
    """One token a byte, and ChatML."""
    made = byte_tokenizer(["<pad>", "<|im_start|>", "<|im_end|>"])
    made.chat_template = TEMPLATE
    return made


async def one(task: AgentTask) -> None:
    """Stands where a configuration names a function; the tests put theirs in its place."""


class World:
    """An engine of one fake server that says what a script has for the text before it."""

    def __init__(self, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(server_engine, "routing_shape", lambda config: SHAPE)
        self.tokenizer, self.script = tokenizer, dict[str, str]()
        self.server = FakeServer("http://s:0", sample=self._token)
        self.open: list[Any] = []

    def close(self) -> None:
        """Close all engines."""
        for part in self.open:
            part.close()

    def _token(self, request: Any, position: int) -> int:
        text, place, said = self.tokenizer.decode(request.token_ids), 0, "nothing"
        for end, answer in self.script.items():
            behind = text.rfind(end) + len(end)
            if end in text and answer.startswith(text[behind:]):  # a request may go on within an answer
                place, said = behind, answer
                break
        tokens = [*self.encode(said), END]
        return tokens[position - len(self.encode(text[:place]))] if place else 9

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def engine(self, agent: Any, **settings: Any) -> ServerEngine:
        key = "command" if isinstance(agent, list) else "environment" if isinstance(agent, str) else "function"
        name = "tests.unit.scripted:one" if key == "function" else agent
        weights = settings.pop("part_weights", None)
        function = AgentFunction(AgentConfig(**{key: name, **settings}), {}, part_weights=weights)
        if key == "function":
            function.agent._function = agent  # type: ignore[attr-defined]
        engine = ServerEngine(
            [self.server],  # type: ignore[list-item]
            self.tokenizer,
            SimpleNamespace(vocab_size=300, eos_token_id=END),
            max_in_flight=8,
            health_seconds=1,
            function=function,
        )
        self.open += [engine, function]
        publish(engine, [self.server], 4)
        return engine

    def play(self, agent: Any, tokens: int = 400, *, params: Any = None, **settings: Any) -> Completion:
        how = SamplingParams(max_new_tokens=tokens, seed=1, **(params or {}))
        result = self.engine(agent, **settings).generate([TASK], how)[0]
        assert not result.failure or isinstance(agent, list), result.failure
        return result

    def text(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.token_ids.tolist())

    def trained(self, completion: Completion) -> list[str]:
        """The stretches of tokens that were sampled."""
        result, mask = [""], completion.loss_mask
        assert mask is not None
        for token, sampled in zip(completion.token_ids.tolist(), mask.tolist(), strict=True):
            if sampled:
                result[-1] += self.tokenizer.decode([token])
            elif result[-1]:
                result.append("")
        return result if result[-1] else result[:-1]
