"""GET /livez, /readyz and /healthz, and GET /v1/status, which reports how busy the models are.

On Cloud Run, Google's front end returns its own 404 for /healthz ("Reserved URL paths",
https://docs.cloud.google.com/run/docs/known-issues).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from starlette.responses import Response

from api.dispatch.admission import Admission
from api.dispatch.readiness import Readiness
from api.fair_room import Demand
from api.http.call import Call
from api.http.openapi import success
from api.http.router import Router
from api.replicate.replies import HealthReply, ReadinessReply
from shared.models.catalog import Catalog, Model

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]

STEPS_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Values that an expected wait is rounded up to. Longer waits are shown as the last value."""

router = Router(tags=["health"])


@router.get("/livez", summary="Liveness", reply=HealthReply, reply_text="The process is running.")
async def is_alive() -> Response:
    """Returns 200 as long as the process is serving requests."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/healthz", summary="Liveness", reply=HealthReply, reply_text="The process is running.")
async def is_alive_as_before() -> Response:
    """Same as /livez, under its former name. Not reachable on Cloud Run."""
    return await is_alive()


@router.get("/health", summary="Liveness", reply=HealthReply, reply_text="The process is running.")
async def is_alive_too() -> Response:
    """Same as /livez, under the name other servers use."""
    return await is_alive()


@router.get(
    "/readyz",
    summary="Readiness",
    answers={
        200: success("The instance can serve requests.", ReadinessReply),
        503: success("Pub/Sub or the API keys are unreachable.", ReadinessReply),
    },
)
async def is_ready(readiness: Readiness) -> Response:
    """Returns 200 if a message can make a round trip through Pub/Sub and API keys can be checked.

    If Redis is unavailable or might evict records, the response is still 200, with status
    `degraded`.
    """
    state = await readiness.check()
    body = {
        "status": state.status,
        "pubsub": state.pubsub,
        "redis": state.redis,
        "keys": state.keys,
    }
    return Response(
        msgspec.json.encode(body), 200 if state.is_ready else 503, media_type="application/json"
    )


class ModelStatus(msgspec.Struct, kw_only=True):
    """A model's load, as seen by one API instance."""

    model: str
    is_busy: bool
    """True if any tenant's items are waiting for a worker."""
    your_items_in_flight: Count
    """Your tenant's items that are waiting for a worker."""
    expected_wait_s: Seconds | None
    """Estimated wait for one more item of yours, in steps of 1, 2, and 5.

    Null if items are waiting and the throughput is unknown.
    """
    items_per_s: Seconds | None
    """The workers' most recently measured throughput while items were queued.

    Null if it was not measured in the last few minutes.
    """
    object: Literal["model.status"] = "model.status"


class StatusReply(msgspec.Struct):
    """The load on the models the key may use."""

    data: list[ModelStatus]
    object: Literal["list"] = "list"


@router.get("/v1/status", summary="Get how busy the models are", scope="any", reply=StatusReply)
async def get_status(call: Call, catalog: Catalog, admission: Admission) -> Response:
    """Returns the load on each model, and the wait for one more item of yours.

    The numbers come from the instance that serves the request. Other tenants' load is not shown.
    """
    models = call.visible_models(catalog)
    reply = StatusReply([_status(call, model, admission) for model in models])
    return Response(
        msgspec.json.encode(reply),
        headers={"cache-control": "no-store"},
        media_type="application/json",
    )


def _status(call: Call, model: Model, admission: Admission) -> ModelStatus:
    demand = Demand(model.deployed_name, 1, call.tenant, call.caller.plan.weight)
    estimate = admission.estimate_wait(demand)
    return ModelStatus(
        model=model.name,
        is_busy=estimate.is_busy,
        your_items_in_flight=estimate.held,
        expected_wait_s=None if estimate.wait_s is None else _coarse(estimate.wait_s),
        items_per_s=_two_digits(estimate.items_per_s),
    )


def _two_digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.2g}")


def _coarse(wait_s: float) -> float:
    """Returns the next value in STEPS_S.

    The exact wait would reveal how many items other tenants have waiting.
    """
    return next((step for step in STEPS_S if wait_s <= step), STEPS_S[-1])
