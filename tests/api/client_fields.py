"""Request fields, according to the types in the installed `openai` client."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import typing_extensions

MAX_DEPTH = 6


class Field(NamedTuple):
    """A field of a request type: whether it may be null, and a typical value."""

    name: str
    is_required: bool
    is_nullable: bool
    usual: Any


def fields_of(kind: Any) -> list[Field]:
    """The fields in one of the client's TypedDicts."""
    hints = typing_extensions.get_type_hints(kind, include_extras=True)
    return [
        Field(name, _is_required(kind, name, hint), _is_nullable(hint), usual_value(hint))
        for name, hint in hints.items()
    ]


def params_of(*kinds: Any) -> list[Field]:
    """The fields of several request types that form one request, without duplicates."""
    found = {field.name: field for kind in reversed(kinds) for field in fields_of(kind)}
    return list(found.values())


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    """Like `__required_keys__`, which can't read string annotations."""
    if get_origin(hint) is typing_extensions.Required:
        return True
    return get_origin(hint) is not typing_extensions.NotRequired and name in kind.__required_keys__


def _plain(hint: Any) -> Any:
    while get_origin(hint) in (
        typing.Annotated,
        typing_extensions.Required,
        typing_extensions.NotRequired,
    ):
        hint = get_args(hint)[0]
    return getattr(hint, "__value__", hint)


def _members(hint: Any) -> Iterator[Any]:
    hint = _plain(hint)
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _members(member)
    else:
        yield hint


def _is_nullable(hint: Any) -> bool:
    return type(None) in _members(hint)


def usual_value(hint: Any, depth: int = 0) -> Any:
    """A value that a caller might send for a type: the first of its possible forms."""
    hint = next((one for one in _members(hint) if one is not type(None)), type(None))
    origin = get_origin(hint)
    if origin is Literal:
        return get_args(hint)[0]
    if typing_extensions.is_typeddict(hint):
        if depth > MAX_DEPTH:
            return {}
        hints = typing_extensions.get_type_hints(hint, include_extras=True)
        return {
            name: usual_value(one, depth + 1)
            for name, one in hints.items()
            if _is_required(hint, name, one)
        }
    if origin in (dict, collections.abc.Mapping):
        value = get_args(hint)[1]
        return {"a": usual_value(value, depth + 1)}
    if origin is not None and issubclass(origin, collections.abc.Iterable):
        return [usual_value(get_args(hint)[0], depth + 1)]
    return _SCALARS.get(hint, "x")


_SCALARS: dict[Any, Any] = {bool: True, int: 1, float: 0.5, str: "x", object: {}, bytes: "x"}
