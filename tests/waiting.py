"""Waits that nothing in the product gives an event for."""

import asyncio
import time
from collections.abc import Callable

from tests.limits import WAIT_LIMIT_S

_TURNS_S = 0.02
_PAUSE_S = 0.001


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()`. Whatever is to change it runs on the same event loop.

    That mostly takes a few of its turns. What takes longer waits for a timer or for another
    process, and turns without end would take the core that this one needs.
    """
    turns_until_s = time.perf_counter() + _TURNS_S
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not holds():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0 if time.perf_counter() < turns_until_s else _PAUSE_S)
