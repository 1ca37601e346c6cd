"""Choice of a response format by the chat template of the model's folder."""

from collections.abc import Mapping

from megatron_dppo_conversations.formats.base import ResponseFormat, TaggedFormat
from megatron_dppo_conversations.formats.harmony import HarmonyFormat
from megatron_dppo_conversations.formats.json_calls import (
    DeepSeekFormat,
    HermesFormat,
    KimiFormat,
    LlamaFormat,
    MistralFormat,
)
from megatron_dppo_conversations.formats.parameter_calls import (
    DeepSeekXmlFormat,
    GlmFormat,
    MiniMaxFormat,
    QwenXmlFormat,
)

_ALL: tuple[ResponseFormat, ...] = (
    HermesFormat(),
    QwenXmlFormat(),
    GlmFormat(),
    DeepSeekFormat(),
    DeepSeekXmlFormat(),
    KimiFormat(),
    MiniMaxFormat(),
    LlamaFormat(),
    MistralFormat(),
    HarmonyFormat(),
    # Thoughts alone, no tool calls.
    TaggedFormat(),
)
FORMATS: Mapping[str, ResponseFormat] = {each.name: each for each in _ALL}
"""All formats by name. ``none`` reads no tool calls."""
_TEMPLATE_MARKS = (
    ("gpt_oss", "<|channel|>"),
    ("kimi", "<|tool_calls_section_begin|>"),
    ("minimax", "minimax:tool_call"),
    ("deepseek_xml", "DSML"),
    ("deepseek", "<｜tool▁calls▁begin｜>"),
    ("mistral", "[TOOL_CALLS]"),
    ("glm", "<arg_key>"),
    ("qwen3_xml", "<function="),
    ("hermes", "<tool_call>"),
    ("llama", "<|python_tag|>"),
    ("llama", '"parameters": dictionary of argument name'),
)
"""Format by a part of the chat template. The first match decides, since later ones are parts of earlier templates."""


def choose_format(chat_template: object, name: str = "auto") -> ResponseFormat:
    """Return the format of a model's responses.

    Args:
        chat_template: Chat template of the tokenizer: a string, several by name, or None.
        name: ``agent.format``: name of the format, or ``auto`` to choose it by the template.
    """
    if name == "auto":
        template = chat_template if isinstance(chat_template, str) else str(chat_template or "")
        name = next((each for each, mark in _TEMPLATE_MARKS if mark in template), "none")
    return FORMATS[name]


def format_note(chat_template: object, name: str) -> str:
    """Return the line of the start of a run that names the chosen format; see ``choose_format``."""
    chosen = choose_format(chat_template, name).name
    source = "the model's chat template" if name == "auto" else "agent.format"
    if chosen == "none":
        return (
            f"agent    no form of tool calls is known ({source}): calls with 'tools' are refused. Set agent.format if "
            "the model has one of the known forms"
        )
    return f"agent    tool calls are read in the form '{chosen}' ({source})"
