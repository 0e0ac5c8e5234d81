"""Reads a function's parameters and return type.

Cog's inspector (`cog._inspector`, from the pinned version) reads each input's type and constraints.
Its rules for the whole signature are stricter than in Cog's schema generator and server, which also
support keyword-only arguments, `*args` and `**kwargs`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

from workers.models.custom.runner.cog_import import FieldInfo, adt, inspector
from workers.models.custom.runner.output_types import Output, read_output

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_CONVERTED = {adt.PrimitiveType.PATH, adt.PrimitiveType.FILE, adt.PrimitiveType.SECRET}
"""Types whose values arrive as strings."""


class Signature(NamedTuple):
    """One prediction's inputs, keyed by name, and its output."""

    inputs: dict[str, adt.InputField]
    output: Output
    defaults: Mapping[str, Any] = types.MappingProxyType({})
    """Defaults, as written in the source, for inputs that are neither files nor secrets."""


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Reads the signature of a function or an unbound method.

    Raises:
        ValueError: the signature can't be served. The message names the input or the return type.
    """
    plain = _undecorate(function)
    parameters = [
        parameter
        for parameter in inspect.signature(plain).parameters.values()
        if parameter.kind not in _VARIABLE
    ]
    if parameters and parameters[0].name == "self":
        del parameters[0]
    hints = read_hints(plain)
    for parameter in parameters:
        if parameter.name not in hints:
            raise ValueError(f"missing type annotation for input: {parameter.name}")
    fields = {
        parameter.name: (hints[parameter.name], _read_default(parameter))
        for parameter in parameters
    }
    yields = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    inputs = read_inputs(fields, _find_optional_inputs(plain))
    returned = hints.get("return", types.NoneType)
    # Cog's server passes on whatever such a function returns.
    output = read_output(Any if returned is types.NoneType else returned, yields=yields)
    return Signature(inputs, output, _read_plain_defaults(fields, inputs))


def check_values(signature: Signature, values: dict[str, Any]) -> dict[str, Any]:
    """Checks a prediction's inputs and adds defaults.

    As in Cog, the class receives numbers as the caller sent them, and defaults as written in the
    source: a `float` may have an `int` value.

    Raises:
        ValueError, TypeError: a value is invalid. The message names the input.
    """
    checked: dict[str, Any] = inspector().check_input(signature.inputs, values)
    for name, field in signature.inputs.items():
        if name not in values:
            checked[name] = signature.defaults.get(name, checked[name])
        elif field.type.primitive not in _CONVERTED and values[name] == checked[name]:
            checked[name] = values[name]
    return checked


def read_inputs(
    fields: Mapping[str, tuple[Any, Any]], optional: typing.Collection[str] = ()
) -> dict[str, adt.InputField]:
    """Reads the inputs.

    Args:
        fields: each input's type, along with its default or the result of `cog.Input`. None if the
            input has no default.
        optional: names of inputs that may be None although their types don't allow it.

    Raises:
        ValueError: Cog doesn't support such an input. The message names it.
    """
    inputs: dict[str, adt.InputField] = {}
    for order, (name, (hint, default)) in enumerate(fields.items()):
        hint, choices = _read_choices(inspector()._strip_non_opaque_annotated(hint))
        if name in optional and not isinstance(hint, str):
            hint = hint | None
        field = inspector()._create_input_field(order, name, hint, _simplify_default(default))
        inputs[name] = dataclasses.replace(field, choices=choices) if choices else field
    return inputs


def _read_choices(hint: Any) -> tuple[Any, list[Any]]:
    """Returns a type with plain types in place of Literals and Enums, and the values it allows.

    The list is empty if the type also allows other values. Cog passes on values of such types
    without checking them.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        origin, arguments = typing.Literal, tuple(hint)
    if origin is typing.Literal:
        values = [
            argument.value if isinstance(argument, enum.Enum) else argument
            for argument in arguments
        ]
        kind = reduce(or_, dict.fromkeys(map(type, values)))
        return kind, [value for value in values if value is not None]
    if origin is list and arguments:
        element, choices = _read_choices(arguments[0])
        return (types.GenericAlias(list, element), choices) if choices else (hint, [])
    if origin in (typing.Union, types.UnionType):
        variants = [
            _read_choices(argument) for argument in arguments if argument is not types.NoneType
        ]
        if not any(choices for _, choices in variants):
            return hint, []
        kinds = [kind for kind, _ in variants] + [types.NoneType] * (types.NoneType in arguments)
        is_complete = all(choices for _, choices in variants)
        choices = [value for _, choices in variants for value in choices]
        return reduce(or_, kinds), choices if is_complete else []
    return hint, []


