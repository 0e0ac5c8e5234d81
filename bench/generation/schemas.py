"""Sends 200 prompts with various JSON schemas through the stack, and validates every output.

Each is checked by `jsonschema`, including the formats it supports. Schemas are bounded, so that a
text ends before `max_tokens`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
from jsonschema import Draft202012Validator, FormatChecker

from bench.generation.load import MODEL, running_stack, smollm2_folder
from bench.report import Figure, Outcome
from shared.errors import ConfigurationError

PROMPTS = 200
IN_FLIGHT = 16
MAX_TOKENS = 256
LIMIT_S = 600.0
Schema = dict[str, Any]
_COLORS = ["red", "green", "blue", "deep violet", "é-bleu", 'quo"ted']


class SchemaCase(NamedTuple):
    """A prompt and the schema of its output."""

    kind: str
    prompt: str
    schema: Schema
    temperature: float


def cases(count: int = PROMPTS, seed: int = 20) -> list[SchemaCase]:
    drawn = random.Random(seed)
    schemas = []
    for number in range(count):
        kind, make = list(_KINDS.items())[number % len(_KINDS)]
        prompt = f"Answer in JSON about {kind.replace('_', ' ')}, case {number}."
        schemas.append(SchemaCase(kind, prompt, make(drawn), drawn.choice((0.0, 0.7, 1.3))))
    return schemas


def _object(properties: Schema, **more: Any) -> Schema:
    known = {"type": "object", "properties": properties, "additionalProperties": False}
    return known | {"required": sorted(properties)} | more


def _text(drawn: random.Random) -> Schema:
    return {"type": "string", "minLength": drawn.randint(0, 3), "maxLength": drawn.randint(4, 20)}


def _integer(drawn: random.Random) -> Schema:
    low = drawn.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + drawn.randint(0, 500)}


def _number(drawn: random.Random) -> Schema:
    return {"type": "number", "exclusiveMinimum": 0, "maximum": drawn.choice((1, 9.5, 1000))}


def _array(drawn: random.Random, items: Schema) -> Schema:
    least = drawn.randint(0, 2)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 2}


def _nested(drawn: random.Random) -> Schema:
    inner = _object({"name": _text(drawn), "size": _integer(drawn)})
    return _object({"a": inner, "b": _object({"c": inner})})


def _tree(drawn: random.Random) -> Schema:
    node = _object({"value": _integer(drawn), "children": _array(drawn, {"$ref": "#/$defs/leaf"})})
    return {"$defs": {"leaf": _object({"value": _text(drawn)})}} | node


def _any_of(drawn: random.Random) -> Schema:
    cat, dog = _object({"cat": _text(drawn)}), _object({"dog": _integer(drawn)})
    return _object({"pet": {"anyOf": [cat, dog, {"type": "null"}]}})


def _format(name: str) -> Callable[[random.Random], Schema]:
    return lambda drawn: _object({"value": {"type": "string", "format": name}})


def _pattern(drawn: random.Random) -> Schema:
    pattern = drawn.choice(
        ("^[A-Z]{2}-[0-9]{3,4}$", "^(north|south) [a-z]{1,5}$", "^#[0-9a-f]{6}$")
    )
    return _object({"code": {"type": "string", "pattern": pattern}})


def _optional(drawn: random.Random) -> Schema:
    return _object({"a": _integer(drawn), "b": _text(drawn)}, required=["b"])


def _mix_types(drawn: random.Random) -> Schema:
    return _object({"value": {"type": ["integer", "null", "boolean"]}, "n": _number(drawn)})


def _tuple(drawn: random.Random) -> Schema:
    pair = {"type": "array", "prefixItems": [_integer(drawn), _text(drawn)], "items": False}
    return _object({"pair": pair | {"minItems": 2}})


def _map(drawn: random.Random) -> Schema:
    # The keys are bounded as well.
    named = {f"k{number}": _integer(drawn) for number in range(drawn.randint(1, 5))}
    return _object(named)


_KINDS: dict[str, Callable[[random.Random], Schema]] = {
    "nested_objects": _nested,
    "an_enum": lambda drawn: _object({"color": {"enum": drawn.sample(_COLORS, 3)}}),
    "a_constant": lambda drawn: _object({"kind": {"const": drawn.choice(_COLORS)}}),
    "an_array_of_numbers": lambda drawn: _object({"values": _array(drawn, _number(drawn))}),
    "an_array_of_objects": lambda drawn: _array(drawn, _object({"id": _integer(drawn)})),
    "references": _tree,
    "one_of_several": _any_of,
    "bounded_integers": lambda drawn: _object({"a": _integer(drawn), "b": _integer(drawn)}),
    "bounded_numbers": lambda drawn: _object({"x": _number(drawn)}),
    "a_pattern": _pattern,
    "a_date": _format("date"),
    "a_moment": _format("date-time"),
    "an_address": _format("ipv4"),
    "a_uuid": _format("uuid"),
    "a_long_address": _format("ipv6"),
    "optional_fields": _optional,
    "mixed_types": _mix_types,
    "a_tuple": _tuple,
    "a_map": _map,
    "booleans": lambda drawn: _object({"yes": {"type": "boolean"}, "text": _text(drawn)}),
}


def run(count: int = PROMPTS) -> Outcome:
    try:
        with running_stack(smollm2_folder()) as stack:
            flaws = asyncio.run(_ask_all(stack.api_url, cases(count)))
    except ConfigurationError as error:
        return Outcome([], {"not measured": error.message})
    valid = Figure("outputs that match their schema", count - len(flaws), f"/{count}", ">=", count)
    return Outcome([valid], {"flaws": flaws})


async def _ask_all(url: str, asked: list[SchemaCase]) -> list[str]:
    room, timeout = asyncio.Semaphore(IN_FLIGHT), aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        answers = await asyncio.gather(*(_ask(http, url, case, room) for case in asked))
    return [flaw for flaw in answers if flaw]


async def _ask(
    http: aiohttp.ClientSession, url: str, case: SchemaCase, room: asyncio.Semaphore
) -> str:
    named = {"name": "answer", "strict": True, "schema": case.schema}
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": case.prompt}],
        "max_tokens": MAX_TOKENS,
        "temperature": case.temperature,
        "response_format": {"type": "json_schema", "json_schema": named},
    }
    async with room, http.post(f"{url}/v1/chat/completions", json=body) as answer:
        read = await answer.json()
    if answer.status != 200:
        return f"{case.kind}: {answer.status} {read}"
    choice = read["choices"][0]
    text = choice["message"]["content"]
    checker = Draft202012Validator(case.schema, format_checker=FormatChecker())
    try:
        wrong = next(iter(checker.iter_errors(json.loads(text))), None)
    except ValueError as error:
        return f"{case.kind}: {error}, {choice['finish_reason']}: {text[:200]}"
    return "" if wrong is None else f"{case.kind}: {wrong.message}: {text[:200]}"
