"""GET /v1/objects/…: serves the target of a signed link. The signature replaces the API key."""

from __future__ import annotations

import time

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.http.openapi import binary, errors
from api.http.request import dependencies_of, while_connected
from shared.predictions import MEDIA_TYPES
from shared.stores.signed_urls import VALID_S

router = APIRouter()
ANY_BYTES = "application/octet-stream"
MAX_S = 30.0
"""The time limit for encoding an image in another format, since links have no deadline."""


@router.get(
    "/v1/objects/{key:path}",
    summary="Download a result by its signed link",
    response_class=Response,
    responses={
        200: binary(
            "The bytes, of the type that the link names.",
            *sorted(set(MEDIA_TYPES.values())),
            ANY_BYTES,
            "*/*",
        ),
        **errors(400, 403, 404, 429, 499, 503, 504),
    },
)
async def get_object(
    request: Request, key: str, type: str, expires: int, signature: str
) -> Response:
    """The bytes of a result, while the link is valid."""
    dependencies = dependencies_of(request)
    dependencies.url_signer.check(key, type, expires, signature)
    fetching = dependencies.result_fetcher.fetch(key, type, time.time() + MAX_S)
    data = await while_connected(request.receive, fetching)
    headers = {
        "cache-control": f"private, max-age={VALID_S}, immutable",
        "x-content-type-options": "nosniff",
        # A class of one's own may give a page, which is not to act as one of ours.
        "content-security-policy": "sandbox; default-src 'none'",
    }
    return Response(data, headers=headers, media_type=type)
