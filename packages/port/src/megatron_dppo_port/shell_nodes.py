"""Parts of a shell script's syntax tree."""

from __future__ import annotations

from collections.abc import Iterator

from tree_sitter import Node

from megatron_dppo_port.shell_values import node_text


def split_clause(node: Node) -> tuple[list[Node], list[Node]]:
    """Return the condition and the body of ``if`` or ``elif``, or the body of ``else``."""
    condition: list[Node] = []
    body: list[Node] = []
    is_body = node.type == "else_clause"
    for child in node.children:
        if child.type == "then":
            is_body = True
        elif child.is_named and child.type not in ("elif_clause", "else_clause"):
            (body if is_body else condition).append(child)
    return condition, body


def patterns(item: Node) -> list[Node]:
    """Return the patterns of a branch of ``case``."""
    return [child for child in item.children_by_field_name("value") if child.is_named]


def _descendants(node: Node) -> Iterator[Node]:
    yield node
    for child in node.named_children:
        yield from _descendants(child)


def assigned_names(node: Node) -> list[str]:
    """Return the variables that a part of the script may set."""
    names: list[str] = []
    for part in _descendants(node):
        name = part.child_by_field_name("name")
        if part.type == "variable_assignment":
            names.append(node_text(name).partition("[")[0])
        elif part.type in ("binary_expression", "postfix_expression", "unary_expression"):
            operand = part.named_children[0] if part.named_children else None
            is_set = any(child.type in ("=", "+=", "-=", "*=", "++", "--") for child in part.children)
            if is_set and operand is not None and node_text(operand).isidentifier():
                names.append(node_text(operand))
        elif part.type == "for_statement":
            names.append(node_text(part.child_by_field_name("variable")))
        elif part.type == "command" and node_text(name) in ("read", "mapfile", "readarray"):
            names += [node_text(child) for child in part.named_children[1:] if node_text(child).isidentifier()]
    return list(dict.fromkeys(names))


def is_left_early(body: Node) -> bool:
    """Return True if a loop has ``break`` or ``continue``."""
    return any(node_text(part) in ("break", "continue") for part in _descendants(body) if part.type == "command_name")
