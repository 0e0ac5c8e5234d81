"""What callers used and were charged: OpenAI's routes, and a summary of the key's tenant.

A key sees its own tenant. A key with the scope `admin` sees all tenants under OpenAI's routes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.http.openapi import AUTHENTICATED, responses
from api.http.openapi_usage import OF_COSTS, OF_USAGE, SUMMARY
from api.http.request import ApiRequest, authenticate
from api.schemas.usage_replies import (
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
from api.usage.question import Question, read_question, read_range
from api.usage.rows import UsageLine, UsageQuery
from api.usage.service import UsageRead
from shared.tasks import TASKS
from shared.tasks.base import Unit

router = APIRouter(tags=["usage"])
DAY_S = 86_400
_SUMMED = UsageLine._fields[UsageLine._fields.index("requests") :]
Result = EmbeddingsUsage | ImagesUsage | Costs


@router.get(
    "/v1/usage",
    summary="Get what you used",
    openapi_extra={"parameters": SUMMARY} | AUTHENTICATED,
    responses=responses(UsageReply, 400, 401, 403, 429, 503, headers=("Age",)),
)
async def get_usage(request: Request) -> Response:
    """What your tenant used today and this month (UTC), and between `from` and `to`, by model."""
    call = authenticate(request)
    now_s = time.time()
    now = datetime.fromtimestamp(now_s, UTC)
    day = now.replace(hour=0, minute=0, second=0, microsecond=0)
    today_s, month_s = int(day.timestamp()), int(day.replace(day=1).timestamp())
    asked = read_range(request.query_params, now_s)
    # The end of the day, so that the same question is asked all day.
    month = UsageQuery(month_s, today_s + DAY_S, DAY_S, tenants=(call.tenant,), by_model=True)
    of_month = await call.dependencies.usage.read(month, call.tenant)
    of_today = (today_s - month_s) // DAY_S
    reply = UsageReply(
        tenant=call.tenant,
        as_of=of_month.read_at_s,
        today=_span(
            today_s, month.end_s, [line for line in of_month.lines if line.bucket == of_today]
        ),
        month=_span(month_s, month.end_s, of_month.lines),
        range=None if asked is None else await _range(call, *asked),
        budget_usd_per_month=call.caller.plan.budget_usd_per_month,
    )
    return _json(reply, of_month)


async def _range(call: ApiRequest, start_s: int, end_s: int) -> UsageSpan:
    query = UsageQuery(start_s, end_s, end_s - start_s, tenants=(call.tenant,), by_model=True)
    return _span(start_s, end_s, (await call.dependencies.usage.read(query, call.tenant)).lines)


def _span(start_s: int, end_s: int, lines: Iterable[UsageLine]) -> UsageSpan:
    by_model: dict[str | None, ModelUsage] = {}
    total = _nothing(None)
    for line in lines:
        for sums in (total, by_model.setdefault(line.model, _nothing(line.model))):
            for name in _SUMMED:
                setattr(sums, name, getattr(sums, name) + getattr(line, name))
    # Requests that were refused before they named a model have none.
    models = [by_model[name] for name in sorted(by_model, key=str) if name]
    return UsageSpan(start_time=start_s, end_time=end_s, total=total, models=models)


def _nothing(model: str | None) -> ModelUsage:
    return ModelUsage(model=model, **dict.fromkeys(_SUMMED, 0))


@router.get(
    "/v1/organization/usage/embeddings",
    summary="Get the usage of embeddings",
    openapi_extra={"parameters": OF_USAGE} | AUTHENTICATED,
    responses=responses(UsagePage, 400, 401, 403, 429, 503, headers=("Age",)),
)
async def get_embeddings_usage(request: Request) -> Response:
    """Tokens and requests in buckets of time, of models that are billed by tokens."""
    return await _page(request, _of_embeddings, unit="tokens")


@router.get(
    "/v1/organization/usage/images",
    summary="Get the usage of images",
    openapi_extra={"parameters": OF_USAGE} | AUTHENTICATED,
    responses=responses(UsagePage, 400, 401, 403, 429, 503, headers=("Age",)),
)
async def get_images_usage(request: Request) -> Response:
    """Images and requests in buckets of time, of models that are billed by pixel-steps."""
    return await _page(request, _of_images, unit="pixel_steps")


@router.get(
    "/v1/organization/costs",
    summary="Get what was charged",
    openapi_extra={"parameters": OF_COSTS} | AUTHENTICATED,
    responses=responses(UsagePage, 400, 401, 403, 429, 503, headers=("Age",)),
)
async def get_costs(request: Request) -> Response:
    """US dollars in buckets of time, all models together."""
    return await _page(request, _of_costs, unit=None)


async def _page(
    request: Request, shown: Callable[[UsageLine], Result], *, unit: Unit | None
) -> Response:
    call = authenticate(request)
    scopes = call.caller.scopes
    tasks = None
    if unit is not None:
        tasks = tuple(name for name, task in TASKS.items() if task.unit == unit)
    question = read_question(
        request.query_params,
        tenants=None if scopes is not None and "admin" in scopes else (call.tenant,),
        tasks=tasks,
        is_of_costs=unit is None,
    )
    usage = await call.dependencies.usage.read(question.query, call.tenant)
    reply = UsagePage(
        data=list(_buckets(question, usage, shown)),
        has_more=question.next_page is not None,
        next_page=question.next_page,
    )
    return _json(reply, usage)


def _buckets(
    question: Question, usage: UsageRead, shown: Callable[[UsageLine], Result]
) -> Iterator[UsageBucket]:
    query = question.query
    results: dict[int, list[Result]] = {}
    for line in usage.lines:
        if line.items:
            results.setdefault(line.bucket, []).append(shown(line))
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
        num_model_requests=line.requests,
        project_id=line.tenant,
        api_key_id=line.key_id,
        model=line.model,
    )


def _of_images(line: UsageLine) -> ImagesUsage:
    return ImagesUsage(
        images=line.succeeded,
        pixel_steps=line.pixel_steps,
        charged_pixel_steps=line.charged_pixel_steps,
        num_model_requests=line.requests,
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


def _json(reply: Any, usage: UsageRead) -> Response:
    headers = {"cache-control": "no-store", "age": str(max(0, int(time.time() - usage.read_at_s)))}
    return Response(msgspec.json.encode(reply), headers=headers, media_type="application/json")
