"""Reads the calls of tools out of a model's text.

Each family of models has been trained on a form of its own, which its chat template shows:

- Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several.
- SmolLM2: `<tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>`.
- Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`.
- Llama 3.1: the text is `{"name": …, "parameters": {…}}`, possibly behind `<|python_tag|>`.

A call that is forced has the form of Llama 3.1, with `arguments`, whatever the family.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from api.schemas.openai_text import CalledFunction, CalledTool

_WHOLE, _WITHIN = ("{", "<|python_tag|>"), ("<tool_call>", "[TOOL_CALLS]")
"""How a text begins that is a call, and what comes before a call."""
_SIGN = re.compile("|".join(map(re.escape, _WITHIN)))
_WHOLE_CALL = re.compile(r"\s*(?:<\|python_tag\|>\s*)?(?=\{)")
_CLOSING = re.compile(r"\s*</tool_call>")
_SPACE = re.compile(r"\s*")
_decoder = json.JSONDecoder()


class _Found(NamedTuple):
    """Calls, and the place in the text behind them."""

    calls: list[CalledTool]
    end: int


def read_tool_calls(
    text: str, names: Collection[str], id_seed: str
) -> tuple[str, list[CalledTool]]:
    """Splits a text into what the model says and the calls that it asks for.

    A call of a tool that the caller does not have stays text, as does what is no JSON.

    Args:
        text: as the model wrote it.
        names: the tools that the caller has.
        id_seed: makes the ids of the calls. Equal seeds give equal ids, on any instance.

    Returns:
        The text before, between and after the calls, and the calls in order.
    """
    calls: list[CalledTool] = []
    rest, at = [], 0
    for start, found in _find_whole(text, names) or _find_within(text, names):
        calls += found.calls
        rest.append(text[at:start])
        at = found.end
    if not calls:
        return text, []
    for number, call in enumerate(calls):
        call.id = _id_of(f"{id_seed}:{number}")
    return "".join([*rest, text[at:]]).rstrip(), calls


def shown_of(text: str) -> str:
    """The part of a text so far that is no call, and can't become one with more text.

    It is a beginning of what `read_tool_calls` returns as text, whatever comes.
    """
    start = text.lstrip()
    if not start or any(start.startswith(sign) or sign.startswith(start) for sign in _WHOLE):
        return ""
    if found := _SIGN.search(text):
        return text[: found.start()].rstrip()
    longest = max(map(len, _WITHIN)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(sign.startswith(text[-length:]) for sign in _WITHIN):
            return text[:-length].rstrip()
    # Space before a call is no part of what is said.
    return text.rstrip()


def call_schema(tools: Sequence[tuple[str, dict[str, Any] | None]]) -> str:
    """The JSON schema, as JSON, of a call of one of these tools.

    Args:
        tools: the name of each, and the schema of its arguments.
    """
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"$ref": f"#/$defs/{name}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, _ in tools
    ]
    # A schema inside another one refers to its own parts by a longer way.
    parts = {name: _moved(given or {"type": "object"}, f"#/$defs/{name}") for name, given in tools}
    whole = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return json.dumps({**whole, "$defs": parts})


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target.removeprefix("#")
    return moved


def _find_whole(text: str, names: Collection[str]) -> list[tuple[int, _Found]]:
    """The call that the whole text is, if it is one."""
    before = _WHOLE_CALL.match(text)
    found = _calls_at(text, before.end(), names) if before else None
    return [(0, found)] if found is not None and not text[found.end :].strip() else []


def _find_within(text: str, names: Collection[str]) -> list[tuple[int, _Found]]:
    """The calls behind signs, each with the place of its sign."""
    found: list[tuple[int, _Found]] = []
    end = 0
    for sign in _SIGN.finditer(text):
        if sign.start() < end:
            continue
        one = _calls_at(text, sign.end(), names)
        if one is not None:
            found.append((sign.start(), one))
            end = one.end
    return found


def _calls_at(text: str, at: int, names: Collection[str]) -> _Found | None:
    """The calls in the JSON at a place, an object or a list of them. None if one is no call."""
    start = _SPACE.match(text, at)
    try:
        given, end = _decoder.raw_decode(text, start.end() if start else at)
    except (ValueError, RecursionError):
        return None
    listed = given if isinstance(given, list) else [given]
    if not listed or not all(_is_call(one, names) for one in listed):
        return None
    closing = _CLOSING.match(text, end)
    return _Found([_call_of(one) for one in listed], closing.end() if closing else end)


def _is_call(given: Any, names: Collection[str]) -> bool:
    return isinstance(given, dict) and isinstance(given.get("name"), str) and given["name"] in names


def _call_of(given: dict[str, Any]) -> CalledTool:
    arguments = given.get("arguments", given.get("parameters", {}))
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return CalledTool("", CalledFunction(given["name"], arguments))


def _id_of(seed: str) -> str:
    return f"call_{hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()}"