def _simplify_default(default: Any) -> Any:
    """Returns a default, or the result of `cog.Input`, with plain values in place of Enum members.

    Values sent by callers are plain as well. Cog passes the member.
    """
    if isinstance(default, FieldInfo):
        return dataclasses.replace(default, default=_simplify_default(default.default))
    return default.value if isinstance(default, enum.Enum) else default


def _read_plain_defaults(
    fields: Mapping[str, tuple[Any, Any]], inputs: Mapping[str, adt.InputField]
) -> dict[str, Any]:
    simple = {name: _simplify_default(default) for name, (_, default) in fields.items()}
    defaults = {
        name: default.default if isinstance(default, FieldInfo) else default
        for name, default in simple.items()
        if inputs[name].type.primitive not in _CONVERTED
    }
    return {
        name: default
        for name, default in defaults.items()
        if default is not None and not isinstance(default, dataclasses.Field)
    }


def read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the types of a function's arguments and its return value, by name.

    A type that refers to an undefined name remains a string; the others are evaluated.
    """
    with contextlib.suppress(Exception):
        return typing.get_type_hints(function, include_extras=True)
    hints: dict[str, Any] = {}
    for name, hint in inspect.get_annotations(function).items():
        holder = types.SimpleNamespace(__annotations__={name: hint})
        scope = getattr(function, "__globals__", {})
        hints[name] = hint
        with contextlib.suppress(Exception):
            hints |= typing.get_type_hints(holder, globalns=scope, include_extras=True)
    return hints


def _undecorate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Unwraps the class's function from decorators that keep it in a closure."""
    plain: Callable[..., Any] = inspect.unwrap(function)
    kinds = {parameter.kind for parameter in inspect.signature(plain).parameters.values()}
    if kinds & set(_VARIABLE):
        with contextlib.suppress(ValueError):  # its closure contains more than one function
            return typing.cast("Callable[..., Any]", inspector()._unwrap(plain))
    return plain


def _read_default(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _find_optional_inputs(function: Callable[..., Any]) -> set[str]:
    """Returns inputs whose default is None, of any type: `seed: int = Input(default=None)`.

    `Input(description=...)` creates an equal object and is required, so the source code decides.
    """
    parameters = inspect.signature(function).parameters.values()
    raw = {parameter.name for parameter in parameters if parameter.default is None}
    if not any(isinstance(parameter.default, FieldInfo) for parameter in parameters):
        return raw
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return raw
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return raw
    return raw | {name for name, default in _list_defaults(definition.args) if _is_none(default)}


def _list_defaults(arguments: ast.arguments) -> list[tuple[str, ast.expr | None]]:
    """Returns each argument's name and default, as written in the source."""
    places = [*arguments.posonlyargs, *arguments.args]
    by_place = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    both = [*zip(places, by_place, strict=True)]
    both += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [(argument.arg, default) for argument, default in both]


def _is_none(default: ast.expr | None) -> bool:
    """True for `Input(None)` and `Input(default=None)`."""
    if not isinstance(default, ast.Call):
        return False
    named = (keyword.value for keyword in default.keywords if keyword.arg == "default")
    return any(
        isinstance(value, ast.Constant) and value.value is None
        for value in (*default.args[:1], *named)
    )
