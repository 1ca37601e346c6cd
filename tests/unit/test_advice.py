"""Advice of errors and pages is accepted: each flag by its command, each key, its value, and its change at a resume.

The texts are those of ``tools/list_errors.py``, the other texts of modules that advise, and inline code of the pages.
States in which advice is printed are built in tests/unit/run/test_advice_states.py and in the tests of what prints it.
"""

from __future__ import annotations

import argparse
import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from megatron_dppo.commands.registry import installed_commands, load_command
from megatron_dppo.config.io import FLAG_ALIASES
from megatron_dppo.config.loss import LossConfig
from megatron_dppo.config.loss_registry import loss_names
from megatron_dppo.config.schema import Config
from megatron_dppo.setup.changes import change_kind
from source_folders import PACKAGES, PAGES, PYTHON_FILES, TRAINER
from tools.list_errors import error_texts, user_error_classes


class Text(NamedTuple):
    """A text with its place, and the class of the error (empty for other texts)."""

    where: str
    class_name: str
    text: str


COMMANDS = installed_commands()
ADVISING = ("run/guard.py", "run/guard_state.py", "run/sampling_test.py", "run/save_plan.py", "report/findings.py")
ADVISING += (
    "process/watchdog.py",
    "process/lock.py",
    "run/run_records.py",
    "report/records.py",
    "files.py",
    "weights/verdict.py",
    "report/metrics.py",
)
"""Modules whose strings advise without being the argument of an error."""


def short_path(file: Path) -> str:
    """``run/guard.py``, or ``megatron_dppo_plan/text.py``."""
    folder = next((folder.parent for folder in PACKAGES.values() if file.is_relative_to(folder)), TRAINER)
    return str(file.relative_to(folder))


