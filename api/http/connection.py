"""Cancels a request's work when the caller hangs up or may no longer wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from api.errors import ClientGone
from shared.errors import PenstockError

CHECK_S = 2.0
"""Interval at which a waiting caller is checked again."""
T = TypeVar("T")


async def while_connected(
    receive: Receive, work: Coroutine[Any, Any, T], check: Callable[[], object] = lambda: None
) -> T:
    """Awaits `work`, and cancels it as soon as the caller hangs up.

    Args:
        receive: the request's ASGI channel. The body has already been read.
        check: called every CHECK_S. It raises PenstockError once the caller may no longer wait,
            which also cancels `work`.

    Raises:
        PenstockError: raised by `check`.
    """
    task = asyncio.current_task()
    assert task is not None, "routes run in tasks; this is a bug"
    watch = _Watch(receive, check, task)
    try:
        return await work
    except asyncio.CancelledError:
        # Clears only the cancellation requested here. The server also cancels tasks when it shuts
        # down.
        if watch.refused is not None and task.uncancel() == 0:
            raise watch.refused from None
        raise
    finally:
        watch.stop()


class _Watch:
    """Cancels a request's task once its caller hangs up or may no longer wait.

    Starts in the next event loop iteration, by which time any work that does not wait has finished.
    The watch references itself through a handle, a timer, and a task. `stop` cancels all three.
    Otherwise, all of a request's objects would stay in memory until the next garbage collection.
    """

    def __init__(
        self, receive: Receive, check: Callable[[], object], task: asyncio.Task[Any]
    ) -> None:
        self.refused: PenstockError | None = None
        """The error that canceled the task. None if it was not canceled."""
        self._receive = receive
        self._check = check
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Task[None] | None = None
        self._timer: asyncio.Handle | None = self._loop.call_soon(self._begin)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._listening is not None:
            self._listening.remove_done_callback(self._on_disconnect)
            self._listening.cancel()
            self._listening = None

    def _begin(self) -> None:
        self._listening = self._loop.create_task(_until_disconnected(self._receive))
        self._listening.add_done_callback(self._on_disconnect)
        self._timer = self._loop.call_later(CHECK_S, self._check_again)

    def _on_disconnect(self, listening: asyncio.Task[None]) -> None:
        if not listening.cancelled():
            self._cancel(ClientGone())

    def _check_again(self) -> None:
        try:
            self._check()
        except PenstockError as error:
            self._cancel(error)
        else:
            self._timer = self._loop.call_later(CHECK_S, self._check_again)

    def _cancel(self, reason: PenstockError) -> None:
        if self.refused is None:
            self.refused = reason
            self._task.cancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
