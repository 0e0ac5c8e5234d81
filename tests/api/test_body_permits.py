"""Chunks of large bodies: one tenant's uploads do not take up every event loop iteration."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from api.fair_room import FairRoom
from api.http.middleware import (
    SMALL_BODY_BYTES,
    BodyBudget,
    BodyPermits,
    ContextMiddleware,
    context_of,
)
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio
UPLOADS, PIECES = 16, 12
PIECE = bytes(SMALL_BODY_BYTES)


class Uploads:
    """An app behind the middleware that records whose chunk it handles."""

    def __init__(self) -> None:
        budget = BodyBudget(2**30, 2**30, FairRoom(1000))
        self._served = ContextMiddleware(self._app, budget)
        self.handled: list[str] = []

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        context = context_of(request)
        context.facts.tenant, context.streamed_max_bytes = scope["tenant"], 2**30
        async for piece in request.stream():
            if piece:
                self.handled.append(scope["tenant"])
        await Response()(scope, receive, send)

    async def upload(self, tenant: str) -> None:
        """Sends a body whose chunks are all available at once."""
        left = PIECES

        async def receive() -> Message:
            nonlocal left
            await asyncio.sleep(0)
            left -= 1
            return {"type": "http.request", "body": PIECE, "more_body": left > 0}

        async def send(message: Message) -> None:
            pass

        async def meet(headers: object) -> None:
            pass

        access = SimpleNamespace(meet=meet)
        state = SimpleNamespace(dependencies=SimpleNamespace(access=access))
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/v1/files",
            "scheme": "http",
            "headers": [],
            "app": SimpleNamespace(state=state),
            "tenant": tenant,
        }
        await self._served(scope, receive, send)


async def test_quiet_tenant_waits_for_one_piece_of_a_tenant_with_many_uploads() -> None:
    uploads = Uploads()
    async with asyncio.timeout(WAIT_LIMIT_S), asyncio.TaskGroup() as tasks:
        for _ in range(UPLOADS):
            tasks.create_task(uploads.upload("busy"))
        tasks.create_task(uploads.upload("quiet"))
    assert uploads.handled.count("busy") == UPLOADS * PIECES, "none is lost"
    at = [place for place, tenant in enumerate(uploads.handled) if tenant == "quiet"]
    assert len(at) == PIECES
    # Each first piece is small, and all the first pieces arrive together.
    between = [after - before - 1 for before, after in pairwise(at[1:])]
    assert max(between) <= 2, f"pieces of the other between two of its own: {between}"


async def test_pieces_of_a_tenant_keep_their_order_and_who_leaves_is_passed_over() -> None:
    turns, came = BodyPermits(), list[int]()

    async def one(number: int) -> None:
        await turns.take("a")
        came.append(number)

    tasks = [asyncio.create_task(one(number)) for number in range(6)]
    await asyncio.sleep(0)
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert came == [0, 1, 3, 4, 5]
    await turns.take("a")  # none of them leaves anything behind
