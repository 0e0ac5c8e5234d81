"""The query parameters of questions about usage, for the OpenAPI document.

api/usage/question.py reads them, so that errors have our wording.
"""

from __future__ import annotations

from typing import Any

from api.usage.question import COST_GROUPS, COST_LIMITS, GROUPS, LIMITS, WIDTHS_S

Described = dict[str, Any]
_MOMENT: Described = {"type": "integer", "minimum": 0}


def _parameter(
    name: str, description: str, schema: Described, *, required: bool = False
) -> Described:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def _names(name: str, description: str) -> Described:
    return _parameter(
        name, description, {"type": "array", "items": {"type": "string"}, "maxItems": 100}
    )


def _of_pages(groups: dict[str, str], most: int, models: str) -> list[Described]:
    return [
        _parameter("start_time", "Unix seconds, inclusive.", _MOMENT, required=True),
        _parameter("end_time", "Unix seconds, exclusive. Default: now.", _MOMENT),
        _parameter("bucket_width", "Of each bucket.", {"enum": list(WIDTHS_S), "default": "1d"}),
        _parameter(
            "group_by",
            "Also as `group_by[]`, which OpenAI's clients send.",
            {"type": "array", "items": {"enum": list(groups)}},
        ),
        _parameter(
            "limit",
            "Buckets on a page. The default and the most depend on the width.",
            {"type": "integer", "minimum": 1, "maximum": most},
        ),
        _parameter("page", "`next_page` of the last answer.", {"type": "string"}),
        _names("project_ids", "Only these tenants."),
        _names("api_key_ids", "Only these keys."),
        _names(models, "Only these models."),
    ]


OF_USAGE = _of_pages(GROUPS, max(most for _, most in LIMITS.values()), "models")
OF_COSTS = _of_pages(COST_GROUPS, max(most for _, most in COST_LIMITS.values()), "line_items")
_DAY_OR_SECONDS: Described = {"type": "string", "examples": ["2026-11-01", "1793491200"]}
SUMMARY = [
    _parameter("from", "Unix seconds, or a day of UTC, inclusive.", _DAY_OR_SECONDS),
    _parameter("to", "Unix seconds, or a day of UTC, exclusive. Default: now.", _DAY_OR_SECONDS),
]
_MOMENT_TEXT: Described = {"type": "string", "examples": ["2026-11-01", "2026-11-01T12:00:00Z"]}
OF_REPORTS = [
    _parameter("from", "A day of the time zone, or a moment.", _MOMENT_TEXT),
    _parameter("to", "The first day or moment that is too late. Default: now.", _MOMENT_TEXT),
    _parameter("tz", "The time zone of days.", {"type": "string", "default": "UTC"}),
    _names("tenant", "Only these tenants. For keys with the scope `admin`."),
    _names("model", "Only these models."),
]
