"""Health checks: /livez and /readyz. Metrics have a port of their own (api/metrics.py).

On Cloud Run, Google's front end answers /healthz itself, with 404 (
"Reserved URL paths", https://docs.cloud.google.com/run/docs/known-issues).
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.http.openapi import success
from api.http.request import dependencies_of
from api.replicate.replies import HealthReply, ReadinessReply

router = APIRouter()


@router.get(
    "/livez", summary="Liveness", responses={200: success("The process is alive.", HealthReply)}
)
async def is_alive(request: Request) -> Response:
    """200 while the process answers requests."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get(
    "/healthz", summary="Liveness", responses={200: success("The process is alive.", HealthReply)}
)
async def is_alive_as_before(request: Request) -> Response:
    """The same as /livez, by its earlier name. It can't be reached on Cloud Run."""
    return await is_alive(request)


@router.get(
    "/health", summary="Liveness", responses={200: success("The process is alive.", HealthReply)}
)
async def is_alive_too(request: Request) -> Response:
    """The same as /livez, by the name that other servers have for it."""
    return await is_alive(request)


@router.get(
    "/readyz",
    summary="Readiness",
    responses={
        200: success("The instance can serve requests.", ReadinessReply),
        503: success("Pub/Sub or the API keys are out of reach.", ReadinessReply),
    },
)
async def is_ready(request: Request) -> Response:
    """200 when a message passes through Pub/Sub and back, and API keys can be checked.

    Without Redis it is still 200, with status `degraded`.
    """
    readiness = await dependencies_of(request).readiness.check()
    body = {
        "status": readiness.status,
        "pubsub": readiness.pubsub,
        "redis": readiness.redis,
        "keys": readiness.keys,
    }
    return Response(
        msgspec.json.encode(body), 200 if readiness.is_ready else 503, media_type="application/json"
    )