@cache
def texts() -> list[Text]:
    classes = user_error_classes()
    result = [
        Text(f"{short_path(error.file)}:{error.line}", error.class_name, error.text)
        for file in PYTHON_FILES
        for error in error_texts(file, classes)
    ]
    for name in ADVISING:
        docstrings = set()
        tree = ast.parse((TRAINER / name).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                docstrings.add(id(node.value))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                result.append(Text(f"{name}:{node.lineno}", "", node.value))
    return result


@cache
def parser_options(parser: argparse.ArgumentParser) -> frozenset[str]:
    """Long options of a parser and of its subcommands."""
    options = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            options |= set().union(*(parser_options(each) for each in action.choices.values()))
    return frozenset(options)


@cache
def command_options(name: str) -> frozenset[str]:
    parser = argparse.ArgumentParser()
    load_command(COMMANDS[name]).add_arguments(parser)
    return parser_options(parser)


OF_OTHERS = {
    "--nproc-per-node": "torchrun",
    "--local-dir": "hf",
    "--no-deps": "pip",
    "--no-build-isolation": "pip",
    "--cpp_ext": "Apex",
    "--cuda_ext": "Apex",
    "--save-debug-rollout-data": "slime",
    "--config": "SGLang",
    "--worker-extension-cls": "vLLM",
    "--weight-transfer-config": "vLLM",
    "--tokenizer-path": "SGLang",
    "--tokenizer": "vLLM",
    "--generation-config": "vLLM",
    "--logprobs-mode": "vLLM",
    "--dtype": "vLLM",
    "--quantization": "vLLM",
    "--kv-cache-dtype": "vLLM",
}
"""Flags that texts give for other programs."""
FILES_OF_COMMANDS = {"commands/inference.py": ("eval", "generate"), "commands/dry_run.py": ("train",)}
FILES_OF_COMMANDS |= {"commands/train.py": ("train",), "run/offline.py": ("eval", "generate", "serve")}
FILES_OF_COMMANDS |= {"megatron_dppo_lab/demo.py": ("demo",), "megatron_dppo_lab/demo_command.py": ("demo",)}
FILES_OF_COMMANDS |= {"megatron_dppo_report/": ("report", "diagnose"), "report/findings.py": ("generate",)}
FILES_OF_COMMANDS |= {"megatron_dppo_lab/example": ("examples",)}
FILES_OF_COMMANDS |= {"megatron_dppo_lab/base": ("base",)}
FILES_OF_COMMANDS |= {"megatron_dppo_lab/": ("experiment", "demo"), "engines/serving/": ("serve",)}
FILES_OF_COMMANDS |= {"megatron_dppo_engines/serving/": ("serve",)}


def commands_of(where: str) -> tuple[str, ...]:
    """Commands that print a text. The text of any other module may come from every command with a configuration."""
    for prefix, commands in FILES_OF_COMMANDS.items():
        if where.startswith(prefix):
            return commands
    name = re.match(r"(?:commands/|megatron_dppo_doctor/|megatron_dppo_)(\w+)", where)
    return (name[1],) if name and name[1] in COMMANDS else ("train",)


@cache
def fields() -> dict[str, FieldInfo]:
    """Fields by ``section.key``; a section has its own name."""
    result: dict[str, FieldInfo] = {}

    def collect(model: Any, prefix: str) -> None:
        for name, field in model.model_fields.items():
            result[f"{prefix}{name}"] = field
            for part in (field.annotation, *get_args(field.annotation)):
                if hasattr(part, "model_fields"):
                    collect(part, f"{prefix}{name}.")

    collect(Config, "")
    for name in loss_names():  # a loss has keys of its own
        result |= {f"loss.{key}": field for key, field in type(LossConfig(name=name)).model_fields.items()}
    return result


SECTIONS = tuple(Config.model_fields)
_KEY = re.compile(rf"(?<![\w./-])(?:{'|'.join(SECTIONS)})(?:\.[a-z][a-z_0-9]*)+(?![\w(/])")
NO_KEYS = {"run.key", "run.folder", "train.py", "data.md", "model.safetensors", "loss.py", "reward.py", "data.jsonl"}
"""Placeholders of code and names of files that look like keys."""
FREE_TABLES = ("model.transformer.", "reward.functions.", "reward.options.", "data.sources.", "rollout.servers.NAME")
"""Tables whose keys are Megatron's or the user's."""


def known_key(key: str) -> bool:
    is_file = key.endswith((".toml", ".py", ".md"))
    # The end of this one is a placeholder.
    return key in fields() or key in NO_KEYS or is_file or key.startswith((*FREE_TABLES, "loss.divergence_threshold_"))


def named_keys(text: str) -> set[str]:
    return {match[0] for match in _KEY.finditer(re.sub(r"\{[^{}]*\}", "{}", text))}


def inline_code() -> Iterator[tuple[str, str]]:
    """Code within lines of the pages, with its place. Blocks are tested by test_doc_blocks and test_page_commands."""
    for page in PAGES:
        in_block = False
        for number, line in enumerate(page.read_text().splitlines(), start=1):
            in_block ^= line.lstrip().startswith("```")
            if not in_block:
                yield from ((f"{page.name}:{number}", code) for code in re.findall(r"`([^`]+)`", line))


def test_there_are_as_many_texts_as_the_tool_lists() -> None:
    assert len(texts()) > 750 and sum(bool(named_keys(text.text)) for text in texts()) > 200


def test_every_advised_flag_is_one_of_the_command_that_prints_it() -> None:
    wrong = []
    for where, _, text in texts():
        for flag in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*(?:\.[a-zA-Z_]+)*", re.sub(r"\{[^{}]*\}", "{}", text)):
            options = frozenset().union(*map(command_options, commands_of(where)))
            is_override = flag[2:] in fields() or flag[2:].replace("-", "_") in FLAG_ALIASES
            if flag not in options and flag not in OF_OTHERS and not is_override:
                wrong.append(f"{where}: {flag}")
    assert wrong == []


def test_every_advised_command_exists() -> None:
    named = [(where, *match) for where, _, text in texts() for match in _commands(text)]
    named += [(where, *match) for where, code in inline_code() for match in _commands(code)]
    wrong = [f"{where}: {name} {sub}" for where, name, sub in named if not _is_command(name, sub)]
    assert len(named) > 40 and wrong == []


def _commands(text: str) -> list[tuple[str, str]]:
    return re.findall(r"\bmegatron-dppo ([a-z][a-z-]*)(?: ([a-z][a-z-]+))?", text)


def _is_command(name: str, sub: str) -> bool:
    if name not in COMMANDS:
        return False
    parser = argparse.ArgumentParser()
    load_command(COMMANDS[name]).add_arguments(parser)
    choices = [a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return not choices or not sub or sub in choices[0]


def test_every_named_key_exists() -> None:
    wrong = [f"{where}: {key}" for where, _, text in texts() for key in named_keys(text) if not known_key(key)]
    assert wrong == []


_ASSIGNED = re.compile(rf"({_KEY.pattern}) = ('[^'{{}}]*'|\"[^\"{{}}]*\"|true|false|-?\d[\d._e-]*\d|\d|\[[^\]{{}}]*\])")


def test_every_advised_value_is_one_of_its_key() -> None:
    assigned = [(where, *match) for where, _, text in texts() for match in _ASSIGNED.findall(text)]
    assigned += [(where, *match) for where, code in inline_code() for match in _ASSIGNED.findall(code)]
    wrong = []
    for where, key, value in assigned:
        field = fields().get(key)
        if field is None or key == "loss.name":  # a name decides the class of the section
            continue
        literal = tomllib.loads(f"value = {value}")["value"]
        try:
            TypeAdapter(Annotated[field.annotation, *field.metadata, "advice"]).validate_python(literal)
        except ValidationError:
            wrong.append(f"{where}: {key} = {value}")
    assert len(assigned) > 150 and wrong == []


LIMITS = (
    "max_failed_fraction",
    "max_skipped_updates",
    "max_nonfinite_fraction",
    "max_first_prob_diff",
    "sampling_test",
)
RESULTS_IN_STOPS = {
    "run/guard.py": ("rollout.dtype", "train.layer_noise.std", "optimizer.lr"),
    "run/save_plan.py": ("optimizer.lr",),
}
"""Keys that change the results and that a stop advises to change."""
STOPS = ("TrainingStopped", "FunctionsFailed", "NoUsableServer", "PublishError", "DiskError")
"""Errors of a run that can be resumed."""


def test_a_key_that_a_stopped_run_advises_is_free_or_the_flag_is_named() -> None:
    """The stops, and the modules of the guard: their texts are parts of stops."""
    stops = [
        text for text in texts() if text.class_name in STOPS or text.where.startswith(("run/guard", "run/sampling"))
    ]
    wrong = []
    for where, _, text in stops:
        for key in named_keys(text):
            is_allowed = change_kind(key) == "free" or f"--allow-changed {key}" in text
            # A setting that the text describes, and does not advise to change.
            if key in fields() and not is_allowed and f"{where.split(':')[0]} {key}" not in DESCRIBED:
                wrong.append(f"{where}: {key}")
    assert len(stops) > 20 and wrong == []


DESCRIBED = {"run/guard.py rollout.dtype", "run/guard.py train.layer_noise.std", "weights/publish.py rollout.servers"}
"""Files and keys of texts that describe a setting. A part of a text may stand before the flag that it needs."""


@pytest.mark.parametrize(("file", "keys"), RESULTS_IN_STOPS.items())
def test_the_flag_stands_with_a_key_that_changes_the_results(file: str, keys: tuple[str, ...]) -> None:
    of_file = " ".join(text for where, _, text in texts() if where.startswith(f"{file}:"))
    for key in keys:
        assert change_kind(key) == "results" and f"--allow-changed {key}" in of_file


@pytest.mark.parametrize("key", [key for key in fields() if key.endswith(LIMITS)])
def test_limits_that_stop_a_run_are_free(key: str) -> None:
    """They decide how safely a run works: what it computes until the stop does not depend on them."""
    assert change_kind(key) == "free"


def test_flags_that_pages_give_for_changes_name_keys_that_need_them() -> None:
    named = re.findall(r"--allow-changed ([a-z_.,]+)", "\n".join(page.read_text() for page in PAGES))
    keys = [key for each in named for key in each.rstrip(".").split(",")]
    assert len(keys) >= 3
    assert all(change_kind(key) == "results" or key.endswith("options.url") for key in keys), keys
