"""Request bodies shared by several endpoints, and limits on JSON.

Requests are pydantic models, which validate and document them. Responses are msgspec structs, which
encode to JSON without intermediate Python objects. The fields follow OpenAI's API
(https://platform.openai.com/docs/api-reference). Extensions are marked.

JSON from callers is checked for the number and depth of values before it is parsed. Parsing blocks
the event loop, and pydantic reports every single error: 15 MB of invalid numbers took 5 s, and 18
MB of unknown fields took 1.7 s.
"""

from __future__ import annotations

import codecs
import re
from typing import Annotated, Any

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.validators import check_off, check_on, check_scale, check_short, resolve_scheduler
from shared.errors import BadInput, InputTooLarge
from shared.models.image_flow import SCALES
from shared.models.schedulers import SCHEDULER_ALIASES, SCHEDULER_NAMES

MAX_URL_CHARS = 2048

MAX_SEED = 2**53 - 11
"""JSON numbers over 2^53 are not exact in every parser, and a request for ten images uses
consecutive seeds.
"""
MAX_PROMPT_CHARS = 32_000
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
"""OpenAI's limits."""
EndUser = Annotated[str, Field(max_length=128)]
"""An end user of the caller's application. The limit matches OpenAI's for `safety_identifier`."""
CacheKey = Annotated[str, Field(max_length=64)]
"""OpenAI's limit for `prompt_cache_key`."""
Option = Annotated[str, Field(max_length=64)]
"""An option whose value is one of a few keywords. Unknown words are accepted."""
ItemId = Annotated[str, Field(max_length=256)]
"""The ID of a response, a response part, or a call. OpenAI's IDs are shorter."""
Options = Annotated[dict[str, Any], AfterValidator(check_short)]
"""Options without effect."""
Off = Annotated[
    bool, Field(strict=True, json_schema_extra={"enum": [False]}), AfterValidator(check_off)
]
"""A switch that can only be set to off. A Literal would also accept 0."""
On = Annotated[
    bool, Field(strict=True, json_schema_extra={"enum": [True]}), AfterValidator(check_on)
]
"""A switch that can only be set to on."""
Token = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]

SCHEDULER_CHOICE = (
    f"One of {', '.join(SCHEDULER_NAMES)}, or its name in Replicate's API or diffusers."
)
SchedulerName = Annotated[
    str,
    AfterValidator(resolve_scheduler),
    Field(json_schema_extra={"enum": [*SCHEDULER_NAMES, *SCHEDULER_ALIASES]}),
]
Upscale = Annotated[
    int, AfterValidator(check_scale), Field(json_schema_extra={"enum": list(SCALES)})
]
"""Factor by which an image's width and height grow. Not a Literal, because forms send the value as
text.
"""
ClipSkip = Annotated[int, Field(ge=0, le=32)]
"""Number of final CLIP layers to skip when reading the prompt. A model may have fewer layers."""
GuidanceRescale = Annotated[float, Field(ge=0, le=1)]
"""Fraction of the contrast added by guidance that should be removed."""

MAX_VALUES = 300_000
"""Maximum number of numbers and strings in one body. OpenAI's API accepts that many token IDs."""
MAX_STRINGS = 20_000
"""Maximum number of strings and field names in one body, because each may be an unknown field."""
SURELY_FEW = 1000
"""Bodies with at most this many commas need no further check."""
MAX_NESTED = 100
"""Maximum nesting depth. Pydantic's limit is 200."""
# Possessive quantifiers and an optional end make the expression read each byte only once.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)


class Usage(msgspec.Struct):
    """Tokens in all inputs, including special tokens and inputs with cached results."""

    prompt_tokens: int
    total_tokens: int


class Body(BaseModel):
    """Base class of request bodies. Rejects unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def shape_of(value: Any) -> str:
    """Returns an input's shape, based on its first element. Errors mention only this shape."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(value, list):
        return (
            "token_lists:"
            if isinstance(first, list)
            else "tokens:"
            if isinstance(first, int)
            else "texts:"
        )
    return "text:"


def check_amount(body: bytes) -> None:
    """Rejects a body with too many values to parse quickly.

    For most bodies, only the commas are counted.

    Raises:
        InputTooLarge: the body has more values or strings than any request needs.
    """
    if body.count(b",") <= SURELY_FEW:
        return
    strings = commas = end = 0
    for match in _STRING.finditer(body):
        strings += 1
        commas += body.count(b",", end, match.start())
        end = match.end()
        if strings > MAX_STRINGS or commas >= MAX_VALUES:
            break
    if strings > MAX_STRINGS:
        raise InputTooLarge(
            f"the body exceeds the maximum of {MAX_STRINGS} strings and field names"
        )
    if commas + body.count(b",", end) >= MAX_VALUES:
        raise InputTooLarge(f"the body exceeds the maximum of {MAX_VALUES} values")


def strip_mark(body: bytes) -> bytes:
    """Removes a byte order mark, which JSON parsers may ignore (RFC 8259, section 8.1)."""
    return body.removeprefix(codecs.BOM_UTF8)


def object_in(text: str | bytes, field: str) -> dict[str, Any]:
    """Parses a JSON object that can be encoded as JSON again.

    Raises:
        BadInput: the text is not a JSON object, or nests deeper than MAX_NESTED. The message begins
            with `field`.
    """
    try:
        value = msgspec.json.decode(text)
        _check_depth(value)
    # A lone surrogate is neither valid text nor valid JSON (RFC 8259, section 8.2).
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BadInput(f"{field}: not valid JSON: {error}", field=field) from error
    except RecursionError as error:
        raise BadInput(
            f"{field}: must not be nested more than {MAX_NESTED} levels deep", field=field
        ) from error
    if not isinstance(value, dict):
        raise BadInput(f"{field}: must be a JSON object", field=field)
    return value


def _check_depth(value: object) -> None:
    level = [value]
    for _ in range(MAX_NESTED):
        level = [
            inner
            for container in level
            if isinstance(container, dict | list)
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
        if not level:
            return
    raise RecursionError
