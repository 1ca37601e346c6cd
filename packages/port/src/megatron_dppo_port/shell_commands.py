"""Commands of a shell script: builtins, functions, sourced files and strings that are scripts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tree_sitter import Node

from megatron_dppo.errors import ConfigError
from megatron_dppo_port.budget import MAX_FILE_BYTES
from megatron_dppo_port.shell_conditions import evaluate_words
from megatron_dppo_port.shell_control import Command, ControlFlow
from megatron_dppo_port.shell_values import State, Word, join_words, line, merge_states, node_text, parse

_MAX_DEPTH = 20
"""Deepest nesting of functions, sourced files and strings that are scripts."""
_HARMLESS_FILES = re.compile(
    r"(activate|conda\.sh|bashrc|\.profile|bash_profile|set_env\.sh|setvars\.sh|modules?\.sh)\b"
)
"""Sourced files that set up programs and do not hold settings."""
_LAUNCH = re.compile(r"main_|train(_async)?\.py")
_SHELLS = ("bash", "sh", "zsh")


class ScriptReader(ControlFlow):
    """Reader of a script with its sourced files."""

    def __init__(self, state: State, root: Path | None) -> None:
        super().__init__(state)
        self._root = root.resolve() if root is not None else None
        self._returns: list[list[State]] = []
        self._depth = 0

    def command(self, node: Node) -> bool | None:
        """Read a command."""
        words = [word for part in node.named_children for word in self.expander.words(part)]
        if not words:
            return None
        name = words[0].text
        builtin = _BUILTINS.get(name)
        if name in self._functions:
            return self._call(name, words[1:])
        if builtin is not None:
            return builtin(self, node, words[1:])
        self._nested(node, words)
        condition = self._conditions[-1] if self._conditions else None
        self.script.commands.append(Command(words, condition, line(node)))
        return None

    def _nested(self, node: Node, words: Sequence[Word]) -> None:
        """Read the string of ``bash -c STRING`` as a script of its own."""
        string = _shell_string(words)
        if string is None:
            return
        if not string.unknown:
            self._inner(lambda: self.isolated(parse(string.text)))
        elif _LAUNCH.search(string.text):
            self.script.unread.append(f"line {line(node)}: the command in {string.text[:40]!r} is unknown")

    def _inner(self, body: Callable[[], object]) -> None:
        if self._depth >= _MAX_DEPTH:
            raise ConfigError(
                f"The script calls itself more than {_MAX_DEPTH} times. Fix: give the training command itself"
            )
        self._depth += 1
        body()
        self._depth -= 1

    def _call(self, name: str, arguments: list[Word]) -> bool | None:
        before = self.expander.arguments
        self.expander.arguments = arguments
        self._returns.append([])
        self._locals.append({})
        body = self._functions[name]
        self._inner(lambda: self.walk(body))
        returns = self._returns.pop()
        self.expander.arguments = before
        # Afterwards any state at a ``return``, or that at the end of the body, may be the current one.
        states = [replace(state, has_ended=False) for state in returns]
        if not self._state.has_ended:
            states.append(self._state)
        if states:
            self.expander.state = merge_states(states, line(body))
        for variable, value in self._locals.pop().items():
            if value is None:
                self._state.variables.pop(variable, None)
            else:
                self._state.variables[variable] = value
        return None

    def exit(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``exit``. Under a known condition before the launch, it is noted, and reading goes on."""
        if self._conditions:
            self._state.has_ended = True
        else:
            self.script.stops.append(
                (len(self.script.commands), f"line {line(node)}: the script ends before the training")
            )

    def leave(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``return``."""
        if self._returns:
            self._returns[-1].append(self._state.copy())
            self._state.has_ended = True

    def source(self, node: Node, arguments: Sequence[Word]) -> bool | None:
        """Read ``source FILE`` inside the root. Otherwise every variable becomes unknown."""
        word = arguments[0] if arguments else Word("", "no file")
        file = self._find_file(word)
        if file is not None:
            text = file.read_text(encoding="utf-8", errors="replace")
            script = self.expander.script
            self.expander.script = str(file)
            self._inner(lambda: self.walk_all(parse(text)))
            self.expander.script = script
            return True
        if not _HARMLESS_FILES.search(node_text(node)):
            self._forget(node, f"source {word.text}", "a file outside the folder, or missing")
        return None

    def _find_file(self, word: Word) -> Path | None:
        """Return the path of a sourced file inside the root. None if there is no such file."""
        if word.unknown or self._root is None or not word.text:
            return None
        folders = [self._state.folder] if self._state.folder else [str(self._root)]
        if self.expander.script:
            folders.append(str(Path(self.expander.script).parent))
        for folder in folders:
            path = Path(folder, word.text).resolve()
            # After ``resolve``, so that no link leads out of the root.
            if path.is_relative_to(self._root) and path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                return path
        return None

    def _forget(self, node: Node, what: str, why: str) -> None:
        self.script.unread.append(f"line {line(node)}: {what} was not read ({why}); it may set any variable")
        self._state.forget(f"may be set by {what} (line {line(node)}), which was not read")

    def evaluate(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``eval``."""
        text = join_words([part for word in arguments for part in (word, Word(" "))])
        if not text.unknown:
            self._inner(lambda: self.walk_all(parse(text.text)))
        elif "conda" not in text.text:  # conda's hook sets up programs and no settings.
            self._forget(node, f"eval {text.text.strip()[:40]}", "its text is unknown")

    def read_input(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``read`` and ``mapfile``: their variables become unknown."""
        for word in arguments:
            if word.text.isidentifier():
                self._state.set(word.text, Word("", f"${word.text} is read from the input (line {line(node)})"))

    def print_to(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``printf -v X``."""
        if len(arguments) > 1 and arguments[0].text == "-v":
            name = arguments[1].text
            self._state.set(name, Word("", f"${name} is set by printf (line {line(node)})"))

    def change_folder(self, node: Node, arguments: Sequence[Word]) -> bool | None:
        """Read ``cd``."""
        paths = [word for word in arguments if word.text != "--"]
        is_known = len(paths) == 1 and not paths[0].unknown
        folder = self._state.folder or ("/" if is_known and paths[0].text.startswith("/") else None)
        self._state.folder = str(Path(folder, paths[0].text)) if is_known and folder else None
        return True

    def shift(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``shift``."""
        count = arguments[0].text if arguments else "1"
        is_number = re.fullmatch(r"[0-9]{1,9}", count) is not None
        self.expander.arguments = self.expander.arguments[int(count) if is_number else 1 :]

    def set_arguments(self, node: Node, arguments: Sequence[Word]) -> bool | None:
        """Read ``set -- words``."""
        names = [word.text for word in arguments]
        if "--" in names:
            self.expander.arguments = list(arguments[names.index("--") + 1 :])
        return True

    def let(self, node: Node, arguments: Sequence[Word]) -> None:
        """Read ``let X=expression``."""
        for word in arguments:
            self.walk_all(parse(f"(( {word.text} ))"))


_BUILTINS: dict[str, Callable[[ScriptReader, Node, Sequence[Word]], bool | None]] = {
    "exit": ScriptReader.exit,
    "return": ScriptReader.leave,
    "source": ScriptReader.source,
    ".": ScriptReader.source,
    "eval": ScriptReader.evaluate,
    "read": ScriptReader.read_input,
    "mapfile": ScriptReader.read_input,
    "readarray": ScriptReader.read_input,
    "printf": ScriptReader.print_to,
    "cd": ScriptReader.change_folder,
    "shift": ScriptReader.shift,
    "set": ScriptReader.set_arguments,
    "let": ScriptReader.let,
    "test": lambda reader, node, words: evaluate_words(words),
    # It fails if there are no arguments.
    "getopts": lambda reader, node, words: None if reader.expander.arguments else False,
    "true": lambda reader, node, words: True,
    ":": lambda reader, node, words: True,
    "echo": lambda reader, node, words: True,
    "false": lambda reader, node, words: False,
}


def _shell_string(words: Sequence[Word]) -> Word | None:
    """Return STRING of ``bash -c STRING``. None for other commands."""
    for i in range(len(words) - 2):
        if words[i].text.rpartition("/")[2] in _SHELLS and re.fullmatch(r"-[a-z]*c", words[i + 1].text):
            return words[i + 2]
    return None
