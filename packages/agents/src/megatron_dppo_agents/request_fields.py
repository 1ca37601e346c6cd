"""Fields that the bodies of several APIs have, checked and normalized. A wrong one raises ``CallError``."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from megatron_dppo_agents.agent_request import CallError

_MAX_MODEL_NAME = 256
"""Maximum length of the model's name, which each chunk of a stream repeats."""
BEGUN_ANSWER = "the beginning of a response cannot be given"
"""Rule of all APIs: tokens of a response are sampled, from the first one on."""
_MAX_STOPS = 16
_MAX_STOP_LENGTH = 256
_IGNORED_SETTINGS: Mapping[str, Any] = {
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": None,
    "seed": None,
    "repetition_penalty": 1,
    "reasoning_effort": None,
    "reasoning": None,
    "thinking": {"type": "disabled"},
    "verbosity": None,
    "chat_template_kwargs": None,
    "suffix": None,
    "prediction": None,
    "web_search_options": None,
    "audio": None,
    "modalities": ["text"],
    "truncation": "disabled",
    "max_tool_calls": None,
    "context_management": None,
    "output_config": None,
}
"""Settings that would change the response, with the value besides None that has no effect.

They are ignored: training computes each token's log-probability under the settings of the run.
"""


_INPUT_FIELDS: Mapping[str, Any] = {
    "prompt": None,
    "conversation": None,
    "mcp_servers": None,
    "container": None,
    "documents": None,
    "chat_template": None,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "functions": None,
    "function_call": None,
    "top_logprobs": 0,
    "background": False,
}
"""Fields that are input, bring tools or promise another answer, with the value besides None that does not.

An API that has one reads it itself. Elsewhere the policy would answer something else than was asked.
"""
_GRAMMAR_FIELDS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
    *("regex", "ebnf", "json_schema"),
)
"""Forms of a response, as vLLM and SGLang take them."""


class ToolChoice(NamedTuple):
    """Rules of a request for the tool calls in its response; see ``AgentRequest``."""

    reads_tool_calls: bool
    forced_tool: str | None


def require_object(data: object) -> dict[str, Any]:
    """Return a body."""
    if not isinstance(data, dict):
        raise CallError("the body is no JSON object")
    return data


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the stop strings of a body; empty if there are none."""
    value = body.get(name)
    strings = [value] if isinstance(value, str) else value or []
    is_list = isinstance(strings, list) and all(isinstance(each, str) and each for each in strings)
    if not is_list or len(strings) > _MAX_STOPS or any(len(each) > _MAX_STOP_LENGTH for each in strings):
        raise CallError(
            f"{name!r} = {value!r:.200}, expected a string or a list of at most {_MAX_STOPS} strings, each of 1 to "
            f"{_MAX_STOP_LENGTH} characters"
        )
    return tuple(strings)


def unfollowed_fields(
    body: Mapping[str, Any], served: frozenset[str], without_effect: frozenset[str]
) -> tuple[str, ...]:
    """Return the names of a body's fields that are accepted and not followed; refuse forms and parts of the input.

    ``unknown_field`` stands for each field that no API has, because clients choose those names. Fields in ``served``
    are followed, or refused elsewhere.
    """
    for name, neutral in _INPUT_FIELDS.items():
        if name not in served and body.get(name) not in (None, neutral, [], {}, ""):
            raise CallError(f"{name!r} is not supported, and leaving it out changes what is asked. {_fix(name)}")
    for name in _GRAMMAR_FIELDS:
        if name not in served and body.get(name):
            require_text_format(name, name)
    fields = [name for name, value in body.items() if value not in (None, [], {})]
    remaining = [name for name in fields if name not in served and name not in without_effect]
    return tuple(
        name if name in _IGNORED_SETTINGS else "unknown_field"
        for name in remaining
        if name not in _IGNORED_SETTINGS or body[name] != _IGNORED_SETTINGS[name]
    )


def _fix(name: str) -> str:
    if name in ("continue_final_message", "add_generation_prompt"):
        return f"Leave it out: {BEGUN_ANSWER}"
    if name == "top_logprobs":
        return "Leave it out; the log-probabilities of the sampled tokens can be asked for"
    return "Send the messages and tools themselves"


def require_text_format(output_format: Any, name: str) -> None:
    """Refuse any form of a response but text."""
    kind = output_format.get("type") if isinstance(output_format, dict) else output_format
    if kind not in (None, "text"):
        raise CallError(
            f"{name!r} = {kind!r:.80} is not supported, since a grammar would change the probabilities of the tokens; "
            "describe the form in a message, or give a tool for it"
        )


def is_token_list(value: object) -> TypeGuard[list[int]]:
    """Return True for a list of token ids that is not empty."""
    return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)


def read_tool_choice(
    choice: Any, tools: Sequence[Mapping[str, Any]], *, kind: str = "function", path: Sequence[str] = ("name",)
) -> ToolChoice:
    """Return the rules of a request for the tool calls in its response.

    A choice is None, ``auto``, ``none``, ``required``, or an object of type ``kind`` with the tool's name at ``path``.
    """
    name: Any = choice
    if choice in (None, "auto", "none"):
        name = None
    elif choice == "required":
        name = ""
    elif isinstance(choice, dict) and choice.get("type") == kind:
        for field in path:
            name = name.get(field) if isinstance(name, dict) else None
        name = name or choice
    functions = [tool.get("function") for tool in tools]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    if name is not None and (not isinstance(name, str) or (name and name not in names) or not names):
        known = ", ".join(map(repr, names)) or "the request has none"
        raise CallError(
            f"'tool_choice' = {name!r:.200}, expected auto, none, any tool, or the name of one of the 'tools' "
            f"({known:.200})"
        )
    # Of one tool the name is known.
    forced = names[0] if name is not None and len(names) == 1 else name
    return ToolChoice(reads_tool_calls=bool(tools) and choice != "none", forced_tool=forced)


def read_model(body: Mapping[str, Any]) -> str:
    """Return the name of the model; empty if there is none."""
    model = body.get("model") or ""
    if not isinstance(model, str) or len(model) > _MAX_MODEL_NAME:
        raise CallError(f"'model' = {model!r:.80}, expected a string of at most {_MAX_MODEL_NAME} characters")
    return model


def read_bool(body: Mapping[str, Any], name: str) -> bool:
    """Return a flag; False if it is missing."""
    value = body.get(name) or False
    if not isinstance(value, bool):
        raise CallError(f"{name!r} = {value!r:.80}, expected true or false")
    return value


def read_limit(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the lowest of some limits; None if there is none."""
    limits = [(name, body[name]) for name in names if body.get(name) is not None]
    for name, value in limits:
        if type(value) is not int or value < 1:
            raise CallError(f"{name!r} = {value!r:.80}, expected a whole number above 0")
    return min((value for _, value in limits), default=None)
