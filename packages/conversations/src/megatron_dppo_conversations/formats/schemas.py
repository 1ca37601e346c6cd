"""JSON schemas of a tool's parameters: which values they allow, by type and not by every keyword."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

Tools = Sequence[Mapping[str, Any]]
"""Tools of a request in the form of OpenAI's chat completions."""
_MAX_DEPTH = 64
"""Maximum number of references and branches that lead to a schema. A deeper one allows every value."""


def find_function(tools: Tools, name: str) -> Mapping[str, Any] | None:
    """Return the function of a tool by its name; None if there is none."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            return function
    return None


def has_tool(tools: Tools, name: str) -> bool:
    """Return True if a tool of that name was given."""
    return find_function(tools, name) is not None


@dataclass(frozen=True)
class ValueSchema:
    """Schema of one value, and the schemas in which its references are looked up."""

    schema: Any
    roots: tuple[Any, ...]

    @property
    def allows_all(self) -> bool:
        """True if the schema says nothing about the value."""
        return all(map(self.allows, ("", 0, 0.5, True, None, [], {})))

    def allows(self, value: Any, *, by_type: bool = False) -> bool:
        """Return True if a value, but for its parts, is allowed; ``by_type`` reads ``enum`` and ``const`` as types."""
        return self._allows(value, self.schema, by_type, {}) is not False

    def property_schemas(self) -> dict[str, ValueSchema]:
        """Return the schemas of an object's properties by name, also those behind references and branches."""
        schemas: dict[str, ValueSchema] = {}
        for part in self._parts(self.schema, set()):
            properties = part.get("properties")
            for name, schema in properties.items() if isinstance(properties, Mapping) else ():
                schemas.setdefault(name, ValueSchema(schema, (*self.roots, schema)))
        return schemas

    def required(self) -> set[str]:
        """Return the names of the properties that an object must have."""
        lists = [part.get("required") for part in self._parts(self.schema, set())]
        names = {name for each in lists if isinstance(each, list) for name in each if isinstance(name, str)}
        return names & self.property_schemas().keys()

    def items(self) -> ValueSchema:
        """Return the schema of a list's entries."""
        entries = [part.get("items") for part in self._parts(self.schema, set())]
        schema = next((each for each in entries if isinstance(each, Mapping)), None)
        return ValueSchema(schema, (*self.roots, schema))

    def other_properties(self) -> ValueSchema:
        """Return the schema of properties that have none of their own."""
        extra_schemas = [part.get("additionalProperties") for part in self._parts(self.schema, set())]
        schema = next((each for each in extra_schemas if isinstance(each, Mapping)), None)
        return ValueSchema(schema, (*self.roots, schema))

    def _parts(self, schema: Any, visited: set[int], depth: int = 0) -> Iterator[Mapping[str, Any]]:
        """Yield a schema and all that it refers to for the same value."""
        if not isinstance(schema, Mapping) or id(schema) in visited or depth > _MAX_DEPTH:
            return
        visited.add(id(schema))
        yield schema
        if isinstance(schema.get("$ref"), str):
            yield from self._parts(self._target(schema["$ref"]), visited, depth + 1)
        for key in ("allOf", "anyOf", "oneOf"):
            for branch in _branches(schema, key):
                yield from self._parts(branch, visited, depth + 1)

    def _allows(
        self, value: Any, schema: Any, by_type: bool, known: dict[int, bool | None], depth: int = 0
    ) -> bool | None:
        """Return True if a schema allows a value, and None if it only leads back to itself.

        ``known`` has results by the identity of a schema, so that each is read once; None while it is read. ``depth``
        counts the references and branches that led here.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return True
        if id(schema) in known:
            return known[id(schema)]
        known[id(schema)] = None
        verdicts: list[bool | None] = []
        if types := _known_types(schema.get("type")) or ["string"] * (_TEXT_KEYWORDS & schema.keys() != set()):
            verdicts.append(_has_type(value, types))
        if isinstance(schema.get("enum"), list):
            verdicts.append(any(_is_same(value, each, by_type) for each in schema["enum"]))
        if "const" in schema:
            verdicts.append(_is_same(value, schema["const"], by_type))
        needed = [self._target(schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
        for each in (*needed, *_branches(schema, "allOf")):
            verdicts.append(self._allows(value, each, by_type, known, depth + 1))
        for key in ("anyOf", "oneOf"):
            branches = [self._allows(value, each, by_type, known, depth + 1) for each in _branches(schema, key)]
            if branches:
                verdicts.append(None if set(branches) == {None} else True in branches)
        said = [each for each in verdicts if each is not None]
        result = all(said) if said or None not in verdicts else None
        known[id(schema)] = result
        return result

    def _target(self, reference: str) -> Any:
        """Return what a reference within the document names; None for any other."""
        if not reference.startswith("#"):
            return None
        for root in self.roots:
            target = root
            for name in unquote(reference[1:]).split("/")[1:]:
                name = name.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                    target = target[int(name)]
                else:
                    target = target.get(name) if isinstance(target, Mapping) else None
            if target is not None:
                return target
        return None


def parameters_schema(tools: Tools, name: str) -> ValueSchema:
    """Return the schema of the parameters of a tool; one that allows everything if there is no such tool."""
    function = find_function(tools, name)
    parameters = None if function is None else function.get("parameters")
    return ValueSchema(parameters, (parameters,))


def _branches(schema: Mapping[str, Any], key: str) -> list[Any]:
    branches = schema.get(key)
    return branches if isinstance(branches, list) else []


_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


_TEXT_KEYWORDS = {"pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"}
"""Keywords that speak of text alone: without a type, whoever writes one means text."""


def _known_types(declared: Any) -> list[str]:
    names = declared if isinstance(declared, list) else [declared]
    return [name for name in names if isinstance(name, str) and name in _TYPES]


def _has_type(value: Any, types: list[str]) -> bool:
    # ``bool`` is a subclass of ``int``, and 1.0 is an integer for JSON schema.
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _TYPES[name]) for name in types)


def _is_same(value: Any, other: Any, by_type: bool) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return isinstance(value, bool) and isinstance(other, bool) and (by_type or value is other)
    if by_type:
        numbers = (int, float)
        return (isinstance(value, numbers) and isinstance(other, numbers)) or type(value) is type(other)
    return bool(value == other)
