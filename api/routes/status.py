"""GET /v1/status: how busy the models are, for one tenant and from one instance of the API.

The reply of /v1/status, for the OpenAPI document and on the wire.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.fair_room import Demand
from api.http.openapi import AUTHENTICATED, responses
from api.http.request import ApiRequest, authenticate

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ModelStatus(msgspec.Struct, kw_only=True):
    """How busy a model is, as one instance of the API sees it."""

    model: str
    is_busy: bool
    """True if items of anyone wait for a worker."""
    your_items_in_flight: Count
    """Items of your tenant that wait for a worker."""
    expected_wait_s: Seconds
    """Estimate for one more item of yours, in steps of 1, 2 and 5."""
    items_per_s: Seconds
    """What the workers compute while there is a queue, as last measured."""
    object: Literal["model.status"] = "model.status"


class StatusReply(msgspec.Struct):
    """How busy the models are that the key may use."""

    data: list[ModelStatus]
    object: Literal["list"] = "list"


router = APIRouter()

STEPS_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""What a wait is rounded up to. Longer ones are shown as the last one."""


@router.get(
    "/v1/status",
    summary="Get how busy the models are",
    openapi_extra=AUTHENTICATED,
    responses=responses(StatusReply, 401),
)
async def get_status(request: Request) -> Response:
    """How busy each model is, and how long one more item of yours would wait.

    The numbers are those of the instance that answers. What other tenants send is not shown.
    """
    call = authenticate(request)
    reply = StatusReply([_status(call, model.name) for model in call.listed_models()])
    return Response(
        msgspec.json.encode(reply),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )


def _status(call: ApiRequest, model: str) -> ModelStatus:
    demand = Demand(model, 1, call.tenant, call.caller.plan.weight)
    outlook = call.dependencies.admission.outlook(demand)
    return ModelStatus(
        model=model,
        is_busy=outlook.is_busy,
        your_items_in_flight=outlook.held,
        expected_wait_s=_coarse(outlook.wait_s),
        items_per_s=float(f"{outlook.items_per_s:.2g}"),
    )


def _coarse(wait_s: float) -> float:
    """Returns the next of STEPS_S. The exact wait would tell how many others wait."""
    return next((step for step in STEPS_S if wait_s <= step), STEPS_S[-1])
