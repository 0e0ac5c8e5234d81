"""Reads the calls of tools out of a model's text.

Each family of models has been trained on a form of its own, which its chat template shows:

- Hermes, Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several.
- SmolLM2: `<tool_call>[{"name": …, "arguments": {…}}, …]</tool_call>`.
- Mistral: `[TOOL_CALLS] [{"name": …, "arguments": {…}}, …]`.
- Llama 3.1: the text is `{"name": …, "parameters": {…}}`, possibly behind `<|python_tag|>`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from typing import Any

import msgspec

from api.schemas.openai_text_replies import CalledFunction, CalledTool

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
_WHOLE, _WITHIN = ("{", "<|python_tag|>"), ("<tool_call>", "[TOOL_CALLS]")
"""How a text begins that is a call, and what comes before a call."""
_LLAMA = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)


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
    for form in (_TAGGED, _MISTRAL, _LLAMA):
        calls: list[CalledTool] = []
        rest, at = [], 0
        for found in form.finditer(text):
            read = list(_read(found[1], names))
            if not read:
                continue
            calls += read
            rest.append(text[at : found.start()])
            at = found.end()
        if calls:
            for number, call in enumerate(calls):
                call.id = _id_of(f"{id_seed}:{number}")
            return "".join([*rest, text[at:]]).strip(), calls
    return text, []


def shown_of(text: str) -> str:
    """The part of a text so far that is no call, and can't become one with more text."""
    start = text.lstrip()
    if not start or any(start.startswith(sign) or sign.startswith(start) for sign in _WHOLE):
        return ""
    found = [at for sign in _WITHIN if (at := text.find(sign)) >= 0]
    if found:
        return text[: min(found)]
    longest = max(map(len, _WITHIN)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(sign.startswith(text[-length:]) for sign in _WITHIN):
            return text[:-length]
    return text


def _read(body: str, names: Collection[str]) -> Iterator[CalledTool]:
    """The calls in a piece of JSON, an object or a list of them. Nothing if one is no call."""
    try:
        given: Any = msgspec.json.decode(body.strip())
    except msgspec.DecodeError:
        return
    listed = given if isinstance(given, list) else [given]
    if not all(isinstance(one, dict) and one.get("name") in names for one in listed):
        return
    for one in listed:
        arguments = one.get("arguments", one.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = msgspec.json.encode(arguments).decode()
        yield CalledTool("", CalledFunction(one["name"], arguments))


def _id_of(seed: str) -> str:
    return f"call_{hashlib.blake2b(seed.encode(), digest_size=12).hexdigest()}"
