"""Waits for conditions without an event in the product."""

import asyncio
import time
from collections.abc import Callable

from tests.limits import WAIT_LIMIT_S

_TURNS_S = 0.02
_PAUSE_S = 0.001


async def until(holds: Callable[[], bool]) -> None:
    """Returns once `holds()`. The code that makes it true must run on the same event loop.

    That usually takes a few of its turns. Longer waits depend on a timer or on another process, and
    turns without end would take the core that this one needs.
    """
    turns_until_s = time.perf_counter() + _TURNS_S
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not holds():  # noqa: ASYNC110  no event says so
            await asyncio.sleep(0 if time.perf_counter() < turns_until_s else _PAUSE_S)
