"""Child process that reads a tokenizer and renders its chat templates, under limits of time and memory.

It runs as a script, and imports only what it needs: it starts in a fraction of a second. Each line of its output names
the step that begins. What a step raises does not matter here: only that it ends.
"""

import json
import resource
import string
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_TEXT = f"The quick brown fox: 12 + 34 = 46 jumps over the lazy dog. {string.printable} \u00e9\u4f60\U0001f600"
_MESSAGES = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": _TEXT},
    {"role": "assistant", "content": "Yes.", "reasoning_content": "A thought."},
    {"role": "user", "content": "And then?"},
)
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"key": "a"}}}
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
_TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Look it up.", "parameters": _PARAMETERS}},
]
_CASES: tuple[tuple[list[dict[str, Any]], list[Any] | None], ...] = (
    ([_MESSAGES[1]], None),
    (list(_MESSAGES), None),
    (list(_MESSAGES[1:]), None),
    ([_MESSAGES[1]], _TOOLS),
    (
        [
            *_MESSAGES[:2],
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "b", "tool_call_id": "call00000", "name": "look"},
        ],
        _TOOLS,
    ),
)


def main(folder: Path, max_characters: int, cpu_seconds: int, memory: int) -> None:
    """Read the tokenizer of a folder, encode and decode a line, and render each template with messages and tools."""
    for kind, value in ((resource.RLIMIT_CPU, cpu_seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        _, hard = resource.getrlimit(kind)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    _begin("tokenizer.json")
    file = folder / "tokenizer.json"
    # Any error, also a panic of Rust, is reported where the run itself reads the file.
    with suppress(ImportError):
        from tokenizers import Tokenizer

        if file.is_file():
            with _ignored_errors():
                tokenizer = Tokenizer.from_file(str(file))
                tokenizer.decode(tokenizer.encode(_TEXT).ids)
    for name, template in _templates(folder):
        _begin(name)
        _render(template, max_characters)
    _begin("end")


@contextmanager
def _ignored_errors() -> Iterator[None]:
    """Ignore errors in a ``with`` block, except for missing memory."""
    try:
        yield
    except MemoryError:
        sys.exit(1)
    except Exception:
        pass


def _begin(step: str) -> None:
    print(step, flush=True)


def _templates(folder: Path) -> Iterator[tuple[str, str]]:
    for file in (folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))):
        if file.is_file():
            yield f"the chat template in {file.name}", file.read_text(encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):
        values: Any = {}
        with suppress(OSError, ValueError, RecursionError):
            values = json.loads((folder / name).read_text(encoding="utf-8"))
        template = values.get("chat_template") if isinstance(values, dict) else None
        for each in template if isinstance(template, list) else [template]:
            text = each.get("template") if isinstance(each, dict) else each
            if isinstance(text, str):
                yield f"the chat template in {name}", text


def _render(text: str, max_characters: int) -> None:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block that transformers has for masks of answers."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False, default=str)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda _: "01 Jan 2026"
    variables = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    template = None
    with _ignored_errors():
        template = environment.from_string(text)
    if template is None:
        return
    for messages, tools in _CASES:
        for add_generation_prompt in (True, False):
            with _ignored_errors():
                size = 0
                for part in template.generate(
                    messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
                ):
                    size += len(part)
                    if size > max_characters:
                        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
