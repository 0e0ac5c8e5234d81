"""Functions that validate request fields, used by the fields' types."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from pydantic import BeforeValidator, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from shared.models.image_flow import SCALES
from shared.models.schedulers import SCHEDULER_ALIASES, SCHEDULER_NAMES
from shared.tenants.api_key import holds_key
from shared.tenants.rules import NOT_AN_ID

OPTIONS_MAX_BYTES = 1024


def null_is(default: Any) -> BeforeValidator:
    """Returns a validator that replaces null with `default`.

    OpenAI's clients send null for unset fields.
    """
    return _NullIs(lambda value: default if value is None else value)


class _NullIs(BeforeValidator):
    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Returns a schema that also allows null."""
        return {"anyOf": [handler(schema), {"type": "null"}]}


def check_off(value: bool) -> bool:
    if value:
        raise ValueError("must be false; true is not supported")
    return value


def check_on(value: bool) -> bool:
    if not value:
        raise ValueError("must be true; false is not supported")
    return value


def check_short(options: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(options)) > OPTIONS_MAX_BYTES:
        raise ValueError(f"must be at most {OPTIONS_MAX_BYTES} bytes as JSON")
    return options


def check_scale(value: int) -> int:
    if value not in SCALES:
        raise ValueError(f"Input should be {' or '.join(map(str, SCALES))}")
    return value


def resolve_scheduler(name: str) -> str:
    """Returns our name for a scheduler, given that name or its Replicate or diffusers name."""
    known = SCHEDULER_ALIASES.get(name, name)
    if known not in SCHEDULER_NAMES:
        raise ValueError(
            f"{name!r} is not a known scheduler; use one of {', '.join(SCHEDULER_NAMES)}"
        )
    return known


def read_time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"must be a time in ISO 8601, such as 2026-10-01T12:00Z, got {text[:40]!r}"
        ) from None


def refuse_key(text: str) -> str:
    if holds_key(text):
        raise ValueError(NOT_AN_ID)
    return text
