"""Reader of a shell script's training command. Never runs the script."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.errors import ConfigError
from megatron_dppo_port.shell_commands import ScriptReader
from megatron_dppo_port.shell_control import Script
from megatron_dppo_port.shell_values import State, Word, parse

_STRAY = re.compile(r"[+~]*[A-Za-z_]\w*(\.\w+)+=|--[a-z]")
"""First word of a line that belongs to the training command but does not reach it."""


def read_script(
    text: str, environment: Mapping[str, str], file: Path | None = None, root: Path | None = None
) -> Script:
    r"""Return the commands of a script with their words, in order.

    ``file`` is the script's path, for ``$0``. ``root`` is the folder that sourced files must be inside. None reads
    none.

    Example:
        >>> script = read_script("N=2\nA=(--n $N)\nif [ $N = 2 ]; then run ${A[@]} --m=$((N * 3)); fi", {})
        >>> [[word.text for word in command.words] for command in script.commands]
        [['run', '--n', '2', '--m=6']]
    """
    reader = ScriptReader(State({name: {"0": Word(value)} for name, value in environment.items()}), root)
    reader.expander.script = str(file.resolve()) if file is not None else None
    tree = parse(text)
    if tree.has_error and not tree.named_children:
        raise ConfigError(
            "The script cannot be parsed as bash. Fix: check it with bash -n, or give the training command alone"
        )
    reader.walk_all(tree)
    return reader.script


@dataclass(frozen=True)
class Launch:
    """Training command of a script."""

    program: list[Word]
    """Words up to the program."""
    arguments: list[Word]
    problems: list[str]
    """Reasons why the command may be another one."""


def find_launch(file: Path, script: Script, starts: Callable[[Sequence[str]], int | None]) -> Launch:
    """Return the training command of a script.

    ``starts`` returns the index of a training command's first argument, or None.
    """
    launches: list[Launch] = []
    strays: list[str] = []
    conditions: list[str | None] = []
    for i, command in enumerate(script.commands):
        first = starts([word.text for word in command.words])
        stops = [text for position, text in script.stops if position <= i]
        if first is None and launches and _STRAY.match(command.words[0].text):
            strays.append(
                f"line {command.line}: {command.words[0].text[:60]} is not part of the training command; a missing "
                "backslash, a space after it, or a comment ends the command"
            )
        if first is None or (launches and len(stops) > len(launches[0].problems)):
            # Behind the launch and an exit, nothing runs.
            continue
        conditions.append(command.condition)
        launches.append(Launch(command.words[:first], command.words[first:], stops))
    if len(launches) != 1:
        branches = "".join(f"; under {condition!r}" for condition in conditions if len(launches) > 1 and condition)
        raise ConfigError(
            f"{file}: expected one command that starts verl (python -m verl.trainer.main_ppo) or slime (python "
            f"train.py), got {len(launches)}{branches}. Fix: choose a branch with --variable NAME=VALUE, or put one "
            "command with its variables into a separate file"
        )
    launch = launches[0]
    return replace(launch, problems=[*launch.problems, *script.unread, *strays])
