"""Usage and charges: OpenAI's routes, with pages of buckets, and a summary for the key's tenant.

A key sees its own tenant's usage. Through OpenAI's routes, a key with the `admin` scope sees every
tenant's. https://platform.openai.com/docs/api-reference/usage
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from starlette.responses import Response

from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.openapi import Described, array_parameter, query_parameter
from api.http.router import Router
from api.openai.usage_schemas import (
    Costs,
    EmbeddingsUsage,
    ImagesUsage,
    ModelUsage,
    Money,
    UsageBucket,
    UsagePage,
    UsageReply,
    UsageSpan,
)
from api.usage.question import (
    COST_GROUPS,
    COST_LIMITS,
    GROUPS,
    LIMITS,
    WIDTHS_S,
    Question,
    read_question,
    read_range,
)
from api.usage.rows import UsageLine, UsageQuery
from api.usage.service import UsageRead, UsageService
from shared.models.tasks import TASKS
from shared.models.tasks.base import Unit

DAY_S = 86_400
_MOMENT: Described = {"type": "integer", "minimum": 0}
_DAY_OR_SECONDS: Described = {"type": "string", "examples": ["2026-11-01", "1793491200"]}
_SUMMARY = [
    query_parameter("from", "Unix seconds or a UTC date, inclusive.", _DAY_OR_SECONDS),
    query_parameter("to", "Unix seconds or a UTC date, exclusive. Default: now.", _DAY_OR_SECONDS),
]
"""Parameters are parsed by api/usage/question.py, so that we control the wording of errors."""
_SUMMED = UsageLine._fields[UsageLine._fields.index("requests") :]
Result = EmbeddingsUsage | ImagesUsage | Costs
router = Router(scope="usage", tags=["usage"])


def _list_parameters(groups: dict[str, str], max_limit: int, models: str) -> list[Described]:
    return [
        query_parameter("start_time", "Unix seconds, inclusive.", _MOMENT, required=True),
        query_parameter("end_time", "Unix seconds, exclusive. Default: now.", _MOMENT),
        query_parameter("bucket_width", "Bucket width.", {"enum": list(WIDTHS_S), "default": "1d"}),
        query_parameter(
            "group_by",
            "Also accepted as `group_by[]`, which OpenAI's clients send.",
            {"type": "array", "items": {"enum": list(groups)}},
        ),
        query_parameter(
            "limit",
            "Buckets per page. The default and the maximum depend on the width.",
            {"type": "integer", "minimum": 1, "maximum": max_limit},
        ),
        query_parameter("page", "`next_page` of the previous answer.", {"type": "string"}),
        array_parameter("project_ids", "Only these tenants."),
        array_parameter("api_key_ids", "Only these keys."),
        array_parameter(models, "Only these models."),
    ]


_USAGE = _list_parameters(GROUPS, max(most for _, most in LIMITS.values()), "models")
_COSTS = _list_parameters(COST_GROUPS, max(most for _, most in COST_LIMITS.values()), "line_items")


@router.get(
    "/v1/usage",
    summary="Get what you used",
    query=_SUMMARY,
    reply=UsageReply,
    headers=("Age",),
    errors=(400, 429),
)
async def get_usage(call: Call, usage: UsageService) -> Response:
    """Returns your usage today, this month (UTC), and between `from` and `to`, by model."""
    now_s = time.time()
    now = datetime.fromtimestamp(now_s, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    today_s, month_s = int(day.timestamp()), int(day.replace(day=1).timestamp())
    time_range = read_range(call.http.query_params, now_s)
    # Uses the end of the day, so that the query stays the same all day.
    month = UsageQuery(month_s, today_s + DAY_S, DAY_S, tenants=(call.tenant,), by_model=True)
    of_month = await usage.read(month, call.tenant)
    of_today = (today_s - month_s) // DAY_S
    reply = UsageReply(
        tenant=call.tenant,
        as_of=of_month.read_at_s,
        today=_span(
            today_s, month.end_s, [line for line in of_month.lines if line.bucket == of_today]
        ),
        month=_span(month_s, month.end_s, of_month.lines),
        range=None if time_range is None else await _range(call, *time_range, usage),
        budget_usd_per_month=call.caller.plan.budget_usd_per_month,
    )
    return _encode_with_age(reply, of_month)


async def _range(call: Call, start_s: int, end_s: int, usage: UsageService) -> UsageSpan:
    query = UsageQuery(start_s, end_s, end_s - start_s, tenants=(call.tenant,), by_model=True)
    return _span(start_s, end_s, (await usage.read(query, call.tenant)).lines)


def _span(start_s: int, end_s: int, lines: Iterable[UsageLine]) -> UsageSpan:
    by_model: dict[str | None, ModelUsage] = {}
    total = _nothing(None)
    for line in lines:
        for sums in (total, by_model.setdefault(line.model, _nothing(line.model))):
            for name in _SUMMED:
                setattr(sums, name, getattr(sums, name) + getattr(line, name))
    # Requests rejected before they named a model have no model.
    models = [by_model[name] for name in sorted(by_model, key=str) if name]
    return UsageSpan(start_time=start_s, end_time=end_s, total=total, models=models)


def _nothing(model: str | None) -> ModelUsage:
    return ModelUsage(model=model, **dict.fromkeys(_SUMMED, 0))


@router.get(
    "/v1/organization/usage/embeddings",
    summary="Get the usage of embeddings",
    query=_USAGE,
    reply=UsagePage,
    headers=("Age",),
    errors=(400, 429),
)
async def get_embeddings_usage(call: Call, usage: UsageService) -> Response:
    """Returns tokens and requests per time bucket, for models billed by the token."""
    return await _page(call, usage, _of_embeddings, unit="tokens")


@router.get(
    "/v1/organization/usage/images",
    summary="Get the usage of images",
    query=_USAGE,
    reply=UsagePage,
    headers=("Age",),
    errors=(400, 429),
)
async def get_images_usage(call: Call, usage: UsageService) -> Response:
    """Returns images and requests per time bucket, for models billed by the pixel-step."""
    return await _page(call, usage, _of_images, unit="pixel_steps")


@router.get(
    "/v1/organization/costs",
    summary="Get what was charged",
    query=_COSTS,
    reply=UsagePage,
    headers=("Age",),
    errors=(400, 429),
)
async def get_costs(call: Call, usage: UsageService) -> Response:
    """Returns US dollars per time bucket, across all models."""
    return await _page(call, usage, _of_costs, unit=None)


async def _page(
    call: Call, usage: UsageService, to_result: Callable[[UsageLine], Result], *, unit: Unit | None
) -> Response:
    scopes = call.caller.scopes
    tasks = None
    if unit is not None:
        tasks = tuple(name for name, task in TASKS.items() if task.unit == unit)
    question = read_question(
        call.http.query_params,
        tenants=None if scopes is not None and "admin" in scopes else (call.tenant,),
        tasks=tasks,
        is_of_costs=unit is None,
    )
    read = await usage.read(question.query, call.tenant)
    reply = UsagePage(
        data=list(_buckets(question, read, to_result)),
        has_more=question.next_page is not None,
        next_page=question.next_page,
    )
    return _encode_with_age(reply, read)


def _buckets(
    question: Question, usage: UsageRead, to_result: Callable[[UsageLine], Result]
) -> Iterator[UsageBucket]:
    query = question.query
    results: dict[int, list[Result]] = {}
    for line in usage.lines:
        if line.items:
            results.setdefault(line.bucket, []).append(to_result(line))
    for number, start_s in enumerate(range(query.start_s, query.end_s, query.width_s)):
        yield UsageBucket(
            start_time=start_s,
            end_time=min(start_s + query.width_s, query.end_s),
            results=results.get(number, []),
        )


def _of_embeddings(line: UsageLine) -> EmbeddingsUsage:
    return EmbeddingsUsage(
        input_tokens=line.tokens,
        charged_tokens=line.charged_tokens,
        num_model_requests=line.model_requests,
        project_id=line.tenant,
        api_key_id=line.key_id,
        model=line.model,
    )


def _of_images(line: UsageLine) -> ImagesUsage:
    return ImagesUsage(
        images=line.succeeded,
        pixel_steps=line.pixel_steps,
        charged_pixel_steps=line.charged_pixel_steps,
        num_model_requests=line.model_requests,
        project_id=line.tenant,
        api_key_id=line.key_id,
        model=line.model,
    )


def _of_costs(line: UsageLine) -> Costs:
    return Costs(
        amount=Money(value=line.cost_usd),
        line_item=line.model,
        project_id=line.tenant,
        api_key_id=line.key_id,
    )


def _encode_with_age(reply: Any, usage: UsageRead) -> Response:
    headers = {"cache-control": "no-store", "age": str(max(0, int(time.time() - usage.read_at_s)))}
    return encode_json(reply, headers=headers)
