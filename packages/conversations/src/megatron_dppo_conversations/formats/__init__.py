"""Response formats of model families: how thoughts and tool calls are written in a response.

Each format reads the text of a response (``parse``), knows the special tokens that are a part of that text, the tokens
that end a turn, and what its chat template expects of tool calls. ``choose_format`` picks one by the chat template.
"""

from megatron_dppo_conversations.formats.base import ParsedResponse, ResponseFormat
from megatron_dppo_conversations.formats.selection import FORMATS, choose_format, format_note

__all__ = ["FORMATS", "ParsedResponse", "ResponseFormat", "choose_format", "format_note"]
