"""For those who run the API: /healthz, /readyz. What it counts is on a port of its own (api/metrics.py)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.openapi import done
from api.parts import parts_of
from api.prediction_replies import HealthReply, ReadinessReply

router = APIRouter()


@router.get("/healthz", summary="Is the process alive?", responses={200: done("It is.", HealthReply)})
async def is_alive(request: Request) -> Response:
    """200 as long as requests are answered at all."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get(
    "/readyz",
    summary="Can it serve?",
    responses={200: done("It can.", ReadinessReply), 503: done("Pub/Sub is out of reach.", ReadinessReply)},
)
async def is_ready(request: Request) -> Response:
    """200 when a message makes it through Pub/Sub and back; without Redis still 200, but `degraded`."""
    found = await parts_of(request).readiness.check()
    body = {"status": found.status, "pubsub": found.pubsub, "redis": found.redis}
    return Response(msgspec.json.encode(body), 200 if found.is_ready else 503, media_type="application/json")
