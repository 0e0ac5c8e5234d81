"""Parses the query string in a usage request from OpenAI's clients.

https://platform.openai.com/docs/api-reference/usage. Lists are sent as `group_by[]=model` or as
repeated parameters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from starlette.datastructures import QueryParams

from api.usage.rows import UsageQuery
from shared.errors import BadInput
from shared.reports.definitions import ROWS_KEPT_DAYS

WIDTHS_S = {"1m": 60, "1h": 3600, "1d": 86_400}
LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 31)}
"""Default and maximum number of buckets per page, by bucket width."""
COST_LIMITS = {"1m": (60, 1440), "1h": (24, 168), "1d": (7, 180)}
GROUPS = {"project_id": "by_tenant", "api_key_id": "by_key", "model": "by_model"}
COST_GROUPS = {"project_id": "by_tenant", "api_key_id": "by_key", "line_item": "by_model"}
UNKNOWN_FILTERS = ("user_ids", "sizes", "sources", "batch")
"""Filters in OpenAI's API that our rows do not support. If we ignored them, all usage would be
returned.
"""
KEPT_S = ROWS_KEPT_DAYS * 86_400
MAX_NAMES = 100
_PAGE = re.compile(r"page_([0-9]{1,11})")
_WHOLE = re.compile(r"[0-9]{1,11}")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class Question(NamedTuple):
    """One page of a usage query: the query, and where the next page starts."""

    query: UsageQuery
    next_page: str | None


def read_question(
    params: QueryParams,
    *,
    tenants: tuple[str, ...] | None,
    tasks: tuple[str, ...] | None = None,
    is_of_costs: bool = False,
) -> Question:
    """Parses a usage query.

    Args:
        tenants: the tenants whose rows the caller may see. None means all tenants.
        tasks: tasks whose rows are requested. None means all tasks.
        is_of_costs: True if costs are requested, which support different groupings from usage.

    Raises:
        BadInput: a value is missing or invalid. `field` is its name.
    """
    _check_filters(params, is_of_costs)
    start_s, end_s, width_s = _read_span(params)
    limit = _limit(
        params, *(COST_LIMITS if is_of_costs else LIMITS)[params.get("bucket_width", "1d")]
    )
    if page := params.get("page"):
        match = _PAGE.fullmatch(page)
        if match is None or not start_s <= int(match[1]) < end_s or int(match[1]) % width_s:
            raise BadInput("page: not a page token for this query", field="page")
        start_s = int(match[1])
    page_ends_s = start_s + limit * width_s
    groups = _groups(params, COST_GROUPS if is_of_costs else GROUPS)
    query = UsageQuery(
        start_s=start_s,
        end_s=min(end_s, page_ends_s),
        width_s=width_s,
        tenants=_within(tenants, _names(params, "project_ids")),
        models=_names(params, "line_items" if is_of_costs else "models"),
        keys=_names(params, "api_key_ids"),
        tasks=tasks,
        by_tenant="by_tenant" in groups,
        by_model="by_model" in groups,
        by_key="by_key" in groups,
    )
    return Question(query, f"page_{page_ends_s}" if page_ends_s < end_s else None)


def _read_span(params: QueryParams) -> tuple[int, int, int]:
    """Returns the first bucket's start, the last bucket's end, and the bucket width, in seconds."""
    now, width = int(time.time()), params.get("bucket_width", "1d")
    if width not in WIDTHS_S:
        raise BadInput(
            f"bucket_width: must be 1m, 1h or 1d, got {width[:40]!r}", field="bucket_width"
        )
    width_s = WIDTHS_S[width]
    start_s = _moment(params, "start_time", now)
    if start_s is None:
        raise BadInput("start_time: is required, in Unix seconds", field="start_time")
    end_s = _moment(params, "end_time", now) or now + 1
    if end_s <= start_s:
        raise BadInput("end_time: must be after start_time", field="end_time")
    return start_s - start_s % width_s, end_s, width_s


def read_range(params: QueryParams, now_s: float) -> tuple[int, int] | None:
    """Parses `from` and `to`, which are Unix seconds or UTC dates. None if both are missing.

    Raises:
        BadInput: a value is invalid. `field` is its name.
    """
    if not (params.get("from") or params.get("to")):
        return None
    now = int(now_s)
    start_s = _moment(params, "from", now)
    if start_s is None:
        raise BadInput("from: is required with `to`", field="from")
    end_s = _moment(params, "to", now) or now + 1
    if end_s <= start_s:
        raise BadInput("to: must be after `from`", field="to")
    return start_s, end_s


def _moment(params: QueryParams, name: str, now: int) -> int | None:
    text = params.get(name)
    if text is None:
        return None
    at_s: int | None = None
    if _WHOLE.fullmatch(text):
        at_s = int(text)
    elif _DAY.fullmatch(text):
        try:
            at_s = int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp())
        except ValueError:
            at_s = None
    if at_s is None:
        raise BadInput(
            f"{name}: must be Unix seconds or a date such as 2026-10-01, got {text[:40]!r}",
            field=name,
        )
    if not now - KEPT_S <= at_s <= now + KEPT_S:
        raise BadInput(
            f"{name}: must be within the last {KEPT_S // 86400} days because older rows are "
            "deleted",
            field=name,
        )
    return at_s


def _limit(params: QueryParams, usual: int, maximum: int) -> int:
    text = params.get("limit")
    if text is None:
        return usual
    if not (_WHOLE.fullmatch(text) and 1 <= int(text) <= maximum):
        raise BadInput(
            f"limit: must be a number from 1 to {maximum}, got {text[:40]!r}", field="limit"
        )
    return int(text)


def _groups(params: QueryParams, known: dict[str, str]) -> set[str]:
    groups = set()
    for name in _list(params, "group_by"):
        if name not in known:
            raise BadInput(
                f"group_by: must be one of {', '.join(known)}, got {name[:40]!r}", field="group_by"
            )
        groups.add(known[name])
    return groups


def _check_filters(params: QueryParams, is_of_costs: bool) -> None:
    known, other = ("line_items", "models") if is_of_costs else ("models", "line_items")
    for name in (*UNKNOWN_FILTERS, other):
        if any(_list(params, name)):
            raise BadInput(
                f"{name}: not supported as a filter; use project_ids, api_key_ids or {known}",
                field=name,
            )


def _names(params: QueryParams, field: str) -> tuple[str, ...] | None:
    names = _list(params, field)
    if len(names) > MAX_NAMES or any(len(name) > 256 for name in names):
        raise BadInput(
            f"{field}: must have at most {MAX_NAMES} names of up to 256 characters each",
            field=field,
        )
    return tuple(sorted(set(names))) or None


def _list(params: QueryParams, field: str) -> Sequence[str]:
    return [*params.getlist(field), *params.getlist(f"{field}[]")]


def _within(
    allowed: tuple[str, ...] | None, chosen: tuple[str, ...] | None
) -> tuple[str, ...] | None:
    """Returns the chosen names that are allowed. None means all."""
    if allowed is None or chosen is None:
        return chosen if allowed is None else allowed
    return tuple(name for name in chosen if name in allowed)
