"""Reads what a function takes and returns.

Cog's inspector (`cog._inspector`, of the pinned version) reads the type and the constraints of each
input. Its rules for the whole signature are stricter than Cog's schema generator and server, which
also serve keyword-only arguments, `*args` and `**kwargs`.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from workers.models.custom.runner.cog_import import FieldInfo, adt, cog, inspector
from workers.models.custom.runner.output_types import Output, read_output

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Signature(NamedTuple):
    """The inputs of one prediction by their names, and its output."""

    inputs: dict[str, adt.InputField]
    output: Output


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Reads the signature of a function, or of a method that is not bound.

    Raises:
        ValueError: it can't be served. The message names the input or the return type.
    """
    plain = _undecorate(function)
    parameters = [
        one for one in inspect.signature(plain).parameters.values() if one.kind not in _VARIABLE
    ]
    if parameters and parameters[0].name == "self":
        del parameters[0]
    hints = read_hints(plain)
    for one in parameters:
        if one.name not in hints:
            raise ValueError(f"missing type annotation for input: {one.name}")
    if hints.get("return", types.NoneType) is types.NoneType:
        raise ValueError(f"{name}() must have a return type annotation")
    fields = {one.name: (hints[one.name], _read_default(one)) for one in parameters}
    yields = inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain)
    optional = _find_optional_secrets(plain, fields)
    return Signature(read_inputs(fields, optional), read_output(hints["return"], yields=yields))


def read_inputs(
    fields: Mapping[str, tuple[Any, Any]], optional: typing.Collection[str] = ()
) -> dict[str, adt.InputField]:
    """Reads inputs.

    Args:
        fields: the type of each, and its default or what `cog.Input` returned. None: no default.
        optional: names of inputs that may be None although their types do not say so.

    Raises:
        ValueError: Cog knows no such input. The message names it.
    """
    inputs: dict[str, adt.InputField] = {}
    for order, (name, (hint, default)) in enumerate(fields.items()):
        hint = inspector()._strip_non_opaque_annotated(hint)
        if name in optional:
            hint = hint | None
        inputs[name] = inspector()._create_input_field(order, name, hint, default)
    return inputs


def read_hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's arguments and its return value, by name.

    A type with a name that does not exist at run time stays a text, and the others are evaluated.
    """
    with contextlib.suppress(Exception):
        return typing.get_type_hints(function, include_extras=True)
    hints: dict[str, Any] = {}
    for name, hint in inspect.get_annotations(function).items():
        one = types.SimpleNamespace(__annotations__={name: hint})
        scope = getattr(function, "__globals__", {})
        hints[name] = hint
        with contextlib.suppress(Exception):
            hints |= typing.get_type_hints(one, globalns=scope, include_extras=True)
    return hints


def _undecorate(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of the class, inside of decorators that keep it in a closure."""
    plain: Callable[..., Any] = inspect.unwrap(function)
    kinds = {one.kind for one in inspect.signature(plain).parameters.values()}
    if kinds & set(_VARIABLE):
        with contextlib.suppress(ValueError):  # it has several functions in its closure
            return typing.cast("Callable[..., Any]", inspector()._unwrap(plain))
    return plain


def _read_default(parameter: inspect.Parameter) -> Any:
    return None if parameter.default is inspect.Parameter.empty else parameter.default


def _find_optional_secrets(
    function: Callable[..., Any], fields: Mapping[str, tuple[Any, Any]]
) -> set[str]:
    """The inputs that Cog takes for optional secrets: `key: Secret = Input(default=None)`.

    `Input(description=...)` makes an equal object and is required, so the source code decides.
    """
    secrets = {
        name
        for name, (hint, default) in fields.items()
        if hint is cog.Secret and isinstance(default, FieldInfo) and default.default is None
    }
    if not secrets:
        return set()
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return set()
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {
        name for name, default in _list_defaults(definition.args) if _is_none(default)
    } & secrets


def _list_defaults(arguments: ast.arguments) -> list[tuple[str, ast.expr | None]]:
    """The name and the default of each argument, as they are written."""
    places = [*arguments.posonlyargs, *arguments.args]
    by_place = [None] * (len(places) - len(arguments.defaults)) + list(arguments.defaults)
    both = [*zip(places, by_place, strict=True)]
    both += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return [(argument.arg, default) for argument, default in both]


def _is_none(default: ast.expr | None) -> bool:
    """True for `Input(None)` and `Input(default=None)`."""
    if not isinstance(default, ast.Call):
        return False
    named = (one.value for one in default.keywords if one.arg == "default")
    return any(
        isinstance(one, ast.Constant) and one.value is None for one in (*default.args[:1], *named)
    )
