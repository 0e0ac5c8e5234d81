"""Encodes JSON response bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response


def encode_json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Encodes `body`, a struct or plain values, with msgspec."""
    return Response(msgspec.json.encode(body), status, headers, "application/json")
