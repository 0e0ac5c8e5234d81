"""Cancels work for callers that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from api.errors import ClientGone

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up.

    Args:
        receive: the ASGI channel of the request, whose body was already read.
        work: what to await.

    Raises:
        ClientGone: the caller hung up.
    """
    task, is_working = asyncio.current_task(), True
    assert task is not None, "routes run in tasks; this is a bug"

    def cancel(watcher: asyncio.Task[None]) -> None:
        if is_working and not watcher.cancelled():
            task.cancel()

    watcher = asyncio.create_task(_until_disconnected(receive))
    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        # Takes back only its own cancellation. The server cancels tasks too, when it stops.
        if watcher.done() and task.uncancel() == 0:
            raise ClientGone from None
        raise
    finally:
        is_working = False
        watcher.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
