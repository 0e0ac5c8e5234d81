"""Cancels work for callers that hang up, or whose keys are revoked meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from api.errors import ClientGone
from shared.errors import PenstockError

CHECK_S = 2.0
"""How often a caller that waits is checked again."""
T = TypeVar("T")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], object] = lambda: None
) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up.

    Args:
        receive: the ASGI channel of the request, whose body was already read.
        work: what to await.
        check: is called every CHECK_S. It raises PenstockError once the caller may not wait any
            more, which cancels `work` too.

    Raises:
        ClientGone: the caller hung up.
        PenstockError: what `check` raised.
    """
    task, is_working, refused = asyncio.current_task(), True, list[PenstockError]()
    assert task is not None, "routes run in tasks; this is a bug"

    def cancel(watcher: asyncio.Task[None]) -> None:
        if is_working and not watcher.cancelled():
            task.cancel()

    loop = asyncio.get_running_loop()
    timer = loop.call_later(CHECK_S, lambda: check_again())

    def check_again() -> None:
        nonlocal timer
        try:
            check()
        except PenstockError as error:
            refused.append(error)
            task.cancel()
        else:
            timer = loop.call_later(CHECK_S, check_again)

    watcher = asyncio.create_task(_until_disconnected(receive))
    watcher.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        # Takes back only its own cancellation. The server cancels tasks too, when it stops.
        if (refused or watcher.done()) and task.uncancel() == 0:
            raise (refused[0] if refused else ClientGone()) from None
        raise
    finally:
        is_working = False
        timer.cancel()
        watcher.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
