"""A webhook receiver as its owner might write it: a real HTTP server that keeps every request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from aiohttp import web

from tests.limits import WAIT_LIMIT_S


@dataclass
class Delivery:
    """One POST."""

    headers: Mapping[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]


class Receiver:
    """Responds with each of `statuses` in turn, then with 204."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.deliveries: list[Delivery] = []
        self._arrived = asyncio.Condition()

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/hook", self._take)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = int(self._runner.addresses[0][1])
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook"

    async def wait(self, deliveries: int, limit_s: float = WAIT_LIMIT_S) -> list[Delivery]:
        """Waits until this many deliveries have arrived."""
        async with asyncio.timeout(limit_s), self._arrived:
            await self._arrived.wait_for(lambda: len(self.deliveries) >= deliveries)
        return self.deliveries

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()
        status = self.statuses.pop(0) if self.statuses else 204
        async with self._arrived:
            self.deliveries.append(
                Delivery({name.lower(): v for name, v in request.headers.items()}, body)
            )
            self._arrived.notify_all()
        return web.Response(
            status=status, headers={"location": self.url} if 300 <= status < 400 else {}
        )
