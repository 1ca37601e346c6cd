"""Commands, settings and code of the pages."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig
from pydantic import ValidationError

import source_folders
from megatron_dppo.commands.main import main
from megatron_dppo.commands.registry import installed_commands, load_command
from megatron_dppo.config.describe import keys, sections
from megatron_dppo.config.io import locate_flag
from megatron_dppo.config.schema import Config
from megatron_dppo_lab.grid import merged
from tests.unit.recorded_run import write_run
from tests.unit.test_advice import OF_OTHERS, command_options, known_key

ROOT = Path(__file__).parents[2]
COMMANDS = installed_commands()
PAGES = [*source_folders.PAGES, *sorted(ROOT.glob("examples/**/*.md"))]
RUN = "<!-- run -->"
"""Stands above a block of commands that the test runs. Each line of a ``text`` block below it is in the output; ``...``
stands for any text."""
NOT_RUN = "<!-- not run:"
"""Stands, with the reason, above a block of Python that needs what a test has not. Other Python is run, and a ``text``
block directly below it is what it prints, in the same form as below ``RUN``."""


def blocks(language: str) -> Iterator[tuple[Path, str, str]]:
    """Page, text of the block, the line above it."""
    for page in PAGES:
        for above, result, body in fenced(page.read_text("utf-8")):
            if result == language:
                yield page, body, above


def fenced(text: str) -> Iterator[tuple[str, str, str]]:
    """The last line above a block, its language and its text without the indentation of the fence."""
    above, opening = "", None
    body: list[str] = []
    for line in text.splitlines():
        fence = re.match(r"( *)```(\w*)$", line)
        if opening is None and fence is not None:
            opening, body = fence, []
        elif opening is not None and fence is not None and not fence[2]:
            yield above, opening[2], "".join(f"{each.removeprefix(opening[1])}\n" for each in body)
            above, opening = "", None
        elif opening is not None:
            body.append(line)
        elif line.strip():
            above = line
    assert opening is None, f"a block is not closed: {body}"


def python_blocks() -> Iterator[Any]:
    """Page, text of the block, the line above it, what it prints."""
    for page in PAGES:
        fences = [*fenced(page.read_text("utf-8")), ("", "", "")]
        for n, ((above, language, body), (between, following, output)) in enumerate(pairwise(fences)):
            if language == "python":
                is_output = following == "text" and not between
                yield pytest.param(page, body, above, output if is_output else "", id=f"{page.stem}-{n}")


@pytest.mark.parametrize(("page", "text", "above", "expected"), python_blocks())
def test_python_runs_or_says_why_not(
    page: Path, text: str, above: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = compile(text, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if not above.startswith(NOT_RUN):
        exec(code, {"__name__": "page"})
        printed = capsys.readouterr().out
        assert not missing_lines(expected, printed), printed


def missing_lines(expected: str, printed: str) -> list[str]:
    """The expected lines that were not printed; ``...`` stands for any text, and widths of spaces do not matter."""
    output = "\n".join(" ".join(line.split()) for line in printed.splitlines())
    patterns = {
        line: ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        for line in expected.splitlines()
    }
    return [line for line, pattern in patterns.items() if not re.search(pattern, output)]


@pytest.mark.parametrize(
    ("page", "text", "above"), [pytest.param(*b, id=f"{b[0].stem}-{n}") for n, b in enumerate(blocks("toml"))]
)
def test_settings_are_known_and_have_their_types(page: Path, text: str, above: str) -> None:
    base = tomllib.loads((ROOT / "examples/chain_sum/dppo.toml").read_text())
    settings = tomllib.loads(text)
    settings.pop("extends", None)  # names another file
    try:
        Config.model_validate(merged(base, settings))
    except ValidationError as error:
        # What goes together is told by validators of whole sections: a fragment need not be a whole run.
        wrong = [f"{d['loc']}: {d['msg']}" for d in error.errors() if d["type"] not in ("missing", "value_error")]
        assert not wrong


def command_lines() -> Iterator[tuple[Path, str, str]]:
    """Page, line and program of each command. A block without a language whose first line has no program is output."""
    for page, text, _ in [*blocks("sh"), *blocks("")]:
        lines = re.split(r"\n| && ", text.replace("\\\n", " "))
        programs = [_program(line) for line in lines]
        if programs[0] in CHECKS or programs[0] in FOREIGN:
            yield from ((page, line, program) for line, program in zip(lines, programs, strict=True) if program)


def _program(line: str) -> str:
    words = (word for word in line.split() if not re.fullmatch(r"[A-Z_0-9]+=.*", word))
    return next((word for word in words if not word.startswith("#")), "") if not line.startswith("#") else ""


def commands() -> list[Any]:
    result = []
    for page, line, program in command_lines():
        if program in CHECKS:
            words = shlex.split(line, comments=True)
            result.append(pytest.param(words[words.index(program) :], id=f"{page.stem}: {line.strip()}"[:80]))
    return result


def test_no_command_is_left_out() -> None:
    unknown = {program for _, _, program in command_lines()} - CHECKS.keys() - FOREIGN
    assert not unknown
    assert len(commands()) > 100


def make_targets() -> set[str]:
    """The targets of the Makefile; one rule may have several."""
    rules = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    return {target for rule in rules for target in rule.split()}


def check_make(words: list[str]) -> None:
    assert {word for word in words[1:] if "=" not in word} <= make_targets()


def check_ours(words: list[str]) -> None:
    command = load_command(COMMANDS[words[1]])
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    command.add_arguments(parser)
    _, rest = parser.parse_known_args(words[2:])
    flags = [word for word in rest if word.startswith("--")]
    assert command.HAS_OVERRIDES or not flags
    check_flags([flag for flag in flags if "." in flag])
    check_files(words)


def check_flags(flags: list[str]) -> None:
    names = {flag.removeprefix("--") for flag in flags}
    # Servers have options of their own, which these tables pass on.
    assert {name for name in names if not name.startswith(("rollout.sglang.", "rollout.vllm."))} <= known_names()


def check_python(words: list[str]) -> None:
    if words[1] == "-m":
        of_engine = words[2].partition(".")[0] in ("sglang", "vllm")  # in an environment of its own
        assert of_engine or importlib.util.find_spec(words[2]) is not None
        check_files(words)
        return
    if words[1] == "hf_ptq.py":  # of the folder that the line above it clones
        return
    check_files(words)
    source = (ROOT / words[1]).read_text()
    assert all(word in source for word in words[2:] if word.startswith("--"))


def check_torchrun(words: list[str]) -> None:
    check_files(words)
    check_flags([word for word in words if word.startswith("--") and "." in word])


def check_pip(words: list[str]) -> None:
    """The extras of this package exist."""
    setup = (ROOT / "setup.py").read_text()
    for named in re.findall(r"(?:^| )\.\[([\w,-]+)\]", " ".join(words)):
        assert all(f'        "{extra}": ' in setup for extra in named.split(",")), named
    check_files(words)


def check_uv(words: list[str]) -> None:
    words = words[2:] if words[1] in ("run", "pip") else words[1:]
    CHECKS.get(words[0], check_files)(words)


def check_script(words: list[str]) -> None:
    assert os.access(ROOT / words[0], os.X_OK)
    check_torchrun(words)


def check_files(words: list[str]) -> None:
    """Those of the repository; a page may name a folder of a run or of a model, which is not there yet."""
    named = [w for w in words if re.match(r"(tools|benchmarks|launch|tests|requirements)/|examples/.*\.(toml|py)$", w)]
    assert all((ROOT / word).exists() for word in named), named


CHECKS = {
    "make": check_make,
    "megatron-dppo": check_ours,
    "python": check_python,
    "torchrun": check_torchrun,
    "sbatch": check_files,
    "pip": check_pip,
    "uv": check_uv,
    "tools/engines/sglang.sh": check_script,
    "tools/engines/vllm.sh": check_script,
    "launch/torchrun.sh": check_script,
    "tests/gpu/run_all.sh": check_script,
}
FOREIGN = {"srun", "cd", "export", "git", "hf", "python3", "source", ".", "vllm", "/shared/sglang/bin/pip"}
"""Programs whose arguments are not looked at."""


@pytest.mark.parametrize("words", commands())
def test_commands_are_there_with_their_flags(words: list[str]) -> None:
    CHECKS[words[0]](words)


def runnable() -> list[Any]:
    """The blocks that are run: page, commands, expected lines."""
    pattern = rf"{re.escape(RUN)}\n```sh\n(.*?)^```\n(?:\n```text\n(.*?)^```)?"
    return [
        pytest.param(commands, expected, id=f"{page.stem}-{n}")
        for page in PAGES
        for n, (commands, expected) in enumerate(re.findall(pattern, page.read_text("utf-8"), re.S | re.M))
    ]


@pytest.mark.parametrize(("commands", "expected"), runnable())
def test_marked_commands_run_and_print_what_the_page_shows(
    commands: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    write_run(tmp_path / "runs/mine", 12, every=4)
    monkeypatch.chdir(tmp_path)
    for line in commands.replace("\\\n", " ").splitlines():
        program, *words = shlex.split(line, comments=True)
        assert program == "megatron-dppo" and main(words) == 0, line
    printed = capsys.readouterr().out
    assert not missing_lines(expected, printed), printed


def test_every_page_has_an_example_that_is_checked() -> None:
    checked = {page for language in ("python", "toml") for page, _, _ in blocks(language)}
    checked |= {page for page in PAGES if RUN in page.read_text("utf-8")}
    checked |= {page for page, text, _ in [*blocks("sh"), *blocks("")] if any(name in text for name in CHECKS)}
    without = {page.relative_to(ROOT).as_posix() for page in set(PAGES) - checked}
    assert without == WITHOUT_EXAMPLE.keys()
    assert "One page of figures has none" in (ROOT / "docs/testing.md").read_text() and len(without) == 1


WITHOUT_EXAMPLE = {
    "docs/results/parity.md": "figures that tools/run_matrix.sh writes; docs/testing.md has the command",
}
"""Pages without an example, and why."""


def known_names() -> set[str]:
    """Dotted names of all keys and sections."""
    return {*keys(), *(name for name, _ in sections())}


def test_keys_that_pages_name_are_there() -> None:
    known, wrong = known_names(), []
    sections = "|".join(Config.model_fields)
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.S | re.M)
        for name in re.findall(rf"`((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)(?: = [^`]*)?`", text):
            module = ROOT / "megatron_dppo" / Path(*name.split(".")[:2])
            other = name.startswith("model.transformer.") or name.endswith((".jsonl", ".toml"))
            if name not in known and not other and not module.with_suffix(".py").exists():
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert len(known) > 150 and not wrong


def test_every_page_is_on_the_site() -> None:
    site = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.M))
    docs = {os.path.relpath(page, ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    # tools/docs_site.py puts them there.
    readmes = {f"packages/{page.parent.name}.md" for page in ROOT.glob("packages/*/README.md")}
    assert site == docs | readmes


FOREIGN_FLAGS = {
    "SGLang": (
        "--admin-api-key --api-key --context-length --enable-deterministic-inference --enable-fp32-lm-head "
        "--enable-lora --enable-memory-saver --enable-return-routed-experts --enable-scale-out --is-embedding "
        "--load-format --lora-backend --mamba-ssm-dtype --preferred-sampling-params --sampling-mask-max-tokens "
        "--tp-size"
    ),
    "vLLM": (
        "--api-key --enable-lora --enable-sleep-mode --headless --hf-overrides --load-format "
        "--mamba-ssm-cache-dtype --max-logprobs --return-sampling-mask --runner"
    ),
    "Slurm": (
        "--batch --container-image --container-mounts --cpus-per-task --exclusive --gpus --gpus-per-node "
        "--gpus-per-socket --gpus-per-task --gres --mail-type --mail-user --mem --nodes "
        "--ntasks-per-node --open-mode --requeue --signal"
    ),
    "podman, docker, apptainer": (
        "--all --bind --cap-add --cpus --filter --internal --memory --network --nv --pids-limit --rm --volume"
    ),
    "torchrun": "--shutdown-timeout",
    "verl, slime, TRL, Megatron-LM": (
        "--apply-chat-template --colocate --config-name --custom-loss-function-path --custom-rm-path "
        "--dist-ckpt-strictness --fake-process-group --finetune --load --loss-type --no-load-optim --no-load-rng "
        "--use-checkpoint-args --use-tis"
    ),
}
"""Flags of other programs that pages name, beside those that errors name, too."""
_FLAG = re.compile(r"(?<![\w-])--[a-zA-Z][\w-]*(?:\.[\w-]+)*")
_SCRIPT = re.compile(r"(?:benchmarks|launch|tests/gpu|tools)/[\w/]+\.(?:py|sh)|(?<=-m )(?:benchmarks|tools)\.\w+")


def inline_code() -> Iterator[tuple[str, str, frozenset[str]]]:
    """Place, code within a line of a page, and the scripts that the code names, or else its page."""
    for page in PAGES:
        text = page.read_text("utf-8")
        scripts = scripts_of(text)
        prose = re.sub(r"^ *```.*?^ *```", lambda block: re.sub(r"[^\n]", "", block[0]), text, flags=re.S | re.M)
        for number, line in enumerate(prose.splitlines(), start=1):
            for code in re.findall(r"`([^`]+)`", line):
                yield f"{page.relative_to(ROOT)}:{number}", code, scripts_of(code) or scripts


def scripts_of(text: str) -> frozenset[str]:
    names = {name if "/" in name else name.replace(".", "/") + ".py" for name in _SCRIPT.findall(text)}
    return frozenset(name for name in names if (ROOT / name).is_file())


def is_flag(flag: str, code: str, scripts: frozenset[str]) -> bool:
    """Return True if a command that the code names has the flag, or, without one, any command, key or script."""
    commands = [name for name in re.findall(r"\bmegatron-dppo ([a-z]+)", code) if name in COMMANDS]
    commands = commands or [*COMMANDS]
    if any(flag in command_options(name) for name in commands):
        return True
    if any(load_command(COMMANDS[name]).HAS_OVERRIDES for name in commands) and is_override(flag):
        return True
    if code.startswith("megatron-dppo "):
        return False
    foreign = {*OF_OTHERS, *" ".join(FOREIGN_FLAGS.values()).split()}
    in_script = any(re.search(rf"{flag}(?![\w-])", (ROOT / script).read_text("utf-8")) for script in scripts)
    return in_script or flag in foreign or flag == "--section.key"


def is_override(flag: str) -> bool:
    section, key, _ = locate_flag(flag.removeprefix("--"))
    if section == "model.transformer":
        return key in TransformerConfig.__dataclass_fields__
    return known_key(f"{section}.{key}") or section in ("rollout.sglang", "rollout.vllm")


def test_flags_in_the_text_of_pages_are_there() -> None:
    named = [(where, code, scripts, flag) for where, code, scripts in inline_code() for flag in _FLAG.findall(code)]
    wrong = [f"{where}: {flag} ({code})" for where, code, scripts, flag in named if not is_flag(flag, code, scripts)]
    assert len(named) > 250 and not wrong
    unused = {*" ".join(FOREIGN_FLAGS.values()).split()} - {flag for *_, flag in named}
    assert not unused, "the list of other programs' flags has some that no page names"
