"""For those who run the API: /healthz, /readyz. What it counts is on a port of its own (api/metrics.py)."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.parts import parts_of

router = APIRouter()


@router.get("/healthz", summary="Is the process alive?")
async def is_alive(request: Request) -> Response:
    """200 as long as requests are answered at all."""
    return Response(b'{"status":"ok"}', media_type="application/json")


@router.get("/readyz", summary="Can it serve?", responses={503: {"description": "Pub/Sub is out of reach."}})
async def is_ready(request: Request) -> Response:
    """200 when a message makes it through Pub/Sub and back; without Redis still 200, but `degraded`."""
    found = await parts_of(request).readiness.check()
    body = {"status": found.status, "pubsub": found.pubsub, "redis": found.redis}
    return Response(msgspec.json.encode(body), 200 if found.is_ready else 503, media_type="application/json")
