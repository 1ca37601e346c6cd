"""Print the walk of the session: ``python tools/measure_walk.py [PACKAGE ...]``, of the trainer by default.

A reader goes through the methods of ``Session`` and every function that takes or opens one, in the order of the source.
Each call leads into the module of the called function or class, or of the class of the object. Calls into one module in
a row are one stay. A return is a stay in a module where the reader was before.
"""

from __future__ import annotations

import ast
import sys
from typing import NamedTuple

from source_folders import ROOT


class Symbol(NamedTuple):
    """Class, function or value of a module."""

    module: str
    name: str


SESSION = Symbol("megatron_dppo.run.session", "Session")


class Sources:
    """Definitions and imports of the trainer and of the packages beside it."""

    def __init__(self) -> None:
        self.functions: list[tuple[Symbol, ast.FunctionDef]] = []
        """Every function and method, with its class or itself."""
        self.definitions: dict[Symbol, ast.ClassDef | ast.FunctionDef] = {}
        self.imports: dict[Symbol, Symbol] = {}
        self.modules: set[str] = set()
        for root in (ROOT, *sorted(ROOT.glob("packages/*/src"))):
            for file in sorted(root.glob("megatron_dppo*/**/*.py")):
                self.read(".".join(file.relative_to(root).with_suffix("").parts), ast.parse(file.read_text()))

    def read(self, module: str, tree: ast.Module) -> None:
        """Add a module."""
        self.modules.add(module)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                self.imports |= {Symbol(module, a.asname or a.name): Symbol(node.module, a.name) for a in node.names}
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                symbol = Symbol(module, node.name)
                self.definitions[symbol] = node
                members = node.body if isinstance(node, ast.ClassDef) else [node]
                self.functions += [(symbol, each) for each in members if isinstance(each, ast.FunctionDef)]

    def resolve(self, module: str, name: str) -> Symbol:
        """Return what a name of a module stands for, through imports and re-exports."""
        symbol = Symbol(module, name)
        while symbol in self.imports and symbol not in self.definitions:
            symbol = self.imports[symbol]
            package = Symbol(f"{symbol.module}.__init__", symbol.name)
            symbol = package if package in self.imports else symbol
        return symbol

    def annotated(self, module: str, annotation: ast.expr | None) -> Symbol | None:
        """Return the first class of ours in an annotation."""
        names = [node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)] if annotation else []
        symbols = [self.resolve(module, name) for name in names]
        return next((each for each in symbols if isinstance(self.definitions.get(each), ast.ClassDef)), None)

    def type_of(self, node: ast.expr, module: str, local: dict[str, Symbol | None]) -> Symbol | None:
        """Return the class of a value, or of what a function returns."""
        if isinstance(node, ast.Call):
            return self.type_of(node.func, module, local)
        if isinstance(node, ast.Name) and node.id in local:
            return local[node.id]
        if isinstance(node, ast.Name):
            symbol = self.resolve(module, node.id)
            made = self.definitions.get(symbol)
            return self.annotated(symbol.module, made.returns) if isinstance(made, ast.FunctionDef) else symbol
        if isinstance(node, ast.Attribute) and (owner := self.type_of(node.value, module, local)):
            for member in ast.walk(self.definitions.get(owner, ast.Pass())):
                if isinstance(member, ast.AnnAssign) and ast.unparse(member.target).removeprefix("self.") == node.attr:
                    return self.annotated(owner.module, member.annotation)
                if isinstance(member, ast.FunctionDef) and member.name == node.attr:
                    return self.annotated(owner.module, member.returns)
                is_constructor = isinstance(member, ast.FunctionDef) and member.name == "__init__"
                arguments = self.argument_types(owner.module, member) if is_constructor else {}
                if node.attr in arguments:  # kept under its name
                    return arguments[node.attr]
        return None

    def argument_types(self, module: str, function: ast.FunctionDef) -> dict[str, Symbol | None]:
        """Return the class of each argument of a function. None if it is not one of ours."""
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        return {each.arg: self.annotated(module, each.annotation) for each in arguments}


def walk(sources: Sources, package: str) -> list[str]:
    """Return the modules at which a reader of a package stays, in order."""
    stays: list[str] = []
    for symbol, function in sources.functions:
        if symbol.module.split(".")[0] == package:
            for module in _called_modules(sources, symbol, function):
                if stays[-1:] != [module]:
                    stays.append(module)
    return stays


def _called_modules(sources: Sources, symbol: Symbol, function: ast.FunctionDef) -> list[str]:
    """Return the module of a function, then that of each call in it; nothing if it has no session."""
    module = symbol.module
    local = sources.argument_types(module, function)
    if symbol == SESSION:
        local["self"] = SESSION
    modules = [module]
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.withitem | ast.Call)]
    for node in sorted(nodes, key=_position):
        if isinstance(node, ast.Call):
            # A method belongs to the class of its object, anything else to the module that defines it.
            target = node.func.value if isinstance(node.func, ast.Attribute) else node.func
            is_function = isinstance(target, ast.Name) and target.id not in local
            called = sources.resolve(module, target.id) if is_function else sources.type_of(target, module, local)
            if called and called.module.startswith("megatron_dppo") and called.module in sources.modules:
                modules.append(called.module)
            continue
        name = node.targets[0] if isinstance(node, ast.Assign) else node.optional_vars
        if isinstance(name, ast.Name):
            value = node.value if isinstance(node, ast.Assign) else node.context_expr
            local[name.id] = sources.type_of(value, module, local)
    return modules if SESSION in local.values() else []


def _position(node: ast.Assign | ast.withitem | ast.Call) -> tuple[int, int]:
    first = node.context_expr if isinstance(node, ast.withitem) else node
    return first.lineno, first.col_offset


def main() -> None:
    """Print a line for each package."""
    sources = Sources()
    for package in sys.argv[1:] or ["megatron_dppo"]:
        stays = walk(sources, package)
        rooms = len(set(stays))
        print(f"{package}: {len(stays)} stays, {rooms} modules, {len(stays) - rooms} returns")


if __name__ == "__main__":
    main()
