"""Tags around the thoughts of a response."""

THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<seed:think>", "</seed:think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Opening and closing tags: Qwen and DeepSeek, Mistral, Kimi, Seed, and the data of Open Thoughts."""


def unify_thinking_tags(text: str) -> str:
    """Return the text with all thinking tags written as ``<think>`` and ``</think>``."""
    opening, closing = THINKING_TAGS[0]
    for other_opening, other_closing in THINKING_TAGS[1:]:
        text = text.replace(other_opening, opening).replace(other_closing, closing)
    return text


def after_thinking(text: str) -> str:
    """Return the text after the last ``</think>`` or other closing tag, or all of it without one."""
    for _, closing in THINKING_TAGS:
        text = text.rsplit(closing, 1)[-1]
    return text
