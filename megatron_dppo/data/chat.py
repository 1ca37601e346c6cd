"""Tokenizers and chat templates: the text that a model reads."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_dppo.data.data_rows import DataRow
from megatron_dppo.data.tokenizer_trial import try_tokenizer
from megatron_dppo.errors import CheckpointError, DataError
from megatron_dppo.files import require_regular_files
from megatron_dppo.types.model_folder import Tokenizer
from megatron_dppo_conversations.chat_template import apply_chat_template, prints_tools, template_problem
from megatron_dppo_conversations.messages import TOOL_COLUMNS, Messages

_OURS = (
    "messages",
    "add_generation_prompt",
    "continue_final_message",
    "strftime_now",
    "strftime_values",
    "chat_template",
    "tools",
    "tokenize",
    "return_dict",
    "return_tensors",
)
_THOUGHT_TAGS = ("<think>", "[THINK]")
_RANDOM = re.compile(r"\|\s*random\b|\blipsum\s*\(")
"""Parts of Jinja that give another text on every call."""


@dataclass(frozen=True)
class ChatOptions:
    """Options that turn prompts into text."""

    apply: bool | None = None
    """Apply the chat template to every prompt (True; a string becomes one user message) or to none (False). None
    applies it to messages, and to bare problems if the tokenizer has a template; other strings stay as they are."""
    system_prompt: str | None = None
    """Added in front of messages that have none. None adds nothing."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    now: datetime = field(default_factory=datetime.now)
    """Date and time that the template sees (``strftime_now``). A run gives that of its first start."""

    def check(self, tokenizer: Tokenizer) -> None:
        """Check that the template has all variables of ``template_kwargs``, and no random part."""
        if draws := _RANDOM.search(str(tokenizer.chat_template or "")):
            raise DataError(
                f"the tokenizer's chat template draws at random ({draws[0]!r}), so no run could be resumed; remove "
                "that part of the template"
            )
        for name in self.template_kwargs:
            if name in _OURS:
                raise DataError(f"data.chat_template_kwargs: {name!r} is set by the trainer itself; remove it")
            if tokenizer.chat_template and not re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)):
                raise DataError(
                    f"data.chat_template_kwargs: the tokenizer's chat template has no variable {name!r}; check the "
                    "spelling, or remove it"
                )

    def render(self, row: DataRow, tokenizer: Tokenizer, *, writes_tools: bool = True) -> tuple[str, bool]:
        """Return the text of a row, and True if the template made it. It then includes the special tokens."""
        tools = row.tools() if writes_tools else []
        if self._needs_template(row, tokenizer):
            return self._apply_template(row, tokenizer, tools), True
        if not isinstance(row.prompt, str):
            raise DataError(
                f"{row.location}: the prompt is a list of messages, but data.apply_chat_template = false. Use a plain "
                "string, or leave the key out"
            )
        if self.system_prompt is not None or self.template_kwargs:
            name = "system_prompt" if self.system_prompt is not None else "chat_template_kwargs"
            raise DataError(
                f"{row.location}: data.{name} is set, but the prompt is a plain string, to which no chat template is "
                f"applied. Set data.apply_chat_template = true, or remove data.{name}"
            )
        if any(tool["function"]["name"] not in row.prompt for tool in tools):
            raise DataError(_unprinted(row, "the prompt is a plain string, to which no chat template is applied"))
        return row.prompt, False

    def _needs_template(self, row: DataRow, tokenizer: Tokenizer) -> bool:
        if self.apply is not None:
            return self.apply
        return isinstance(row.prompt, list) or (row.is_problem and bool(tokenizer.chat_template))

    def _apply_template(self, row: DataRow, tokenizer: Tokenizer, tools: list[dict[str, Any]]) -> str:
        if not tokenizer.chat_template:
            reason = "the prompt is a list of messages" if self.apply is None else "data.apply_chat_template = true"
            raise DataError(
                f"{row.location}: {reason}, but the tokenizer has no chat template. Use a plain string, or copy "
                "the model's chat_template.jinja (or its tokenizer_config.json with one) into its folder"
            )
        messages: Messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        begun = ""
        if messages[-1]["role"] == "assistant":
            *messages, last = messages
            begun = last["content"]
        try:
            text = apply_chat_template(
                tokenizer,
                messages,
                self.now,
                tools=tools or None,
                add_generation_prompt=True,
                variables=self.template_kwargs,
            )
        except Exception as error:  # a template is a program of the model's authors and may raise anything
            raise DataError(f"{row.location}: {template_problem(error)}") from error
        if tools and not prints_tools(tokenizer, self.now, self.template_kwargs):
            raise DataError(_unprinted(row, "the model's chat template writes no tools"))
        _check_complete(row.location, messages, text)
        return _continue_answer(text, begun)


def _unprinted(row: DataRow, reason: str) -> str:
    column = next(name for name in TOOL_COLUMNS if row.metadata.get(name))
    return (
        f"{row.location}: field {column!r} has tools that cannot reach the prompt: {reason}. Use messages and a model "
        "folder whose template writes tools, or rename the column"
    )


def _check_complete(location: str, messages: Messages, text: str) -> None:
    """Check that the template has written all messages; some leave out roles that they do not know."""
    for index, message in enumerate(messages):
        # A template may cut the thought out of an earlier answer, and write a tool's result in another form.
        if message["role"] not in ("assistant", "tool") and message["content"].strip() not in text:
            raise DataError(
                f"{location}: the chat template leaves out message {index} (role {message['role']!r}). Use another "
                "role or another template"
            )


def _continue_answer(text: str, begun: str) -> str:
    """Return a prompt that ends with the beginning of the answer.

    The answer is never closed: templates that render it as a message also put an empty thought in front of it.
    """
    opened = next((tag for tag in _THOUGHT_TAGS if text.rstrip().endswith(tag)), None)
    if opened is not None and begun.lstrip().startswith(opened):
        return text[: text.rindex(opened)] + begun.lstrip()
    return text + begun


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the transformers tokenizer of a folder, from local files and without remote code."""
    from transformers import AutoTokenizer

    folder = Path(path)
    require_regular_files(folder)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(
            f"model.path = {str(path)!r} has no tokenizer; expected tokenizer.json in the folder. Copy tokenizer.json, "
            "tokenizer_config.json and, if the model has it, chat_template.jinja there"
        )
    try_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # transformers, tokenizers and huggingface_hub raise many kinds of errors.
    except Exception as error:
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}. Copy its files again, or "
            "use the version of transformers that wrote them"
        ) from error
    if tokenizer.eos_token_id is None:
        raise CheckpointError(
            f"the tokenizer in {folder} has no eos_token; rollouts would never end. Set it in tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return the text of each token by itself. The first token of a word keeps its leading space."""
    if not ids:
        return []
    known = tokenizer.convert_ids_to_tokens(list(ids))
    # Decode each token once and twice: the second occurrence keeps what a tokenizer strips at the start of a text.
    once = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    twice = tokenizer.batch_decode([[i, i] for i in ids], clean_up_tokenization_spaces=False)
    texts = [two[len(one) :] if two.startswith(one) else one for one, two in zip(once, twice, strict=True)]
    return [text if text else str(name) for text, name in zip(texts, known, strict=True)]
