"""Output of the commands in a shell script that only name paths or numbers."""

import posixpath
import re
from collections.abc import Sequence

from tree_sitter import Node

from megatron_dppo_port.shell_values import UnknownValueError

_MAX_SEQUENCE = 10_000


def substituted_commands(node: Node) -> list[Node | None]:
    """Return the commands of a substitution in order. None stands for a part that is more than plain commands."""
    if node.type == "command":
        return [node]
    if node.type == "redirected_statement":
        return substituted_commands(node.named_children[0])
    if node.type == "command_substitution" or (
        node.type == "list" and all(c.is_named or c.type == "&&" for c in node.children)
    ):
        return [command for child in node.named_children for command in substituted_commands(child)]
    return [None]


def resolve_path(folder: str | None, path: str) -> str:
    """Return an absolute path without ``.`` and ``..``.

    Raises ``UnknownValueError`` for one that is relative to an unknown folder.
    """
    if not path.startswith("/") and folder is None:
        raise UnknownValueError(f"the folder of {path!r} is known only by running the script")
    return posixpath.normpath(posixpath.join(folder or "/", path))


def command_output(name: str, arguments: Sequence[str], folder: str | None) -> str | None:
    """Return the output of a command on names and numbers. None for other commands."""
    if name == "pwd" and folder is not None:
        return folder
    if name == "echo" and not any(word.startswith("-") for word in arguments):
        return " ".join(arguments)
    if name == "dirname" and len(arguments) == 1:
        return posixpath.dirname(arguments[0].rstrip("/")) or "."
    if name == "basename" and len(arguments) in (1, 2):
        base = posixpath.basename(arguments[0].rstrip("/"))
        suffix = arguments[1] if len(arguments) == 2 else ""
        return base.removesuffix(suffix) if base != suffix else base
    if name in ("realpath", "readlink"):
        paths = [word for word in arguments if word not in ("-f", "-e", "-m")]
        return resolve_path(folder, paths[0]) if len(paths) == 1 and not paths[0].startswith("-") else None
    if name == "seq" and all(re.fullmatch(r"-?\d{1,18}", word) for word in arguments):
        return _sequence([int(word) for word in arguments])
    return None


def _sequence(numbers: Sequence[int]) -> str | None:
    if not 1 <= len(numbers) <= 3:
        return None
    first = numbers[0] if len(numbers) > 1 else 1
    step = numbers[1] if len(numbers) == 3 else 1
    if step == 0 or abs((numbers[-1] - first) // step) > _MAX_SEQUENCE:
        return None
    return "\n".join(map(str, range(first, numbers[-1] + (1 if step > 0 else -1), step)))
