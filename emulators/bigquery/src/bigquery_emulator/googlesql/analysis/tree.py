"""A statement's resolved tree from the analyzer, with plain attribute access to its fields.

Source: https://github.com/google/googlesql/blob/master/docs/resolved_ast.md
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message


class Node:
    """A node in a resolved tree.

    Fields are attributes, including inherited ones. A child node is a Node, several children are a
    list of Nodes, and a missing child is None. Other messages, such as types and columns, are
    protocol buffers.

    Attributes:
        kind: the node's name without `Resolved`, such as `FunctionCall` or `TableScan`.
    """

    __slots__ = ("_message", "kind")

    def __init__(self, message: Message) -> None:
        message = _inner(message)
        self._message = message
        self.kind = message.DESCRIPTOR.name.removeprefix("Resolved").removesuffix("Proto")

    def __getattr__(self, name: str) -> Any:
        path = _paths(self._message.DESCRIPTOR).get(name)
        if path is None:
            raise AttributeError(f"{self.kind} has no {name}")
        message = self._message
        for _ in range(path.depth):
            message = message.parent  # type: ignore[attr-defined]
        if not path.is_node:
            return getattr(message, name)
        if path.is_list:
            return [Node(child) for child in getattr(message, name)]
        return Node(getattr(message, name)) if message.HasField(name) else None

    def enum(self, name: str) -> str:
        """Returns the name of an enum value, such as `LEFT` for a `join_type`."""
        descriptor = self._message.DESCRIPTOR
        message = self._message
        for _ in range(_paths(descriptor)[name].depth):
            message = message.parent  # type: ignore[attr-defined]
        values: Any = message.DESCRIPTOR.fields_by_name[name].enum_type
        return str(values.values_by_number[getattr(message, name)].name)

    def has(self, name: str) -> bool:
        """True if this kind of node has the field, whether or not it is set."""
        return name in _paths(self._message.DESCRIPTOR)

    def children(self) -> list[Node]:
        """Returns the direct child nodes, in field order."""
        children: list[Node] = []
        for name, path in _paths(self._message.DESCRIPTOR).items():
            if path.is_node:
                child = getattr(self, name)
                children += child if path.is_list else [child] if child is not None else []
        return children

    def walk(self) -> list[Node]:
        """Returns this node and all nodes below it."""
        nodes = [self]
        for node in nodes:
            nodes += node.children()  # the list grows while it is being read
        return nodes

    def __repr__(self) -> str:
        return f"Node({self.kind})"


class _Path:
    __slots__ = ("depth", "is_list", "is_node")

    def __init__(self, depth: int, field: FieldDescriptor) -> None:
        self.depth = depth
        self.is_list = field.is_repeated
        self.is_node = field.message_type is not None and _is_node(field.message_type)


@cache
def _paths(descriptor: Descriptor) -> dict[str, _Path]:
    paths: dict[str, _Path] = {}
    depth = 0
    level: Descriptor | None = descriptor
    while level is not None:
        for field in level.fields:
            if field.name != "parent":
                paths.setdefault(field.name, _Path(depth, field))
        above = level.fields_by_name.get("parent")
        level, depth = (None if above is None else above.message_type), depth + 1
    return paths


def _is_node(descriptor: Descriptor) -> bool:
    return descriptor.file.name.endswith("resolved_ast/resolved_ast.proto")


def _inner(message: Message) -> Message:
    """Unwraps the node from messages that may hold any of several kinds."""
    while message.DESCRIPTOR.name.startswith("AnyResolved"):
        message = message.ListFields()[0][1]
    return message
