"""Response formats of the endpoint. They live in ``data.formats``, which rewards and rows read, too."""

from megatron_dppo.data.formats import FORMATS, ParsedResponse, ResponseFormat, choose_format, format_note

__all__ = ["FORMATS", "ParsedResponse", "ResponseFormat", "choose_format", "format_note"]
